"""The kernel that writes the codes of one tensor, which ranks send to each other."""

import json
import pathlib
import subprocess
import sys

import pytest
import torch

triton = pytest.importorskip("triton")

from benchmarks import sass  # noqa: E402
from intflash.backends.triton.quantize import codes_launch  # noqa: E402
from intflash.quant.quantizers import codes_of  # noqa: E402

HERE = pathlib.Path(__file__).parent


def test_codes_in_the_interpreter():
    """In a process of its own: Triton decides at import whether it interprets."""
    command = [sys.executable, "-W", "ignore", str(HERE / "codes_cases.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 14 and {name: wrong for name, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize("keys_contiguous", [False, True])
def test_it_compiles(keys_contiguous):
    """Codes come from a float's bits, not from a conversion that ptxas may round otherwise."""
    x = torch.zeros(1, 3, 300, 128, dtype=torch.float16)
    codes = torch.zeros(1, 3, 128, 304, dtype=torch.int8)[..., :300].mT if keys_contiguous else x.to(torch.int8)
    launch = codes_launch(x, torch.ones(1, 1, 1, 1), codes, 16 if keys_contiguous else 1)
    kernel = sass.compiled(launch, 90)
    assert sass.narrow_float_stores(kernel.asm["ptx"]) == []
    instructions = sass.disassemble(kernel, 90).instructions
    assert [i.text for i in instructions if i.opcode in ("F2I", "F2IP")] == []
    stores = [i.text for i in instructions if i.opcode == "STG"]
    assert stores and all(".128" in text or ".64" in text for text in stores)  # no single bytes


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [(1, 1, 1, 1), (2, 3, 1, 1), (2, 3, 1000, 1), (2, 3, 1, 72)])
def test_codes_on_a_gpu(dtype, scale):
    x = torch.randn(2, 1000, 3, 72, device="cuda").to(dtype).transpose(1, 2)
    s = torch.rand(scale, device="cuda") * 0.01 + 0.005
    for out, padding in (
        (torch.zeros(2, 3, 1000, 72, dtype=torch.int8, device="cuda"), 1),
        (torch.zeros(2, 3, 72, 1008, dtype=torch.int8, device="cuda")[..., :1000].mT, 16),
    ):
        codes_launch(x, s, out, padding).run()
        assert torch.equal(out, codes_of(x.float(), s, 8, "exact"))
