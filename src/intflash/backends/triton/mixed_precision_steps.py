"""The steps of the methods with a float32 softmax: int_flash, lite, qattn and the float baselines.

Scores are int32, or float32 for float inputs. Exponentials are computed in octaves, x = s * unit, against the running
maximum. `unit` of a tile is (row, key, value, score_bound): row [BM] is the value of a score; key [1, BN] and
score_bound are used where KIND.k is "key"; value is the scale of the tile's V where KIND.v is "tile". The state is (m,
l, acc), with m in octaves and l the sum of the exact p.

    int_flash_half   P float16              int_flash_full   P int8, R = 127, int32 products
    lite, qattn      P bfloat16             fp16, bf16, fp32, fp8    P of the inputs' type
"""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl

from intflash.backends.triton.device_functions import Position, head_base, natural_order, permuted_keys
from intflash.backends.triton.intflash_steps import Hooks, Steps, make_steps
from intflash.backends.triton.online_softmax import general, online_softmax
from intflash.numerics.triton import PTX

ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it leaves the rounded integer in the low bits
R = tl.constexpr(127.0)
LOG2_R = tl.constexpr(math.log2(127.0))
FP8_OCTAVES = tl.constexpr(8.0)  # P in (0, 256] keeps small values out of e4m3's subnormals


class MixedConstants(NamedTuple):
    """Scales as float32 Views; None where there is none.

    q_scale [B|1, Hq|1, Nq|1, 1], k_scale [B|1, Hk|1, keys or blocks or 1, 1], v_scale [B|1, Hk|1, 1, Dv|1] or per
    block, out_scale [B|1, Hq|1, 1, Dv|1] for integer output, score_bounds [B|1, Hk|1, tiles of keys, 1] where K has a
    scale for each key: above every |score * scale| of the tile. octaves is sm_scale * log2(e).
    """

    q_scale: object
    k_scale: object
    v_scale: object
    out_scale: object
    score_bounds: object
    octaves: object
    end: None = None  # see `Masks`


class ScaleKinds(NamedTuple):
    """Where scales are applied: K's "none", "head", "tile" (one per tile of keys) or "key"; V's "none", "end" or
    "tile". conversion: how `online_softmax` makes floats of int32 scores.
    """

    k: str
    v: str
    k_block: int
    v_block: int
    v_channels: int
    out_channels: int
    conversion: str


# --- hooks of the tile loop


@triton.jit
def _natural_keys(BN: tl.constexpr):
    return tl.arange(0, BN)


@triton.jit
def _integer_scores(q, k):
    return tl.dot(q, tl.trans(k), out_dtype=tl.int32)


@triton.jit
def _exact(x):
    """Returns x as the operand of a product. The interpreter would otherwise multiply the bits of bfloat16."""
    if PTX:
        return x
    else:
        return x.to(tl.float32)


@triton.jit
def _float_scores(q, k):
    return tl.dot(_exact(q), tl.trans(_exact(k)), input_precision="ieee")


@triton.jit
def _e4m3(x):
    """Reinterprets int8 bits as e4m3, because loads, masks and pointers support no 8-bit floats."""
    return x.to(tl.float8e4nv, bitcast=True)


@triton.jit
def _e4m3_scores(q, k):
    return tl.dot(_e4m3(q), tl.trans(_e4m3(k)), out_dtype=tl.float32)


@triton.jit
def _scale_base(x, pos: Position, head):
    return x.ptr + pos.b.to(tl.int64) * x.b + head.to(tl.int64) * x.h


@triton.jit
def _row_units(constants: MixedConstants, pos: Position, rows, CONSTS: tl.constexpr, KIND: tl.constexpr):
    """Returns (octaves per score unit [BM], the head's K scales, V scales and score bounds), as pointers where KIND
    reads them per tile.

    The loop reads no View: Triton 3.6 loses the constants inside a tuple that crosses a loop, such as a stride of 1.
    """
    unit = tl.full(rows.shape, 1.0, tl.float32) * constants.octaves
    key_head = pos.h // CONSTS.group
    k_scales, v_scales, score_bounds = pos.h, pos.h, pos.h
    if constants.q_scale is not None:
        x = constants.q_scale
        base = _scale_base(x, pos, pos.h)
        unit *= tl.load(base + (pos.q_start + rows) * x.n, mask=rows < pos.q_count, other=1.0)
    if KIND.k == "head":
        unit *= tl.load(_scale_base(constants.k_scale, pos, key_head))
    elif KIND.k != "none":
        k_scales = _scale_base(constants.k_scale, pos, key_head)
    if KIND.k == "key":
        score_bounds = _scale_base(constants.score_bounds, pos, key_head)
    if KIND.v == "tile":
        v_scales = _scale_base(constants.v_scale, pos, key_head)
    return unit, k_scales, v_scales, score_bounds


