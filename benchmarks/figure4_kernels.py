"""QFlash Figure 4: attention made integer one operation at a time, V0 to V4, each as a kernel of the same tile loop.

V0 is float16. V1 has int8 Q K. V2 has int8 Q K and P V. V3 has the integer exponential, but float32 accumulators, which
are rescaled by a float power of two. V4 accumulates integers: `intflash_online`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from intflash.backends.gpu.tensors import contiguous_keys
from intflash.backends.triton.constants import constants_launch
from intflash.backends.triton.intflash_steps import (
    add_row_sums,
    add_value_sums,
    granule,
    make_steps,
    offset_row,
    row_sum,
)
from intflash.backends.triton.tile_loop import Statistics, tile_loop_launch
from intflash.bench.gpu_launches import Kernel, make_kernel, of_launch
from intflash.numerics.triton import NO_OCTAVE
from intflash.problem import Problem
from intflash.quant import Recipe

VARIANTS = {
    "V0 float16": "fp16",
    "V1 int8 QK": "int_flash_half",
    "V2 int8 QK, PV": "int_flash_full",
    "V3 integer exp": None,  # a kernel of this module
    "V4 integer accumulation": "intflash_online",
}
_RECIPES = {"int_flash_half": Recipe("tensor", "tensor", "none")}


@triton.jit
def _initial(BM: tl.constexpr, BDV: tl.constexpr):
    return tl.full([BM], NO_OCTAVE, tl.int32), tl.zeros([BM, BDV], tl.float32), tl.zeros([BM], tl.float32)


@triton.jit
def _step(state, s, C, bias, present, v, PLAIN: tl.constexpr):
    """`intflash_online`'s step with float32 l and acc, and the 8-bit P of the new octave."""
    octave, acc, l = state
    raised, p = granule(octave, s, C, bias, present, PLAIN)
    alpha = tl.exp2(tl.maximum(octave - raised, -126).to(tl.float32))
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


def variants(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Kernel]:
    """Returns the kernels of V0 to V4 in the Triton backend's tile loop with float16 output, and, by the variant's
    and the method's name, the kernel that the API uses for a method where that is another backend.
    """
    inputs = [x.half() for x in (q, k, v)]
    found, others = {}, {}
    for name, method in VARIANTS.items():
        if method is None:
            found[name] = _v3_kernel(*inputs)
            continue
        make = partial(
            make_kernel,
            method,
            *inputs,
            recipe=_RECIPES.get(method, Recipe("tensor", "tensor", "tensor")),
            out_dtype=torch.float16,
        )
        found[name] = make(backend="triton")
        chosen = make()
        if chosen.backend != "triton":
            others[f"{name[:2]} ({method})"] = chosen
    return found | others


def _v3_kernel(q: Tensor, k: Tensor, v: Tensor) -> Kernel:
    problem = Problem("intflash_online", q, k, v, q.shape[3] ** -0.5, out_dtype=torch.float16).quantized()
    problem = replace(problem, v=replace(problem.v, data=contiguous_keys(problem.v.data, 128)))
    fill, constants, _ = constants_launch(problem)
    fill.run()
    out = torch.empty_like(q)
    return of_launch(tile_loop_launch(problem, V3, constants, out, Statistics(None, None)), out)
