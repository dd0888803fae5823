"""The outputs of the papers' own kernels, recorded on an H200 (tests/golden)."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import intflash
from intflash import QTensor
from intflash.methods import get_method, int_flash, qflash
from intflash.numerics.exp import LOG2_E
from intflash.problem import Problem

GOLDEN = Path(__file__).parents[1] / "golden"


def golden(file: str, case: str) -> dict[str, Tensor]:
    with np.load(GOLDEN / file) as data:
        return {name.split(".")[1]: torch.tensor(data[name]) for name in data if name.startswith(f"{case}.")}


def qflash_problem(case: str) -> tuple[Problem, dict[str, Tensor]]:
    g = golden("qflash_published.npz", case)
    sm_scale = g["q"].shape[3] ** -0.5
    q, k, v = (QTensor(g[n], s) for n, s in zip("qkv", g["scales"][:3], strict=True))
    # the recorded bias is in score units; in natural units it is bias * sm_scale / log2(e)
    bias = g["bias"].double() * g["scales"][3] / LOG2_E if "bias" in g else None
    return Problem("qflash", q, k, v, sm_scale, bias_float=bias, out_dtype=torch.int8), g


QFLASH_CASES = {"a2": 19, "a7": 12, "randn256": 1, "randn100": 1, "swin_bias": 4}


@pytest.mark.parametrize("case", QFLASH_CASES)
def test_qflash_constants(case):
    problem, g = qflash_problem(case)
    c = qflash.constants(problem)
    assert [int(x) for x in (c.rs, c.exp_m, c.req_m, c.rel_m, c.rel_m)] == g["constants"].tolist()


@pytest.mark.parametrize("case", QFLASH_CASES)
def test_qflash_equals_the_authors_kernel(case):
    """Bit for bit, except where acc is a multiple of l: the kernel's approximate division may truncate to one less."""
    problem, g = qflash_problem(case)
    acc, l, _ = qflash.accumulate(problem, qflash.PIPELINE)
    out = get_method("qflash").reference(problem).out
    differ = out != g["o"]
    assert int(differ.sum()) == QFLASH_CASES[case]
    assert (acc % l == 0)[differ].all()
    ours, theirs = out[differ].int(), g["o"][differ].int()
    assert torch.equal(theirs, ours - ours.sign())


def test_qflash_through_the_api():
    problem, g = qflash_problem("a2")
    out = intflash.attention(
        problem.q, problem.k, problem.v, method="qflash", backend="reference", out_dtype=torch.int8, out_scale="bound"
    )
    assert torch.equal(out.data, get_method("qflash").reference(problem).out)
    assert torch.equal(out.scale, problem.v.scale)


def int_flash_problem(case: str, method: str) -> tuple[Problem, dict[str, Tensor]]:
    g = golden("intflash_published.npz", case)
    q, k = (QTensor(g[n], g[f"{n}s"].float()[..., None], "token") for n in "qk")
    v = g["vf"] if method == "int_flash_half" else QTensor(g["v"], g["vs"].float(), "head")
    causal = 0 if case == "c128" else None
    return Problem(method, q, k, v, g["q"].shape[3] ** -0.5, causal=causal), g


@pytest.mark.parametrize(
    "case, method",
    [("n256", "full"), ("u256", "full"), ("n256", "half"), ("u256", "half"), ("c128", "half")],
)
def test_int_flash_agrees_with_the_authors_kernel(case, method):
    """Within one unit of the float16 output, or one step of a P that the GPU's exp2 rounded the other way.

    The output is stored as float16: half a unit, 2^-11 relative, from the exact value. The GPU's exp2 is
    approximate (2^-22), which moves a P across a rounding boundary now and then: one step of P, 1/127 (full)
    or 2^-11 (half), moves the output by at most that times |V - O| / l, with l >= 1.
    """
    problem, g = int_flash_problem(case, f"int_flash_{method}")
    out = get_method(problem.method).reference(problem).out
    error = (out - g[method].float()).abs()
    step = 1 / int_flash.R if method == "full" else 2.0**-11
    v = problem.v.float() if isinstance(problem.v, Tensor) else problem.v.dequantize()
    unit = 2.0**-11 * g[method].float().abs() + 2.0**-14 * v.abs().max()
    assert (error <= unit + 2 * step * v.abs().max() * (error > unit)).all()
    # such places are rare: nearly all of the difference is float16 rounding, which alone leaves about 74 dB
    assert float(20 * torch.log10(g[method].float().norm() / error.norm())) > 72.5


def test_int_flash_depends_on_keys_per_tile():
    """Another number of keys per tile rounds P against other maxima: full loses 20 dB of agreement."""
    problem, g = int_flash_problem("n256", "int_flash_full")
    other = int_flash.online(problem, int_flash.quantized_p, problem.v.dequantize(), 32).out
    error = (other - g["full"].float()).norm()
    assert float(20 * torch.log10(g["full"].float().norm() / error)) < 55
