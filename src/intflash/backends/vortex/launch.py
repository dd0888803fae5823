"""What a Vortex kernel is given: the argument block, the buffers and their padding. No device here."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

KERNELS = Path(__file__).parent / "kernels"

GROUP_THREADS = 16  # simt.h
FLUSH_KEYS = 256  # intflash.h: keys whose sum of p * V fits 32 bits for 16-bit p
KEY_TILE = 64  # keys are padded to the largest tile of any kernel
WARP_ROWS = 8  # query rows of a tensor-unit group
TENSOR_COLUMNS = 32  # output columns of a tensor-unit group
MAX_HEAD_DIM = 64


class KernelArgs(ctypes.Structure):
    """kernel_args_t of kernels/kernel_args.h, field by field (a test compares the two)."""

    _fields_ = [
        ("q_addr", ctypes.c_uint64),
        ("k_addr", ctypes.c_uint64),
        ("v_addr", ctypes.c_uint64),
        ("o_addr", ctypes.c_uint64),
        ("scratch_addr", ctypes.c_uint64),
        ("multiplier_addr", ctypes.c_uint64),
        ("colsum_addr", ctypes.c_uint64),
        ("stats_addr", ctypes.c_uint64),
        ("grid_dim", ctypes.c_uint32 * 3),
        ("block_dim", ctypes.c_uint32 * 3),
        ("n_k", ctypes.c_uint32),
        ("k_stride", ctypes.c_uint32),
        ("stage", ctypes.c_uint32),
        ("score_scale", ctypes.c_float),
        ("depth_multiplier", ctypes.c_uint32),
        ("depth_shift", ctypes.c_uint32),
        ("q_max", ctypes.c_int32),
        ("reserved", ctypes.c_uint32),
    ]


MULTIPLIER = np.dtype([("multiplier", np.uint32), ("exponent", np.int32)])  # output_multiplier_t
ROW_STATS = np.dtype([("l", np.uint32), ("s_max", np.int32)])  # row_stats_t


@dataclass(frozen=True)
class Program:
    """A kernel source and what it needs of compiler and device."""

    name: str
    source: str
    integer: bool
    tensor_unit: bool = False
    split: bool = False
    stages: int = 1

    @property
    def path(self) -> Path:
        return KERNELS / self.source


PROGRAMS = {
    p.name: p
    for p in (
        Program("attention_f32", "attention_f32.cpp", integer=False, stages=3),
        Program("flash_f32", "flash_f32.cpp", integer=False),
        Program("flash_f32_split", "flash_f32_split.cpp", integer=False, split=True),
        Program("flash_f16_tensor", "flash_f16_tensor.cpp", integer=False, tensor_unit=True),
        Program("intflash_simt", "intflash_simt.cpp", integer=True),
        Program("intflash_tensor", "intflash_tensor.cpp", integer=True, tensor_unit=True),
    )
}


@dataclass
class Launch:
    """One program run: buffers by the name of their address field, and the grid of each stage.

    `group_scratch` is the bytes of scratch memory that every group running at once needs to itself, at `scratch_addr`.
    Executors (the shim, or Vortex) write the results into `buffers` in place.
    """

    program: Program
    defines: dict[str, int]
    buffers: dict[str, np.ndarray]
    outputs: tuple[str, ...]
    grids: tuple[tuple[int, int, int], ...]
    threads: int
    scalars: dict[str, int | float] = field(default_factory=dict)
    group_scratch: int = 0

    def arguments(self, stage: int, addresses: dict[str, int]) -> KernelArgs:
        """The argument block of one stage; `addresses` holds the device address of each buffer."""
        args = KernelArgs(**addresses, **self.scalars, stage=stage)
        args.grid_dim[:] = self.grids[stage]
        args.block_dim[:] = (self.threads, 1, 1)
        return args


Executor = Callable[[Launch], object]


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def head_lanes(head_dim: int) -> int:
    """Threads that share a query row in the split kernels: the fewest with at most 16 output columns each.

    >>> [head_lanes(d) for d in (8, 16, 24, 64)]
    [1, 1, 2, 4]
    """
    return next(lanes for lanes in (1, 2, 4) if head_dim <= 16 * lanes)


FLASH_PROGRAMS = ("flash_f32", "flash_f32_split")


def float_program(head_dim: int) -> str:
    """Float FlashAttention: a row per thread while query and sums fit its registers, else a row split among threads."""
    return FLASH_PROGRAMS[head_dim > 8]


def integer_program(head_dim: int, p_bits: int, tensor_unit: bool) -> str:
    """The program for a device, by simx's cycles.

    At head_dim 8 the tensor unit's inner size of 32 is filled to a quarter: with two digits of p the SIMT program is
    faster. Else it is faster for few keys only, where starting the kernel takes most of the time.

    >>> integer_program(8, 16, tensor_unit=True), integer_program(8, 8, tensor_unit=True)
    ('intflash_simt', 'intflash_tensor')
    """
    return "intflash_tensor" if tensor_unit and (p_bits == 8 or head_dim > 8) else "intflash_simt"


def depth_constants(multiplier: int, shift: int) -> tuple[int, int]:
    """The kernel's form of C and k: ``(d << k) * C >> 23 == mulhu(d << a, M)`` for a score difference d.

    C is moved to the top of 32 bits (M = C << b) and what is left, a = k + 9 - b, shifts the query instead.
    From 16 octaves per score unit on (k >= 6) only d = 0 is alive and any M of that size gives the same p.

    Args:
        multiplier: C, 0 <= C < 2^31.
        shift: k, 0 <= k <= 8.

    Returns:
        ``(M, a)``, M < 2^32, 0 <= a <= 13.

    >>> depth_constants(768551, 0)
    (393498112, 0)
    """
    if shift >= 6:
        return (1 << 32) - 1, 13
    if multiplier == 0:
        return 0, 0
    up = min(32 - multiplier.bit_length(), shift + 9)
    return multiplier << up, shift + 9 - up


def float_launch(name: str, q: np.ndarray, k: np.ndarray, v: np.ndarray, sm_scale: float) -> Launch:
    """A float program on one head: q ``[Nq, D]``, k and v ``[Nk, D]``, head_dim up to 64, any N.

    Args:
        name: "attention_f32", "flash_f32", "flash_f32_split" or "flash_f16_tensor" (inputs rounded to half).
        sm_scale: the softmax scale.

    Returns:
        The launch; `float_output` reads its result.
    """
    program = PROGRAMS[name]
    d = _head_dim(q, v)
    scalars = {"n_k": k.shape[0], "score_scale": sm_scale * 1.4426950408889634}
    defines = {"HEAD_DIM": d}
    if program.tensor_unit:
        depth = round_up(d, 16)
        launch = _tensor_launch(program, q.astype(np.float16), k.astype(np.float16), v.astype(np.float16), d, depth)
        launch.buffers["o_addr"] = np.zeros((launch.buffers["q_addr"].shape[0], d), np.float32)
        launch.scalars |= scalars
        return launch
    lanes = head_lanes(d) if program.split else 1
    if program.split:
        defines["LANES"] = lanes
    rows, keys = round_up(q.shape[0], GROUP_THREADS), round_up(k.shape[0], KEY_TILE)
    buffers = {
        "q_addr": _padded(q.astype(np.float32), rows, d),
        "k_addr": _padded(k.astype(np.float32), keys, d),
        "v_addr": _padded(v.astype(np.float32), keys, d),
        "o_addr": np.zeros((rows, d), np.float32),
    }
    groups = rows * lanes // GROUP_THREADS
    grids: tuple[tuple[int, int, int], ...] = ((groups, 1, 1),)
    if program.stages == 3:
        buffers["scratch_addr"] = np.zeros((rows, keys), np.float32)
        used_keys = round_up(k.shape[0], GROUP_THREADS)
        grids = ((used_keys // GROUP_THREADS, rows, 1), (groups, 1, 1), (rows * d // GROUP_THREADS, 1, 1))
    return Launch(program, defines, buffers, ("o_addr",), grids, GROUP_THREADS, scalars | {"k_stride": keys})


def float_output(launch: Launch, n_q: int, head_dim: int) -> np.ndarray:
    return launch.buffers["o_addr"][:n_q, :head_dim]


def integer_launch(
    name: str,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    p_bits: int,
    exponent: tuple[int, int],
    multipliers: np.ndarray | None,
    out_bits: int,
) -> Launch:
    """An integer program on one head of int8 codes, head_dim up to 64, any N.

    Args:
        name: "intflash_simt" or "intflash_tensor".
        p_bits: 16 for `intflash`, 8 for `intflash_p8`.
        exponent: (C, k) of `intflash.numerics.exp`.
        multipliers: `MULTIPLIER` array of head_dim columns, s_V / s_O; None with ``out_bits=64``.
        out_bits: 8 or 16 for codes; 64 for the raw accumulator (int64) with l and the maximum score.

    Returns:
        The launch; `integer_output` reads its result.
    """
    program = PROGRAMS[name]
    d = _head_dim(q, v)
    depth_multiplier, depth_shift = depth_constants(*exponent)
    if program.tensor_unit:
        launch = _tensor_launch(program, q, k, v, d, round_up(d, 32))
        launch.defines |= {"P_BITS": p_bits, "LONG": int(p_bits == 16 and k.shape[0] > FLUSH_KEYS)}
        # a score of each row and key, then an int64 sum of each row and column
        launch.group_scratch = launch.scalars["k_stride"] * WARP_ROWS * 4
        launch.group_scratch += launch.defines["LONG"] * TENSOR_COLUMNS * WARP_ROWS * 8
        launch.buffers["colsum_addr"] = _padded(v.sum(0, dtype=np.int32)[None], 1, d)
        rows = launch.buffers["q_addr"].shape[0]
    else:
        rows, keys = round_up(q.shape[0], GROUP_THREADS), k.shape[0]
        buffers = {"q_addr": _padded(q, rows, d), "k_addr": _padded(k, keys, d), "v_addr": _padded(v, keys, d)}
        defines = {"HEAD_DIM": d, "P_BITS": p_bits, "LONG": int(p_bits == 16 and keys > FLUSH_KEYS)}
        grids = ((rows // GROUP_THREADS, 1, 1),)
        launch = Launch(program, defines, buffers, (), grids, GROUP_THREADS, {"k_stride": keys})
        launch.group_scratch = keys * GROUP_THREADS * 4  # a score of each row and key
    launch.defines |= {"OUT_BITS": out_bits, "WIDE": int(depth_shift > 11)}
    out_dtype = {8: np.int8, 16: np.int16, 64: np.int64}[out_bits]
    launch.buffers["o_addr"] = np.zeros((rows, d), out_dtype)
    launch.outputs = ("o_addr",)
    if out_bits == 64:
        launch.buffers["stats_addr"] = np.zeros(rows, ROW_STATS)
        launch.outputs = ("o_addr", "stats_addr")
    else:
        columns = np.zeros(d, MULTIPLIER)
        columns[: len(multipliers)] = multipliers
        columns["multiplier"][len(multipliers) :] = 1 << 23  # padded columns: any scale, their sums are 0
        launch.buffers["multiplier_addr"] = columns
        launch.defines["OUT_WIDE"] = int(columns["exponent"].max() > 22)
    launch.scalars |= {
        "n_k": k.shape[0],
        "depth_multiplier": depth_multiplier,
        "depth_shift": depth_shift,
        "q_max": (1 << (out_bits - 1)) - 1 if out_bits < 64 else 0,
    }
    return launch


def integer_output(launch: Launch, n_q: int, head_dim: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Codes (or raw sums) ``[Nq, D]``, and `ROW_STATS` ``[Nq]`` for raw output."""
    stats = launch.buffers.get("stats_addr")
    return launch.buffers["o_addr"][:n_q, :head_dim], None if stats is None else stats[:n_q]


