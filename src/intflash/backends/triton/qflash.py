"""`qflash` and `iflash` on the tile loop: the papers' integer pipelines, with wrapping int32 and 64-bit rescaling.

The kernels have no division instruction, which a GPU computes through floats. The row's divisor l uses an integer
reciprocal, and the divisor rs, the same for all rows, a reciprocal that is computed with the constants. Absent keys
keep the score -2^20 and take part, so that no tile is skipped.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from intflash.backends.gpu.tensors import Statistics, data_view, view
from intflash.backends.triton.device_functions import (
    LaunchConstants,
    Position,
    head_base,
    make_masks,
    natural_order,
    permuted_keys,
)
from intflash.backends.triton.intflash_steps import Hooks, Steps, make_steps
from intflash.backends.triton.launch import TritonLaunch, grid
from intflash.backends.triton.tile_loop import TileShape, _tile_loop_kernel, block_dim
from intflash.methods import arrays, iflash, integers, qflash
from intflash.numerics.exp import ABSENT, LOG2_E, makes_absent
from intflash.numerics.triton import clz32, reciprocal_2_55
from intflash.problem import Problem, Result

MASKED = tl.constexpr(qflash.MASKED)


class QFlashConstants(NamedTuple):
    """int64 View [B|1, Hq|1, 1, 5]: rs, exp_M, req_M, rel_M, floor((2^63 - 1) / rs); float32 s_V, or None for codes."""

    packed: object
    v_scale: object
    end: None = None  # see `Masks`


@triton.jit
def _scores(q, k_tile):
    return tl.dot(q, tl.trans(k_tile), out_dtype=tl.int32)


@triton.jit
def _row_units(constants: QFlashConstants, pos: Position, rows, CONSTS: tl.constexpr, KIND: tl.constexpr):
    x = constants.packed
    base = x.ptr + pos.b.to(tl.int64) * x.b + pos.h.to(tl.int64) * x.h
    rs, exp_m = tl.load(base).to(tl.int32), tl.load(base + 1).to(tl.int32)
    req_m, rel_m = tl.load(base + 2).to(tl.int32), tl.load(base + 3)
    return rs, exp_m, req_m, rel_m, tl.load(base + 4)


@triton.jit
def _key_units(
    C, constants: QFlashConstants, pos: Position, first, keys, CONSTS: tl.constexpr, KIND: tl.constexpr,
    BOUNDED: tl.constexpr,
):  # fmt: skip
    return C


@triton.jit
def _divide(n, d, inverse):
    """Returns floor(n / d) for 0 <= n < 2^62 (int64) and 0 < d < 2^31. inverse = floor((2^63 - 1) / d); the estimate
    is at most 1 too small.
    """
    q = tl.umulhi(n.to(tl.uint64) * 2, (n * 0 + inverse).to(tl.uint64)).to(tl.int64)
    return tl.where(n - q * d >= d, q + 1, q)


@triton.jit
def _exp2(x, C, DIVIDE: tl.constexpr):
    """Returns 2^(x * sm_scale) in units of 1 / rs for x <= 0 (Algorithm 2), in wrapping int32."""
    rs, exp_m, req_m, rel_m, inverse = C
    if DIVIDE:
        q = _divide((-x).to(tl.int64), rs.to(tl.int64), inverse).to(tl.int32)
    else:
        q = (x * exp_m) >> 16
    r = x + q * rs
    shift = tl.where((q < 0) | (q > 31), 31, q)
    return ((r >> 1) + rs) >> shift


@triton.jit
def _p(y, C, DIVIDE: tl.constexpr):
    """Returns the exponential in units of 1 / 127, its low byte."""
    rs, exp_m, req_m, rel_m, inverse = C
    if DIVIDE:
        return _signed_divide(127 * y.to(tl.int64) + (rs >> 1), rs.to(tl.int64), inverse, True).to(tl.int8)
    else:
        return ((y * req_m + (1 << 15)) >> 16).to(tl.int8)


@triton.jit
def _signed_divide(n, d, inverse, FLOOR: tl.constexpr):
    """Returns n / d for |n| < 2^62, floored or truncated towards zero."""
    q = _divide(tl.abs(n), d, inverse)
    if FLOOR:
        return tl.where(n < 0, -(q + (q * d < -n).to(tl.int64)), q)
    else:
        return tl.where(n < 0, -q, q)


@triton.jit
def _rescale(x, alpha, C, DIVIDE: tl.constexpr):
    """Returns x * alpha / rs, the low 32 bits of an int64."""
    rs, exp_m, req_m, rel_m, inverse = C
    product = x.to(tl.int64) * alpha.to(tl.int64)
    if DIVIDE:
        return _signed_divide(product, rs.to(tl.int64), inverse, False).to(tl.int32)
    else:
        return ((product * rel_m + (1 << 29)) >> 30).to(tl.int32)


@triton.jit
def _initial(BM: tl.constexpr, BDV: tl.constexpr):
    return tl.full([BM], MASKED, tl.int32), tl.full([BM], 1, tl.int32), tl.zeros([BM, BDV], tl.int32)


@triton.jit
def _step(state, s, C, bias, present, v, DIVIDE: tl.constexpr):
    m, l, acc = state
    if bias is not None:
        s += bias
    if present is not None:
        s = tl.where(present, s, MASKED)
    m_new = tl.maximum(m, tl.max(s, 1))
    alpha = _exp2(m - m_new, C, DIVIDE)
    p = _p(_exp2(s - m_new[:, None], C, DIVIDE), C, DIVIDE)
    l = _rescale(l, alpha, C, DIVIDE) + tl.sum(p.to(tl.int32), 1)
    rescaled = _rescale(acc, alpha[:, None], C, DIVIDE)
    return m_new, l, tl.dot(natural_order(p), v, rescaled, out_dtype=tl.int32)


@triton.jit
def _shift_step(state, s, C, bias, present, v, PLAIN: tl.constexpr):
    return _step(state, s, C, bias, present, v, False)


@triton.jit
def _divide_step(state, s, C, bias, present, v, PLAIN: tl.constexpr):
    return _step(state, s, C, bias, present, v, True)


@triton.jit
def _result(state):
    m, l, acc = state
    return acc, l, m.to(tl.int64)


@triton.jit
def _quotient(acc, l):
    """Returns acc / l truncated towards zero: two estimates by floor(2^55 / (|l| << lz)), then the remainder
    decides.
    """
    divisor = tl.where(l == 0, 1, tl.abs(l)).to(tl.uint32)
    lz = clz32(divisor)
    R = reciprocal_2_55(divisor << lz.to(tl.uint32)).to(tl.int64)[:, None]
    shift = (55 - lz).to(tl.int64)[:, None]
    d = divisor.to(tl.int64)[:, None]
    n = tl.abs(acc.to(tl.int64))
    q = (n * R) >> shift  # too small by at most n 2^-23 / d + 1
    q += ((n - q * d) * R) >> shift  # too small by at most 1
    q += (n - q * d >= d).to(tl.int64)
    return tl.where((acc < 0) != (l < 0)[:, None], -q, q)


@triton.jit
def _store(
    out, pos: Position, rows, acc, l, constants: QFlashConstants, CONSTS: tl.constexpr, KIND: tl.constexpr,
    DV: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """Stores acc / l truncated, its low byte as a code of scale s_V, and 0 where l is 0."""
    channels = tl.arange(0, BDV)
    o = tl.where((l == 0)[:, None], 0, _quotient(acc, l)).to(tl.int8)
    if constants.v_scale is not None:
        x = constants.v_scale
        s_v = tl.load(x.ptr + pos.b.to(tl.int64) * x.b + (pos.h // CONSTS.group).to(tl.int64) * x.h)
        o = o.to(tl.float32) * s_v
    ptrs = head_base(out, pos.b, pos.h, pos.q_start) + rows[:, None] * out.n + channels[None, :] * out.d
    tl.store(ptrs, o.to(out.ptr.dtype.element_ty), mask=(rows[:, None] < pos.q_count) & (channels[None, :] < DV))


_HOOKS = Hooks(permuted_keys, _scores, _row_units, _key_units, _store)
STEPS: dict[str, Steps] = {
    "qflash": make_steps(_initial, None, None, _shift_step, _result, qflash.TILE, _HOOKS, visits_all_tiles=True),
    "iflash": make_steps(_initial, None, None, _divide_step, _result, qflash.TILE, _HOOKS, visits_all_tiles=True),
}


_PIPELINES = {"qflash": qflash.PIPELINE, "iflash": iflash.PIPELINE}


def unsupported(problem: Problem) -> str | None:
    return None


def run(problem: Problem) -> Result:
    problem = problem.quantized()
    batch, heads, nq, _ = problem.q.shape
    out = torch.empty(batch, heads, nq, problem.v.shape[3], dtype=problem.out_dtype, device=problem.device)
    statistics = Statistics(None, None)
    if problem.return_lse:
        pair = (torch.empty(batch, heads, nq, dtype=t, device=problem.device) for t in (torch.int64, torch.int32))
        statistics = Statistics(*pair)
    values, unit = constants(problem)
    qflash_launch(problem, values, out, statistics).run()
    lse = None
    if problem.return_lse:
        m, l = (x.to(torch.int64)[..., None] for x in statistics)
        c = qflash.PipelineConstants(unit * LOG2_E, *(values[..., i : i + 1] for i in range(4)))
        lse = integers.log_sum_exp(m, l, _PIPELINES[problem.method].requantize(c.rs, c), c.sm_scale / LOG2_E)
    return Result(out, None if problem.out_dtype.is_floating_point else arrays.value_scale(problem), lse)


def constants(problem: Problem) -> tuple[Tensor, Tensor]:
    """Returns `methods.qflash.constants` of the score unit that is served, and this unit. No value is read back to
    the host.
    """
    unit = qflash.served_unit(problem)
    sm_scale = unit * LOG2_E
    rs = torch.round(1 / sm_scale)
    whole = [rs, torch.round(-sm_scale * 65536), torch.round(sm_scale * 127 * 65536), torch.round(2.0**30 / rs)]
    values = torch.cat([x.to(torch.int64) for x in whole], dim=3)
    return torch.cat([values, (2**63 - 1) // values[..., :1]], dim=3), unit


def _unit_bias(problem: Problem) -> Tensor | None:
    """Returns the bias in score units, int32, in its broadcast shape (times that of the scales), with ABSENT where
    it removes a key.
    """
    bias = problem.bias_float
    if bias is None:
        return None
    unit = qflash.served_unit(problem)
    absent = makes_absent(bias)
    if unit.shape[0] > 1:
        bias, absent = (x.repeat(problem.q.shape[0] // x.shape[0], 1, 1, 1) for x in (bias, absent))
    limit = integers.BIAS_LIMIT
    scaled = torch.round(torch.where(absent, 0, bias).double() / unit).clamp(-limit, limit)
    return torch.where(absent, ABSENT, scaled.to(torch.int64)).to(torch.int32)


def _default_tile(method: str, head_dim: int) -> TileShape:
    """Chooses more warps and fewer stages where registers would spill on any architecture."""
    rows = 64 if head_dim <= 128 else 32
    if method == "iflash":
        return TileShape(rows, qflash.TILE, 8, 1)
    return TileShape(rows, qflash.TILE, 4 if head_dim <= 64 else 8, 2)


def qflash_launch(
    problem: Problem, values: Tensor, out: Tensor, statistics: Statistics, tile: TileShape | None = None
) -> TritonLaunch:
    """Returns the tile loop's launch for a quantized problem of these methods."""
    (batch, heads, nq, d), (nk, dv) = problem.q.shape, problem.v.shape[2:]
    steps = STEPS[problem.method]
    tile = replace(tile or _default_tile(problem.method, max(d, dv)), keys=steps.keys)
    packed = problem.cu_seqlens_q is not None
    sequences = len(problem.cu_seqlens_q) - 1 if packed else None
    causal = ""
    if problem.causal is not None:
        causal = "bottom_right" if packed and problem.causal_align == "bottom_right" else "offset"
    floats = problem.out_dtype.is_floating_point
    programs, batch_first = grid(batch, heads, triton.cdiv(nq, tile.rows) + (sequences or 0))
    arguments = dict(
        q=data_view(problem.q.data), k=data_view(problem.k.data), v=data_view(problem.v.data), out=data_view(out),
        constants=QFlashConstants(view(values)._replace(d=1), view(problem.v.scale) if floats else None),
        statistics=statistics,
        masks=make_masks(
            _unit_bias(problem), problem.keep, problem.causal, batch, problem.window_start
        ),
        cu_q=problem.cu_seqlens_q, cu_k=problem.cu_seqlens_k, sequences=sequences, nq=nq, nk=nk,
        STEPS=steps, KIND="head", CAUSAL=causal, PLAIN=True, D=d, DV=dv,
        BM=tile.rows, BN=tile.keys, BD=block_dim(d, 32), BDV=block_dim(dv, 16),
        CONSTS=LaunchConstants(problem.group, 1, 1, all_visible=not packed and not causal and nk % tile.keys == 0),
        BATCH_FIRST=batch_first,
    )  # fmt: skip
    return TritonLaunch(_tile_loop_kernel, programs, arguments, tile.warps, tile.stages)
