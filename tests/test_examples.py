"""Every example runs unchanged and prints what it promises."""

import ast
import json
import subprocess
import sys

import pytest

from documents import ROOT, run_script

EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))
# script -> packages that it needs, and text of its output that appears only after it has done its work
NEEDS = {
    "calibrate_and_deploy.py": ("torch", "gets the same class: True"),
    "context_parallel.py": ("transformers", "processes, the bits of one: True"),
    "diffusers_pipeline.py": ("diffusers", "in 8 layers of Attention"),
    "integer_timm_vit.py": ("timm", "one image alone has the same bits: True"),
    "integer_transformers_bert.py": ("transformers", "padding changes them: False"),
    "own_module.py": ("torch", "torch.Size([3, 4, 50, 32]) on backend"),
    "timm_swin.py": ("timm", "4 window attention layers, static scales"),
    "timm_vit.py": ("timm", "same classes: True"),
    "transformers_bert.py": ("transformers", "other padding tokens change them: False"),
    "transformers_llama_generate.py": ("transformers", "(static scales) in 2 layers of LlamaAttention"),
}
SLOW = {"calibrate_and_deploy.py", "diffusers_pipeline.py", "timm_swin.py"}


def test_every_example_is_listed():
    assert list(NEEDS) == SCRIPTS
    text = (EXAMPLES / "README.md").read_text()
    missing = [p.name for p in EXAMPLES.iterdir() if p.suffix in (".py", ".ipynb") and f"({p.name})" not in text]
    assert missing == []


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full if n in SLOW else ()) for n in SCRIPTS])
def test_script(name, monkeypatch, capfd):
    library, said = NEEDS[name]
    pytest.importorskip(library)
    monkeypatch.setattr("sys.argv", [str(EXAMPLES / name)])
    run_script(EXAMPLES / name)
    assert said in capfd.readouterr().out


@pytest.mark.full
def test_context_parallel_under_torchrun():
    script = EXAMPLES / "context_parallel.py"
    code = f"from documents import *; allow_torchvision(); run_script(Path({str(script)!r}))"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    command = [sys.executable, *torchrun, sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT / "tests", timeout=300)
    assert "2 processes, the bits of one: True" in done.stdout, done.stderr[-2000:]


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_is_short(name):
    assert len((EXAMPLES / name).read_text().splitlines()) < 60


def test_notebook(capsys, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    notebook = json.loads((EXAMPLES / "accuracy_of_methods.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    names = {}
    for cell in cells:
        ast.parse(cell)
        exec(compile(cell, "accuracy_of_methods.ipynb", "exec"), names)
    results = names["results"]
    # 16-bit P reaches the ceiling without a sink, and 8-bit P cannot represent the keys beside a sink of half the
    # weight.
    assert abs(results["intflash"][0] - results["exact softmax on int8 inputs"][0]) < 0.5
    half = names["SINKS"].index(0.5)
    assert results["intflash_p8"][half] < results["intflash"][half] - 10
    assert not any(cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code")
