"""`struct Params` of csrc/cuda/params.cuh, filled from a problem."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from intflash.backends.gpu.constants import Constants
from intflash.backends.gpu.tensors import Statistics
from intflash.problem import Problem

HEAD_AMAX_IN_KERNEL = ()  # for scales: the kernel finds each head's own, amax / 127


class View(ctypes.Structure):
    _fields_ = [("ptr", ctypes.c_void_p), *((name, ctypes.c_int64) for name in "bhnd")]


class Share(ctypes.Structure):
    """How long rows are shared out; `long_rows.schedule_ranges` fills it."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("whole", "rest", "rest_tiles")),
        *((name, ctypes.c_uint32) for name in ("whole_of_all", "pieces", "first")),
        *((name, ctypes.c_uint32) for name in ("whole_reciprocal", "rest_reciprocal", "heads_reciprocal")),
    ]  # fmt: skip


class SplitKv(ctypes.Structure):
    """How the keys of few rows are split; `sm80.few_rows_launch` fills it."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("splits", "keys", "group", "kv_heads")),
        *((name, ctypes.c_uint32) for name in ("splits_reciprocal", "heads_reciprocal", "queries_reciprocal")),
        ("pitch", ctypes.c_int32), *((name, ctypes.c_void_p) for name in ("scores", "maxima", "sums")),
    ]  # fmt: skip


class Params(ctypes.Structure):
    _views = ("q", "k", "v", "out", "score", "output", "q_scale", "k_scale", "v_scale", "bias", "keep",
              "valueless")  # fmt: skip
    _fields_ = [
        *((name, View) for name in _views),
        ("t_max", ctypes.c_void_p), ("l", ctypes.c_void_p), ("sm_scale", ctypes.c_double),
        ("group_reciprocal", ctypes.c_uint32),
        *((name, ctypes.c_int32) for name in ("nq", "nk", "bias_batches", "keep_batches", "causal",
                                           "window_start", "tiles", "count")),
        ("heads", ctypes.c_int32),
        *((name, ctypes.c_uint32) for name in ("head_reciprocal", "bias_reciprocal", "keep_reciprocal")),
        ("share", Share), ("q_ends", ctypes.c_void_p), ("k_ends", ctypes.c_void_p), ("split", SplitKv),
    ]  # fmt: skip


def view(x: Tensor | None) -> View:
    """A 4-D tensor with stride 0 along axes of length 1, so that any index reads its one element."""
    if x is None:
        return View(None, 0, 0, 0, 0)
    return View(x.data_ptr(), *(0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)))


def data_view(x: Tensor) -> View:
    return View(x.data_ptr(), *x.stride())


def parameters(
    problem: Problem, tensors: tuple[Tensor, Tensor, Tensor], scales: tuple[Tensor, ...] | None,
    constants: Constants, out: Tensor, statistics: Statistics, tiles: int = 1, share: Share | None = None,
    sequences: int | None = None,
) -> tuple[Params, dict[int, Tensor]]:  # fmt: skip
    """The struct, and the tensors that it points into by the byte at which it does.

    tensors: codes, or floats with their `scales` or HEAD_AMAX_IN_KERNEL. sequences: number of packed ones.
    """
    q, k, v = tensors
    q_scale, k_scale, v_scale = scales or (None, None, None)
    masks = {name: getattr(problem, name) for name in ("bias", "keep")}
    batches = {name: 1 if mask is None else mask.shape[0] for name, mask in masks.items()}
    packed = [None if x is None else x.ptr for x in constants]
    keeps = dict(
        q=q, k=k, v=v, out=out, score=packed[0], output=packed[1], q_scale=q_scale, k_scale=k_scale,
        v_scale=packed[2] if v_scale is None else v_scale, bias=problem.bias,
        keep=None if problem.keep is None else problem.keep.view(torch.uint8), valueless=packed[3],
    )  # fmt: skip
    ends = {
        f"{name[-1]}_ends": None if x is None else x.to(q.device, torch.int32).contiguous()
        for name in ("cu_seqlens_q", "cu_seqlens_k") for x in (getattr(problem, name),)
    }  # fmt: skip
    params = Params(
        **{name: data_view(x) if name in ("q", "k", "v", "out") else view(x) for name, x in keeps.items()},
        t_max=None if statistics.t_max is None else statistics.t_max.data_ptr(),
        l=None if statistics.l is None else statistics.l.data_ptr(),
        sm_scale=problem.sm_scale,
        group_reciprocal=_reciprocal(problem.group), nq=q.shape[2], nk=k.shape[2],
        bias_batches=batches["bias"], keep_batches=batches["keep"],
        causal=problem.causal or 0, window_start=problem.window_start or 0, tiles=tiles,
        count=sequences or q.shape[0] * q.shape[1], heads=q.shape[1], head_reciprocal=_reciprocal(q.shape[1]),
        **{f"{name}_reciprocal": 0 if n == q.shape[0] else _reciprocal(n) for name, n in batches.items()},
        share=share or Share(), **{name: None if x is None else x.data_ptr() for name, x in ends.items()},
    )  # fmt: skip
    pointers = keeps | ends | dict(t_max=statistics.t_max, l=statistics.l)
    return params, {getattr(Params, name).offset: x for name, x in pointers.items() if x is not None}


def _reciprocal(x: int) -> int:
    """What `__umulhi` divides small numbers by x with; 0 for 1."""
    return 0 if x == 1 else -(-(1 << 32) // x)


def quotient_reciprocal(x: int) -> int:
    """What `quotient` divides any number by x with; 0 where nothing will be divided by x = 0."""
    return (2**32 - 1) // x if x else 0


def has_row_scales(constants: Constants, scales: tuple[Tensor, ...] | None) -> bool:
    """Whether the score constants of codes differ between queries."""
    return scales is None and constants.score.ptr.shape[2] > 1