def _tensor_launch(program: Program, q: np.ndarray, k: np.ndarray, v: np.ndarray, d: int, depth: int) -> Launch:
    """Rows padded to the warp's 8, K and Q to the unit's inner size, V transposed: all column-major operands."""
    rows, keys = round_up(q.shape[0], WARP_ROWS), round_up(k.shape[0], KEY_TILE)
    buffers = {
        "q_addr": _padded(q, rows, depth),
        "k_addr": _padded(k, keys, depth),
        "v_addr": np.ascontiguousarray(_padded(v, keys, d).T),
    }
    grid = (rows // WARP_ROWS, -(-d // TENSOR_COLUMNS), 1)
    return Launch(program, {"HEAD_DIM": d}, buffers, ("o_addr",), (grid,), WARP_ROWS, {"k_stride": keys})


def _head_dim(q: np.ndarray, v: np.ndarray) -> int:
    d = max(q.shape[1], v.shape[1])
    if not 1 <= d <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim {d}: the Vortex kernels take 1 to {MAX_HEAD_DIM}")
    return round_up(d, 8)


def _padded(x: np.ndarray, rows: int, columns: int) -> np.ndarray:
    out = np.zeros((rows, columns), x.dtype)
    out[: x.shape[0], : x.shape[1]] = x
    return out
