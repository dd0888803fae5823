"""QFlash Figure 4: attention made integer one operation at a time, V0 to V4, each a kernel of the same tile loop.

V0 float16. V1 int8 Q K. V2 int8 Q K and P V. V3 with the integer exponential, accumulators still float32, rescaled by
a float power of two. V4 with integer accumulation: `intflash_online`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from intflash.backends.triton import mixed, steps
from intflash.backends.triton.constants import constants_launch
from intflash.backends.triton.launch import Launch
from intflash.backends.triton.steps import (
    add_row_sums,
    add_value_sums,
    make_steps,
    offset_row,
    offsets,
    peaks,
    row_sum,
    t_max,
)
from intflash.backends.triton.streaming import Statistics, streaming_launch
from intflash.backends.triton.tiles import natural_order
from intflash.numerics.triton import INT32_MIN, K0, NEVER, ceil_octave, exp_p8
from intflash.problem import Problem
from intflash.quant import Recipe

VARIANTS = ("V0 float16", "V1 int8 QK", "V2 int8 QK, PV", "V3 integer exp", "V4 integer accumulation")
NO_STATISTICS = Statistics(None, None)


@triton.jit
def _initial(BM: tl.constexpr, BDV: tl.constexpr):
    return tl.full([BM], -(1 << 30), tl.int32), tl.zeros([BM, BDV], tl.float32), tl.zeros([BM], tl.float32)


@triton.jit
def _step(state, s, C, bias, present, v, PLAIN: tl.constexpr):
    """`intflash_online`'s step with float32 l and acc: 8-bit P by the integer exponential of the raised octave."""
    octave, acc, l = state
    peak, s_peak = tl.full([s.shape[0]], NEVER, tl.int64), tl.full([s.shape[0]], INT32_MIN, tl.int32)
    peak, s_peak = peaks(peak, s_peak, s, C, bias, present, PLAIN)
    raised = tl.maximum(octave, ceil_octave(t_max(peak, s_peak, C, PLAIN)))
    alpha = tl.exp2(tl.maximum(octave - raised, -126).to(tl.float32))
    p = natural_order(exp_p8(s, C, offsets((-(raised.to(tl.int64) << 32) + K0)[:, None], bias, present)))
    product = tl.dot(p, v, out_dtype=tl.int32)
    product += offset_row(add_value_sums(tl.zeros([16, v.shape[1]], tl.int32), v))
    sums = row_sum(add_row_sums(tl.full([s.shape[0], 16], 128 * s.shape[1], tl.int32), p, None))
    l = l * alpha + sums.to(tl.float32)
    return raised, acc * alpha[:, None] + product.to(tl.float32), l


@triton.jit
def _result(state):
    octave, acc, l = state
    return acc, l.to(tl.int32), octave.to(tl.int64) << 32


V3 = make_steps(_initial, None, None, _step, _result, 128)


def variant(name: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Callable[[], object], Tensor]:
    """A call that runs the variant's kernel on prequantized inputs, and the float16 tensor it fills."""
    out = torch.empty_like(q, dtype=torch.float16)
    method = {"V0": "fp16", "V1": "int_flash_half", "V2": "int_flash_full"}.get(name[:2], "intflash_online")
    recipe = Recipe(v="none") if name.startswith("V1") else Recipe()
    if name.startswith(("V0", "V1")):
        q, k, v = (x.half() for x in (q, k, v))
    problem = Problem(method, q, k, v, q.shape[3] ** -0.5, recipe=recipe, out_dtype=torch.float16)
    if method == "fp16":
        return partial(Launch.run, mixed.mixed_launch(problem, mixed.operands(problem), out, NO_STATISTICS)), out
    problem = problem.quantized()
    if method in mixed.STEPS:
        return partial(Launch.run, mixed.mixed_launch(problem, mixed.operands(problem), out, NO_STATISTICS)), out
    problem = replace(problem, v=replace(problem.v, data=mixed.key_major(problem.v.data)))
    launch, constants, _ = constants_launch(problem)
    launch.run()
    chosen = V3 if name.startswith("V3") else steps.ONLINE
    return partial(Launch.run, streaming_launch(problem, chosen, constants, out, NO_STATISTICS)), out
