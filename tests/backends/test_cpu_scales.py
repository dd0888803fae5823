"""The native CPU kernels' scales: in any memory, of any shape, of any size; and the check beside the quantization."""

import pytest
import torch

from intflash import InputError, QTensor, Recipe
from intflash.backends import cpu, reference
from intflash.call import prepare
from oracle import randn

ISAS = cpu.instruction_sets()
pytestmark = pytest.mark.skipif(not ISAS, reason="the native module was not built")

ENDS = torch.tensor([0, 3, 7, 9, 20, 0], dtype=torch.int32)[::2]
HEADS = torch.tensor([0.02, 9.0, 0.03, 9.0, 0.05, 9.0, 0.01, 9.0])[::2]


@pytest.mark.parametrize(
    "options",
    [
        dict(cu_seqlens_q=ENDS, cu_seqlens_k=ENDS),
        dict(recipe=Recipe(v="head", v_scale=HEADS)),
        dict(recipe=Recipe(v="head", v_scale=HEADS.double().view(1, 4, 1, 1))),
        dict(recipe=Recipe(v_scale=torch.tensor(0.03, dtype=torch.float64))),
    ],
    ids=["offsets", "heads", "heads, float64", "tensor, float64"],
)
def test_scales_and_offsets_of_any_memory(options):
    problem = prepare(*randn(1, 4, 20, 16), **options)[0]
    assert torch.equal(cpu.run(problem).out, reference.BACKEND.run(problem).out)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16])
@pytest.mark.parametrize("shape", [(1, 4, 1, 1), (2, 4, 1, 1), (1, 1, 1, 16)], ids=str)
def test_output_scales_of_heads_and_channels(shape, dtype):
    scale = torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 0.05 + 0.01
    problem = prepare(*randn(2, 4, 20, 16), out_dtype=dtype, out_scale=scale)[0]
    for isa in ISAS:
        assert torch.equal(cpu.run(problem, isa=isa, threads=1).out, reference.BACKEND.run(problem).out)


@pytest.mark.parametrize("method", cpu.FLASH)
@pytest.mark.parametrize("unit", [0.6, 0.2, 0.05, 0.01, 1e-3, 1e-5])
def test_flash_registers_that_wrap(method, unit):
    """Scores at both ends of their range, in units from large to small."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randint(0, 2, (1, 2, n, 128), generator=g).mul(254).sub(127).to(torch.int8) for n in (17, 90, 90))
    k[:, :, 3], k[:, :, 50] = q[:, :, 0], -q[:, :, 0]
    tensors = [QTensor(x, s) for x, s in ((q, unit / 1.4426950408889634), (k, 1.0), (v, 0.02))]
    problem = prepare(*tensors, method=method, scale=1.0, out_dtype=torch.int8, out_scale="bound")[0]
    for isa in ISAS:
        assert torch.equal(cpu.run(problem, isa=isa, threads=1).out, reference.BACKEND.run(problem).out)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", "qkv")
def test_a_bad_value_of_large_inputs_is_found_by_any_number_of_threads(name, threads):
    inputs = {n: torch.ones(1, 4, 300, 64) for n in "qkv"}
    inputs[name][0, 1, 200, 3] = float("nan")
    problem = prepare(**inputs)[0]
    with pytest.raises(InputError, match=f"{name} must be finite, got 1 non-finite"):
        cpu.run(problem, threads=threads)
