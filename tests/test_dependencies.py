"""Imports go in one direction, and `import intflash` stays light."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1] / "src" / "intflash"

# What each layer of the package may import. Later layers may import earlier ones.
LAYERS = {
    "errors": set(),
    "dense": {"errors"},
    "numerics": {"errors", "dense"},
    "quant": {"errors", "dense", "numerics"},
    "problem": {"numerics", "quant"},
    "methods": {"errors", "numerics", "quant", "problem"},
    "validate": {"errors", "dense", "numerics", "quant", "methods"},
    "backends": {"_native", "errors", "numerics", "quant", "problem", "methods", "validate"},
    "masks": {"errors", "numerics"},
    "call": {"errors", "numerics", "quant", "problem", "methods", "backends", "masks", "validate"},
    "inductor": set(),
    "op": {"errors", "call", "inductor", "masks", "validate", "methods", "problem", "quant", "backends", "numerics"},
    "api": {"errors", "quant", "backends", "methods", "call", "op"},
    "inventory": {"backends", "methods", "call"},
    "distributed": {
        "errors",
        "numerics",
        "quant",
        "problem",
        "methods",
        "backends",
        "masks",
        "validate",
        "call",
        "op",
        "api",
        "models",
    },  # fmt: skip
}

# Which other backends each folder of `backends` may import. The CUDA kernels run without Triton.
ROOMS = {"cuda": {"gpu"}, "triton": {"gpu"}} | dict.fromkeys(("cpu", "gpu", "portable", "vortex", "reference"), set())
SHARED = {"base", "cache", "features", "native"}


def imports(path: pathlib.Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("intflash")):
            parts = absolute(node, path).split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("intflash.")}
    return found


def absolute(node: ast.ImportFrom, path: pathlib.Path) -> str:
    """Returns the full name of the module that a statement of this file imports from."""
    if not node.level:
        return node.module
    package = (ROOT.name, *path.relative_to(ROOT).parts[:-1])
    return ".".join((*package[: len(package) - node.level + 1], *filter(None, (node.module,))))


@pytest.mark.parametrize("room", ROOMS)
def test_backends_do_not_import_each_other(room):
    place = ROOT / "backends" / room
    for path in place.rglob("*.py") if place.is_dir() else [place.with_suffix(".py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and absolute(node, path).startswith("intflash.backends"):
                parts = absolute(node, path).split(".")
                found = {parts[2]} if len(parts) > 2 else {alias.name for alias in node.names}
                beyond = found - ROOMS[room] - SHARED - {room}
                assert not beyond, f"{path.relative_to(ROOT)} imports {sorted(beyond)}"


def test_relative_imports_are_read():
    node = ast.parse("from ..triton import steps").body[0]
    assert absolute(node, ROOT / "backends" / "cuda" / "x.py") == "intflash.backends.triton"


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_go_in_one_direction(layer):
    files = [ROOT / f"{layer}.py"] if (ROOT / f"{layer}.py").exists() else (ROOT / layer).rglob("*.py")
    for path in files:
        beyond = imports(path) - LAYERS[layer] - {layer}
        assert not beyond, f"{path.relative_to(ROOT)} imports {sorted(beyond)}"


def test_only_the_reference_imports_the_methods_steps():
    for path in (ROOT / "backends").rglob("*.py"):
        if path.name != "reference.py":
            assert "intflash.methods.arrays" not in path.read_text(), path


def test_import_is_light():
    heavy = ("matplotlib", "sklearn", "typer", "timm", "transformers", "triton")
    code = f"import sys, intflash; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
