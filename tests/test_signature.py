"""`attention` as its readers and their type checkers see it: signature, docstring, overloads, py.typed."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import subprocess
import sys
import textwrap
import typing
from pathlib import Path

import pytest

import intflash
from intflash import api, call

SIGNATURE = inspect.signature(intflash.attention)
ROOT = Path(__file__).parents[1]


def test_the_signature_is_the_list_of_arguments():
    found = [(p.name, p.default, p.kind is p.POSITIONAL_OR_KEYWORD) for p in SIGNATURE.parameters.values()]
    assert found == [(a.name, a.default, a.by_position) for a in call.ARGUMENTS]
    assert all(p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in SIGNATURE.parameters.values())


def test_the_docstring_explains_each_argument_once_and_in_order():
    arguments = textwrap.dedent(intflash.attention.__doc__.split("Args:\n")[1].split("\n\n")[0])
    named = [name for names in re.findall(r"^(\w+(?:, \w+)*): ", arguments, re.M) for name in names.split(", ")]
    assert named == list(call.NAMES)


def test_annotations_agree_with_the_list():
    """A type of the list is the annotation that Python readers see. Scalars and strings beside tensors are op.py's."""
    python = {
        "Tensor": "Tensor | QTensor", "Tensor?": "Tensor | None", "bool": "bool", "bool?": "bool | None",
        "float?": "float | None", "str": "str", "str?": "str | None", "Recipe?": "Recipe | None",
        "ScalarType?": "torch.dtype | None",
        "int[2]?": "tuple[int | None, int | None] | None",
    }  # fmt: skip
    expected = {a.name: python[a.schema] for a in call.ARGUMENTS} | {"out_scale": "Tensor | float | str | None"}
    assert {p.name: p.annotation for p in SIGNATURE.parameters.values()} == expected


def test_options_of_the_overloads_are_the_other_arguments():
    """`Options` holds the arguments by name on which no overload depends, with `attention`'s annotations."""
    spelled_out = {"out_dtype", "return_lse"}
    by_name = [a.name for a in call.ARGUMENTS if not a.by_position and a.name not in spelled_out]
    assert list(api.Options.__annotations__) == by_name
    for name, kind in api.Options.__annotations__.items():
        annotation = kind.__forward_arg__ if isinstance(kind, typing.ForwardRef) else kind
        assert annotation == SIGNATURE.parameters[name].annotation, name


REVEALED = """
import torch, intflash
from intflash import QTensor
x: torch.Tensor
c: QTensor
flag: bool
kind: torch.dtype
reveal_type(intflash.attention(x, x, x))  # Tensor
reveal_type(intflash.attention(x, x, x, None, True, 0.1, method="fp32", check_finite=False))  # Tensor
reveal_type(intflash.attention(x, x, x, return_lse=True))  # tuple[Tensor, Tensor]
reveal_type(intflash.attention(c, c, c))  # QTensor
reveal_type(intflash.attention(c, c, c, return_lse=True))  # tuple[QTensor, Tensor]
reveal_type(intflash.attention(x, c, c))  # Tensor
reveal_type(intflash.attention(x, c, c, return_lse=True))  # tuple[Tensor, Tensor]
reveal_type(intflash.sdpa(x, c, c))  # Tensor
reveal_type(intflash.attention(x, x, x, out_dtype=kind))  # Tensor | QTensor
reveal_type(intflash.attention(x, x, x, out_dtype=kind, return_lse=True))  # tuple[Tensor | QTensor, Tensor]
reveal_type(intflash.attention(x, x, x, return_lse=flag))  # Tensor | QTensor | tuple[Tensor | QTensor, Tensor]
reveal_type(intflash.sdpa(x, x, x))  # Tensor
reveal_type(intflash.quantize(x))  # QTensor
reveal_type(intflash.which_backend(x, x, x))  # str
reveal_type(intflash.which_method(x, x, x))  # str
intflash.attention(x, x, x, window=3)  # error: call-overload
intflash.attention(x, x, x, None, False, None, "fp32")  # error: call-overload
intflash.attention(x, x, x, method=3)  # error: call-overload
intflash.attention(x, x)  # error: call-overload
"""


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_type_checkers_know_what_attention_returns(tmp_path):
    """Checks what mypy reports for each line of a user's program."""
    program = tmp_path / "program.py"
    program.write_text(REVEALED)
    options = ["--no-incremental", "--follow-imports=silent", "--show-error-codes", "--hide-error-context"]
    assert (Path(intflash.__file__).parent / "py.typed").exists()
    run = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(program)],
        capture_output=True, text=True, cwd=tmp_path,
        env=os.environ | {"MYPYPATH": str(ROOT / "src")},
    )  # fmt: skip
    said: dict[int, str] = {}
    for line in run.stdout.splitlines():
        if found := re.match(r"program\.py:(\d+): (?:error|note): (.*)", line):
            said.setdefault(int(found[1]), found[2])
    for number, line in enumerate(REVEALED.splitlines(), 1):
        if "# error: " in line:
            assert line.split("# error: ")[1] in said.get(number, ""), (line, run.stdout)
        elif "reveal_type" in line:
            kinds = re.sub(r"\b(?:torch\._tensor|intflash[\w.]*)\.", "", said.get(number, "")).replace("builtins.", "")
            assert kinds == f'Revealed type is "{line.split("# ")[1]}"', (line, run.stdout)
        else:
            assert number not in said, (line, run.stdout)
