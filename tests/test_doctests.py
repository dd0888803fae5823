"""Every example in a docstring runs as printed. Examples of public names run in a fresh interpreter, with their own
imports.
"""

import doctest
import importlib
from pathlib import Path

import pytest

import intflash
from intflash.backends import triton

ROOT = Path(intflash.__file__).parent
WITH_EXAMPLES = sorted(path for path in ROOT.rglob("*.py") if ">>>" in path.read_text())
PUBLIC = {  # where a name is imported from -> names; None: all of `__all__`
    "intflash": None,
    "intflash.digits": None,
    "intflash.distributed": None,
    "intflash.backends.cpu": ("instruction_sets",),
    "intflash.bench.demo": ("run_demo",),
}


def documented():
    for place, names in PUBLIC.items():
        module = importlib.import_module(place)
        for name in names or module.__all__:
            if ">>>" in (getattr(getattr(module, name), "__doc__", None) or ""):
                yield pytest.param(getattr(module, name), id=f"{place}.{name}")


@pytest.mark.parametrize("thing", list(documented()))
def test_public_examples_need_no_more_than_they_say(thing):
    runner = doctest.DocTestRunner()
    for example in doctest.DocTestFinder().find(thing, thing.__name__, globs={"__name__": "__main__"}):
        runner.run(example)
    assert runner.tries > 0 and runner.failures == 0


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_examples(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    reason = triton.BACKEND.unavailable() if "triton" in parts else None
    if reason is not None and "it needs Triton" in reason:  # its modules cannot be imported
        pytest.skip(reason)
    result = doctest.testmod(pytest.importorskip(name, exc_type=ModuleNotFoundError))
    assert result.attempted > 0 and result.failed == 0


def test_every_public_name_has_an_example():
    without = [name for name in intflash.__all__ if ">>>" not in getattr(intflash, name).__doc__]
    assert without == ["BackendError", "InputError"]