@triton.jit
def _permuted(x):
    """Returns values of keys in the order of `permuted_keys`. They are loaded contiguously and permuted in
    registers.
    """
    BN: tl.constexpr = x.shape[0]
    return tl.reshape(tl.permute(tl.reshape(x, [BN // 16, 4, 2, 2]), [0, 2, 1, 3]), [BN])


@triton.jit
def _key_units(
    C, constants: MixedConstants, pos: Position, first, keys, CONSTS: tl.constexpr, KIND: tl.constexpr,
    BOUNDED: tl.constexpr, PERMUTED: tl.constexpr = False,
):  # fmt: skip
    """Returns (row, key, value, score_bound) of a tile of keys. Scales of keys and blocks are contiguous."""
    row, k_scales, v_scales, score_bounds = C
    key, value, score_bound = 1.0, 1.0, 0.0
    if KIND.k == "tile":
        row = row * tl.load(k_scales + first // KIND.k_block)
    elif KIND.k == "key":
        natural = first + tl.arange(0, keys.shape[0])
        ptrs = k_scales + (pos.k_start + natural) // KIND.k_block
        if BOUNDED:
            key = tl.load(ptrs, mask=natural < pos.k_count, other=0.0)
        else:
            key = tl.load(ptrs)
        if PERMUTED:
            key = _permuted(key)
        key = key[None, :]
        if not BOUNDED:
            score_bound = tl.load(score_bounds + first // keys.shape[0])
    if KIND.v == "tile":
        value = tl.load(v_scales + first // KIND.v_block)
    return row, key, value, score_bound


@triton.jit
def _permuted_key_units(
    C, constants: MixedConstants, pos: Position, first, keys, CONSTS: tl.constexpr, KIND: tl.constexpr,
    BOUNDED: tl.constexpr,
):  # fmt: skip
    return _key_units(C, constants, pos, first, keys, CONSTS, KIND, BOUNDED, True)


@triton.jit
def _head_scale(x, base, CHANNELS: tl.constexpr, channels, inside):
    if CHANNELS == 1:
        return tl.load(base)
    else:
        return tl.load(base + channels[None, :] * x.d, mask=inside, other=1.0)


@triton.jit
def _store(
    out, pos: Position, rows, acc, l, constants: MixedConstants, CONSTS: tl.constexpr, KIND: tl.constexpr,
    DV: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """Stores acc / l * s_V as floats, or as codes of out_scale rounded half to even. Rows without keys give 0."""
    channels = tl.arange(0, BDV)
    inside = channels[None, :] < DV
    o = acc * tl.where(l > 0, 1.0 / l, 0.0)[:, None]
    if KIND.v == "end":
        x = constants.v_scale
        o *= _head_scale(x, _scale_base(x, pos, pos.h // CONSTS.group), KIND.v_channels, channels, inside)
    if constants.out_scale is not None:
        x = constants.out_scale
        o = o / _head_scale(x, _scale_base(x, pos, pos.h), KIND.out_channels, channels, inside)
        QMAX: tl.constexpr = 127.0 if out.ptr.dtype.element_ty == tl.int8 else 32767.0
        o = (tl.minimum(tl.maximum(o, -QMAX), QMAX) + ROUND) - ROUND
    ptrs = head_base(out, pos.b, pos.h, pos.q_start) + rows[:, None] * out.n + channels[None, :] * out.d
    tl.store(ptrs, o.to(out.ptr.dtype.element_ty), mask=(rows[:, None] < pos.q_count) & inside)


# --- softmax


@triton.jit
def _initial(BM: tl.constexpr, BDV: tl.constexpr):
    return tl.full([BM], float("-inf"), tl.float32), tl.zeros([BM], tl.float32), tl.zeros([BM, BDV], tl.float32)


@triton.jit
def _result(state):
    m, l, acc = state
    return acc, l, m


# --- steps


@triton.jit
def _accumulate(m, alpha, p, l, acc, v, DTYPE: tl.constexpr):
    """Updates l and acc with p, rounded to DTYPE, times v."""
    l = l * alpha + tl.sum(p, 1)
    if v.dtype == tl.int8:
        v = v.to(tl.float32)  # int8 is exact in any DTYPE
    acc = tl.dot(_exact(p.to(DTYPE)), _exact(v.to(DTYPE)), acc * alpha[:, None], input_precision="ieee")
    return m, l, acc


@triton.jit
def _step_float16(state, s, unit, bias, present, v, KIND: tl.constexpr):
    m, l, acc = state
    m, alpha, p = online_softmax(m, s, unit, bias, present, KIND)
    return _accumulate(m, alpha, p, l, acc, v, tl.float16)


@triton.jit
def _step_bfloat16(state, s, unit, bias, present, v, KIND: tl.constexpr):
    m, l, acc = state
    m, alpha, p = online_softmax(m, s, unit, bias, present, KIND)
    return _accumulate(m, alpha, p, l, acc, v, tl.bfloat16)


@triton.jit
def _step_float(state, s, unit, bias, present, v, KIND: tl.constexpr):
    """P in V's own type: fp16, bf16, fp32."""
    m, l, acc = state
    m, alpha, p = general(m, s, unit, bias, present, KIND, 0.0)
    return _accumulate(m, alpha, p, l, acc, v, v.dtype)


@triton.jit
def _step_fp8(state, s, unit, bias, present, v, KIND: tl.constexpr):
    """P * 256 in e4m3. Each tile's product is added in float32, because the tensor core's own sum keeps 14 bits
    only.
    """
    m, l, acc = state
    m, alpha, p = general(m, s, unit, bias, present, KIND, FP8_OCTAVES)
    product = tl.dot(natural_order(p.to(tl.float8e4nv)), _e4m3(v), out_dtype=tl.float32)
    return m, l * alpha + tl.sum(p, 1), acc * alpha[:, None] + product


@triton.jit
def _result_fp8(state):
    m, l, acc = state
    return acc * (1.0 / 256.0), l * (1.0 / 256.0), m


@triton.jit
def _step_full(state, s, unit, bias, present, v, KIND: tl.constexpr):
    """P * 127 rounded to int8. The tile's product is exact in int32."""
    m, l, acc = state
    m, alpha, p = general(m, s, unit, bias, present, KIND, LOG2_R)
    codes = (p + ROUND).to(tl.int32, bitcast=True).to(tl.int8)
    product = tl.dot(natural_order(codes), v, out_dtype=tl.int32).to(tl.float32)
    if KIND.v == "tile":
        product *= unit[2]
    return m, l * alpha + tl.sum(p, 1), acc * alpha[:, None] + product


@triton.jit
def _result_full(state):
    m, l, acc = state
    return acc * (1.0 / R), l * (1.0 / R), m


_INTEGER_QK = Hooks(_natural_keys, _integer_scores, _row_units, _key_units, _store)
_INTEGER_P = _INTEGER_QK._replace(
    order=permuted_keys, key_units=_permuted_key_units
)  # for int8 P, natural_order restores the order of columns
_FLOAT_QK = _INTEGER_QK._replace(scores=_float_scores)
_E4M3_QK = _INTEGER_P._replace(scores=_e4m3_scores)


def _steps(step, hooks: Hooks, result=_result, keys: int | None = None) -> Steps:
    return make_steps(_initial, None, None, step, result, keys, hooks)


FLOAT16_P = _steps(_step_float16, _INTEGER_QK)
BFLOAT16_P = _steps(_step_bfloat16, _INTEGER_QK)
FULL = _steps(_step_full, _INTEGER_P, _result_full, keys=64)  # P counts in 1 / 127 of the running maximum
FLOAT = _steps(_step_float, _FLOAT_QK)
FP8 = _steps(_step_fp8, _E4M3_QK, _result_fp8)
