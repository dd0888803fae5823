"""Launches csrc/cuda/window_attention.cu, for at most 64 queries and keys: one or more warps per window and head."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from intflash.backends.cuda.parameters import HEAD_AMAX_IN_KERNEL, has_row_scales, parameters
from intflash.backends.cuda.program import C_TYPES, CudaLaunch, CudaProgram
from intflash.backends.gpu.constants import Constants
from intflash.backends.gpu.tensors import Statistics, readable
from intflash.problem import Problem

MAX_WINDOW = 64  # queries or keys
METHODS = ("intflash", "intflash_p8")


def unsupported(problem: Problem) -> str | None:
    """Returns why the kernel cannot serve the problem, or None."""
    if problem.method not in METHODS:
        return f"windows support the methods {' and '.join(METHODS)}"
    q, k, v = (x if isinstance(x, Tensor) else x.data for x in (problem.q, problem.k, problem.v))
    (batch, heads, nq, d), (nk, dv) = q.shape, v.shape[2:]
    if max(nq, nk) > MAX_WINDOW:
        return f"windows have at most {MAX_WINDOW} queries and keys, got {nq} and {nk}"
    if d != dv or d % 16 or d > 64:
        return f"needs one head_dim, a multiple of 16 up to 64, got {d} and {dv}"
    if problem.causal is not None:
        return "windows do not support a causal mask"
    if batch * heads * heads >= 1 << 32:
        return f"indexes at most 2^32 / heads windows and heads, got {batch * heads}"
    if any(_span_bytes(x) >= 1 << 31 for x in (q, k, v)):
        return "tokens of a window must lie within 2 GiB"
    if _key_major(v):
        apart = [s for s, n in zip(v.stride(), v.shape, strict=True) if n > 1 and s != 1]
        if any(s % 4 for s in apart) or v.data_ptr() % 4 or not readable(v, -(-nk // 16) * 16):
            return "contiguous keys of V need rows at multiples of 4 bytes, padded to 16 keys"
        if dv * v.stride(3) >= 1 << 32:
            return f"channels of V must lie within 4 GiB, got strides {v.stride()}"
    for mask in (problem.bias, problem.keep):
        if mask is None:
            continue
        if mask.shape[3] > 1 and mask.stride(3) != 1:
            return "a mask needs contiguous keys"
        # beyond, the quotient by the reciprocal is not exact
        if mask.shape[0] < batch and batch * mask.shape[0] >= 1 << 32:
            return f"a mask of {mask.shape[0]} batches repeats over at most 2^32 in all, got {batch}"
    return None


def _span_bytes(x: Tensor) -> int:
    """Bytes between the first and the last token of a window, or the largest stride if that is larger."""
    return max(x.shape[2] * abs(x.stride(2)) * x.element_size(), *(abs(s) >> 1 for s in x.stride()))


def _key_major(v: Tensor) -> bool:
    return v.element_size() == 1 and v.stride(2) == 1 and v.shape[2] > 1


@dataclass(frozen=True)
class WindowSplit:
    """How windows are split: warps per window, rows per tile of a warp (8 or 16), windows per CTA."""

    parts: int = 1
    rows: int = 16
    windows: int = 1

    def warps(self, nq: int) -> int:
        """The number of warps of a window that have rows. A single last row takes nearly as long as a tile."""
        remainder = nq % 16 == 1
        return min(self.parts, -(-(nq - remainder) // self.rows) + remainder)


def window_launch(
    problem: Problem, bits: int, constants: Constants, out: Tensor, statistics: Statistics,
    scales: tuple[Tensor, ...] | None, split: WindowSplit | None = None,
) -> CudaLaunch:  # fmt: skip
    """Returns the launch for a problem of int8 codes, or of floats with the scales of Q, K and V or
    HEAD_AMAX_IN_KERNEL.
    """
    q, k, v = (x.data if scales is None else x for x in (problem.q, problem.k, problem.v))
    (batch, heads, nq, d), nk = q.shape, k.shape[2]
    split = split or choose_split(batch * heads)
    parts = split.warps(nq)
    warps = parts * split.windows
    resident = resident_warps(nk, d, q.element_size(), problem.bias is not None or problem.keep is not None)
    key_major = scales is None and _key_major(v)
    rows = (q, k, out) if key_major else (q, k, v, out)
    program = CudaProgram.of(
        "window_attention.cu", (), NQ=nq, NK=nk, HEAD_DIM=d, BITS=bits, IN=C_TYPES[q.dtype], OUT=C_TYPES[out.dtype],
        KEY_MAJOR=int(key_major), PACKED=int(all(x.stride(2) == d or x.shape[2] == 1 for x in rows)),
        ROW_SCALES=int(has_row_scales(constants, scales)), HEAD_AMAX_IN_KERNEL=int(scales == HEAD_AMAX_IN_KERNEL),
        BIAS=_mask_kind(problem.bias), KEEP=_mask_kind(problem.keep),
        WARPS_PER_WINDOW=parts, TILE_ROWS=split.rows, WINDOWS_PER_CTA=split.windows,
        CTAS_PER_SM=max(1, resident // warps),
    )  # fmt: skip
    params, keeps = parameters(problem, (q, k, v), scales, constants, out, statistics)
    grid = (-(-batch * heads // split.windows), 1, 1)
    return CudaLaunch(program, grid, 32 * warps, 0, params, q.device, keeps, overlaps=True)


def _mask_kind(mask: Tensor | None) -> int:
    return 0 if mask is None else 1 if mask.shape[3] > 1 else 2


def resident_warps(nk: int, d: int, itemsize: int, masked: bool) -> int:
    """The number of warps per multiprocessor whose registers hold K and V as loaded, the scores and 40 other values."""
    key_tiles, groups = -(-nk // 8), -(-nk // 16)
    scores = key_tiles * (10 if masked else 4)
    registers = (key_tiles * d // 16 + groups * -(-d // 32) * 4) * itemsize + scores + 40
    return 16 if registers <= 128 else 12 if registers <= 168 else 8


def choose_split(count: int) -> WindowSplit:
    """Chooses the split. Several warps share a window while there are few windows."""
    if count > 8 * 132:
        return WindowSplit()
    return WindowSplit(parts=4) if count > 66 else WindowSplit(parts=8, rows=8)
