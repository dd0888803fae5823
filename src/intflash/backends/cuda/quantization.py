"""Launches absmax.cu, head_absmax.cu, quantize_inputs.cu and constants.cu, which run before the attention kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch
from torch import Tensor

from intflash.backends.cuda.parameters import View, data_view, quotient_reciprocal, view
from intflash.backends.cuda.program import C_TYPES, CudaLaunch, CudaProgram
from intflash.backends.gpu.constants import (
    Constants,
    constant_buffers,
    empty_valueless,
    most_output_exponent,
    score_unit,
)
from intflash.backends.gpu.scales import DynamicScales, FloatInputs, Qkv, empty_codes, quantized_tensors
from intflash.backends.gpu.tensors import View as TensorView
from intflash.backends.gpu.tensors import contiguous_keys
from intflash.backends.gpu.tensors import view as tensor_view
from intflash.numerics import exp
from intflash.problem import Problem
from intflash.quant import QTensor

_UNITS = {exp.OCTAVES: "Octaves", exp.TABLE_STEPS: "TableSteps"}
_TOKENS = 128  # per CTA of quantize_inputs.cu
_CHUNK_BYTES = 16  # of absmax.cu and head_absmax.cu
_CTA_CHUNKS = 2048  # that a CTA of absmax.cu and head_absmax.cu loads at once
_MOST_CTAS = 3 * 4 * 132  # of absmax.cu: more of them only add atomic operations


class Runs(ctypes.Structure):
    """`struct Runs` of absmax.cu."""

    _fields_ = [
        ("ptr", ctypes.c_void_p), ("strides", ctypes.c_int64 * 3), ("count", ctypes.c_uint32), ("run", ctypes.c_uint32),
        ("sizes", ctypes.c_uint32 * 2), ("run_reciprocal", ctypes.c_uint32), ("size_reciprocals", ctypes.c_uint32 * 2),
        ("padding", ctypes.c_uint32),
    ]  # fmt: skip


class AbsmaxParams(ctypes.Structure):
    """`struct AbsmaxParams` of absmax.cu."""

    _fields_ = [("x", Runs * 3), ("amax", ctypes.c_void_p), ("scales", ctypes.c_void_p)]


class HeadAbsmaxParams(ctypes.Structure):
    """`struct HeadAbsmaxParams` of head_absmax.cu: tensors in the order Q, K, V."""

    _fields_ = [
        ("x", View * 3), ("amax", ctypes.c_void_p), ("finished", ctypes.c_void_p), ("scales", ctypes.c_void_p),
        *((name, ctypes.c_uint32 * 3) for name in ("tokens", "heads", "all_heads", "first", "per_head")),
        *((name, ctypes.c_uint32 * 3) for name in ("tile_reciprocals", "head_reciprocals")),
        ("padding", ctypes.c_uint32),
    ]  # fmt: skip


class QuantizeParams(ctypes.Structure):
    """`struct QuantizeParams` of quantize_inputs.cu: tensors in the order K, V, Q."""

    _fields_ = [
        ("x", View * 3), ("codes", View * 3), ("scales", View * 3), ("tokens", ctypes.c_uint32 * 3),
        ("heads", ctypes.c_uint32 * 3), ("batches", ctypes.c_uint32), ("padding", ctypes.c_uint32),
    ]  # fmt: skip


class ConstantsParams(ctypes.Structure):
    """`struct ConstantsParams` of constants.cu."""

    _views = ("q_scale", "k_scale", "v_scale", "given")
    _fields_ = [
        *((name, View) for name in _views),
        *((name, ctypes.c_void_p) for name in ("score", "output", "out_scale")),
        ("sm_scale", ctypes.c_double), ("score_shape", ctypes.c_uint32 * 4), ("output_shape", ctypes.c_uint32 * 4),
        *((name, ctypes.c_uint32) for name in ("score_count", "output_count", "group", "padding")),
    ]  # fmt: skip


class ValuelessParams(ctypes.Structure):
    """`struct ValuelessParams` of valueless.cu."""

    _fields_ = [
        ("v", View), ("words", ctypes.c_void_p), ("k_ends", ctypes.c_void_p),
        *((name, ctypes.c_uint32) for name in ("keys", "blocks", "heads", "count")),
        *((name, ctypes.c_uint32) for name in ("blocks_reciprocal", "heads_reciprocal")),
    ]  # fmt: skip


def _launch(
    file: str, ctas: int, threads: int, params: ctypes.Structure, tensors: Mapping[int, Tensor | None],
    device: torch.device, **macros: object,
) -> CudaLaunch:  # fmt: skip
    """Returns a launch. tensors: offset in `params` -> the tensor whose address is there, or None."""
    program = CudaProgram.of(file, entry=file.removesuffix(".cu"), PARAMS_BYTES=ctypes.sizeof(params), **macros)
    there = {offset: x for offset, x in tensors.items() if x is not None}
    return CudaLaunch(program, (ctas, 1, 1), threads, 0, params, device, there, overlaps=True)


def _places(array: ctypes._CField, item: type[ctypes.Structure], tensors: tuple[Tensor | None, ...]) -> dict:
    """Returns the offset of each pointer in an array of structs whose first member is a pointer."""
    return {array.offset + i * ctypes.sizeof(item): x for i, x in enumerate(tensors)}


def amax_launch(tensors: Qkv, found: DynamicScales) -> CudaLaunch:
    """Returns the launch that computes `found.scales`."""
    tensors = Qkv(*map(_whole_chunks, tensors))
    device, dtype = found.amax.device, C_TYPES[tensors.q.dtype]
    if any(found.per_head):
        return _head_absmax_launch(tensors, found, IN=dtype)
    params = AbsmaxParams((Runs * 3)(*map(runs, tensors)), found.amax.data_ptr(), found.scales.data_ptr())
    ctas = min(-(-max(x.count for x in params.x) // _CTA_CHUNKS) * 3, _MOST_CTAS)
    places = _places(AbsmaxParams.x, Runs, tensors)
    places |= {AbsmaxParams.amax.offset: found.amax, AbsmaxParams.scales.offset: found.scales}
    return _launch("absmax.cu", ctas, 256, params, places, device, IN=dtype, CTA_CHUNKS=_CTA_CHUNKS)


def _head_absmax_launch(tensors: Qkv, found: DynamicScales, **macros: object) -> CudaLaunch:
    dims = dict(HEAD_DIM=tensors.k.shape[3], VALUE_DIM=tensors.v.shape[3])
    tokens = _CTA_CHUNKS * _CHUNK_BYTES // (max(dims.values()) * tensors.k.element_size())
    all_heads = [x.shape[0] * x.shape[1] for x in tensors]
    tiles = [-(-x.shape[2] // tokens) for x in tensors]
    of_each = dict(
        tokens=(x.shape[2] for x in tensors), heads=(x.shape[1] for x in tensors), all_heads=all_heads,
        first=found.first, per_head=found.per_head, tile_reciprocals=map(quotient_reciprocal, tiles),
        head_reciprocals=(quotient_reciprocal(x.shape[1]) for x in tensors),
    )  # fmt: skip
    pointers = dict(amax=found.amax, finished=found.finished, scales=found.scales)
    params = HeadAbsmaxParams(
        x=(View * 3)(*map(data_view, tensors)), **{name: x.data_ptr() for name, x in pointers.items()},
        **{name: (ctypes.c_uint32 * 3)(*values) for name, values in of_each.items()},
    )  # fmt: skip
    places = _places(HeadAbsmaxParams.x, View, tensors)
    places |= {getattr(HeadAbsmaxParams, name).offset: x for name, x in pointers.items()}
    ctas = 3 * max(n * heads for n, heads in zip(tiles, all_heads, strict=True))
    device = found.amax.device
    return _launch("head_absmax.cu", ctas, 256, params, places, device, **macros, **dims, CTA_TOKENS=tokens)


def _whole_chunks(x: Tensor) -> Tensor:
    """Returns x with the zeros that pad its rows to whole chunks; see `sm80.aligned`."""
    per_chunk = _CHUNK_BYTES // x.element_size()
    if x.shape[3] % per_chunk == 0:
        return x
    return x.as_strided((*x.shape[:3], -(-x.shape[3] // per_chunk) * per_chunk), x.stride())


def runs(x: Tensor) -> Runs:
    """Describes the memory of a 4-D tensor with contiguous channels, each element once: adjacent axes are joined, and
    axes of stride 0 are left out.
    """
    run, axes = x.shape[3], []
    for stride, size in sorted(zip(x.stride()[:3], x.shape[:3], strict=True)):
        if size == 1 or stride == 0:
            continue
        if not axes and stride == run:
            run *= size
        elif axes and stride == axes[-1][0] * axes[-1][1]:
            axes[-1] = axes[-1][0], axes[-1][1] * size
        else:
            axes.append((stride, size))
    axes += [(0, 1)] * (3 - len(axes))
    chunks = run * x.element_size() // _CHUNK_BYTES
    sizes = [size for _, size in axes]
    return Runs(
        x.data_ptr(), (ctypes.c_int64 * 3)(*(stride * x.element_size() for stride, _ in axes)),
        chunks * sizes[0] * sizes[1] * sizes[2], chunks, (ctypes.c_uint32 * 2)(*sizes[:2]), quotient_reciprocal(chunks),
        (ctypes.c_uint32 * 2)(*map(quotient_reciprocal, sizes[:2])), 0,
    )  # fmt: skip


def quantize_launch(inputs: FloatInputs, query: bool = True) -> tuple[CudaLaunch, dict[str, QTensor]]:
    """Returns the launch that writes the codes of K, V and, if `query`, Q, and the quantized tensors by name.

    Floats may exceed scales that the recipe gives, but not scales of their own maxima.
    """
    codes = empty_codes(inputs, query)
    x, to, scales = ((three.k, three.v, three.q) for three in (inputs.tensors, codes, inputs.scales))
    params = QuantizeParams(
        (View * 3)(*map(data_view, x)), (View * 3)(*(view(None) if c is None else data_view(c) for c in to)),
        (View * 3)(*map(view, scales)), (ctypes.c_uint32 * 3)(*(t.shape[2] for t in x)),
        (ctypes.c_uint32 * 3)(*(t.shape[1] for t in x)), x[0].shape[0], 0,
    )  # fmt: skip
    wanted = x if query else x[:2]
    units = max(t.shape[0] * t.shape[1] * -(-t.shape[2] // _TOKENS) for t in wanted)
    places = _places(QuantizeParams.x, View, x) | _places(QuantizeParams.codes, View, to)
    places |= _places(QuantizeParams.scales, View, scales)
    dims = dict(HEAD_DIM=_whole_groups(x[0].shape[3]), VALUE_DIM=_whole_groups(x[1].shape[3]))
    launch = _launch(
        "quantize_inputs.cu", len(wanted) * units, 128, params, places, x[0].device, IN=C_TYPES[x[0].dtype],
        **dims, QUERY=int(query), VALUES_IN_RANGE=int(inputs.dynamic),
    )  # fmt: skip
    return launch, quantized_tensors(inputs, codes)


def _whole_groups(channels: int) -> int:
    """Channels that quantize_inputs.cu writes: it takes 8 at once, and rows of codes are padded."""
    return -(-channels // 8) * 8


def constants_launch(
    problem: Problem, scales: tuple[Tensor, Tensor, Tensor] | None = None
) -> tuple[CudaLaunch, Constants, Tensor | None]:
    """Returns the launch that fills a problem's constants, the constants, and the output's scale; see
    `constant_buffers`.
    """
    x = constant_buffers(problem, scales)
    score_count, output_count = x.counts
    pointers = dict(
        q_scale=x.q_scale, k_scale=x.k_scale, v_scale=x.v_scale, given=x.given, score=x.score, output=x.output,
        out_scale=x.out_scale if x.given is None else None,
    )  # fmt: skip
    addresses = {name: None if t is None else t.data_ptr() for name, t in pointers.items()}
    params = ConstantsParams(
        **{name: view(pointers[name]) for name in ConstantsParams._views},
        **{name: addresses[name] for name in ("score", "output", "out_scale")},
        sm_scale=problem.sm_scale, score_shape=(ctypes.c_uint32 * 4)(*x.score_shape),
        output_shape=(ctypes.c_uint32 * 4)(*x.output_shape), score_count=score_count, output_count=output_count,
        group=problem.group,
    )  # fmt: skip
    places = {getattr(ConstantsParams, name).offset: t for name, t in pointers.items()}
    launch = _launch(
        "constants.cu", -(-max(score_count, output_count) // 128), 128, params, places, x.score.device,
        UNIT=_UNITS[score_unit(problem.method)], QMAX=x.qmax, GIVEN=int(x.given is not None),
        MOST_E=most_output_exponent(problem.method),
    )  # fmt: skip
    return launch, x.constants, x.out_scale


def valueless_launch(problem: Problem) -> tuple[CudaLaunch, TensorView]:
    """Returns the launch that finds the keys without a value, and their bits, in the order of block_float.cuh.

    V is codes with contiguous channels at multiples of 16 bytes, or with contiguous keys of any layout. Packed
    sequences have contiguous channels, and blocks of their own.
    """
    v = problem.v.data
    ends, sequences = None, 0
    if problem.cu_seqlens_k is not None:
        ends = problem.cu_seqlens_k.to(v.device, torch.int32).contiguous()
        sequences = ends.numel() - 1
    elif v.stride(3) != 1:
        v = contiguous_keys(v)
    batch, heads, keys, d = v.shape
    words = empty_valueless(v, sequences)
    blocks = words.shape[3] // 4
    params = ValuelessParams(
        data_view(v), words.data_ptr(), None if ends is None else ends.data_ptr(), keys, blocks, heads, sequences,
        quotient_reciprocal(blocks), quotient_reciprocal(heads),
    )  # fmt: skip
    places = {ValuelessParams.v.offset: v, ValuelessParams.words.offset: words, ValuelessParams.k_ends.offset: ends}
    macros = dict(HEAD_DIM=d, KEY_MAJOR=int(v.stride(3) != 1))
    launch = _launch("valueless.cu", batch * heads * blocks, 128, params, places, v.device, **macros)
    return launch, tensor_view(words)
