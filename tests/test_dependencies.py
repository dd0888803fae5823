"""Imports point one way, and `import intflash` stays light."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1] / "src" / "intflash"

# What each layer may import of the package; later layers may import earlier ones.
LAYERS = {
    "errors": set(),
    "numerics": {"errors"},
    "quant": {"errors", "numerics"},
    "problem": {"quant"},
    "methods": {"errors", "numerics", "quant", "problem"},
    "validate": {"errors", "quant", "problem", "methods"},
    "tape": {"quant"},
    "backends": {"_native", "errors", "numerics", "quant", "problem", "methods", "tape", "validate"},
    "masks": {"errors"},
    "plans": {"quant", "tape"},
    "repeats": {"quant", "problem", "backends", "validate"},
    "gradients": {"quant"},
    "pipeline": {
        "errors",
        "numerics",
        "quant",
        "problem",
        "methods",
        "backends",
        "masks",
        "validate",
        "plans",
        "repeats",
        "gradients",
    },
    "ops": {"pipeline", "quant", "methods", "problem", "gradients"},
    "api": {"errors", "quant", "backends", "pipeline", "ops"},
    "inventory": {"backends", "methods", "pipeline"},
}


def imports(path: pathlib.Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("intflash"):
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("intflash.")}
    return found


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_one_way(layer):
    files = [ROOT / f"{layer}.py"] if (ROOT / f"{layer}.py").exists() else (ROOT / layer).rglob("*.py")
    for path in files:
        beyond = imports(path) - LAYERS[layer] - {layer}
        assert not beyond, f"{path.relative_to(ROOT)} imports {sorted(beyond)}"


def test_reference_steps_serve_no_other_backend():
    for path in (ROOT / "backends").rglob("*.py"):
        if path.name != "reference.py":
            assert "intflash.methods.arrays" not in path.read_text(), path


def test_import_is_light():
    heavy = ("matplotlib", "sklearn", "typer", "timm", "transformers", "triton")
    code = f"import sys, intflash; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
