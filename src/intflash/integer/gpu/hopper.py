"""Launches of the CUDA C++ kernels for compute capability 9.0: int8 products (csrc/cuda/sm90/linear.cu) and LayerNorm
(csrc/cuda/layer_norm.cu).
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from intflash.backends import get_backend
from intflash.backends.cuda.program import C_TYPES, CudaLaunch, CudaProgram, multiprocessors, on_hopper
from intflash.backends.cuda.tensor_maps import TensorMap
from intflash.backends.cuda.wgmma import Product
from intflash.backends.gpu.tensors import GRID_LIMIT
from intflash.integer.gpu.kernels import roots
from intflash.integer.program import Buffer, Linear

STEP = 128  # codes of a row that a step multiplies
GROUP_COLUMNS = 32  # columns of a quad of lanes
SHARED_BYTES = 227 * 1024
LEAST_STAGES, MOST_STAGES = 3, 8
MOST_CONSUMERS = 3


class LinearParams(ctypes.Structure):
    _pointers = ("x", "weight", "bias", "multiplier", "table", "residual", "store_rows", "out")
    _fields_ = [
        *((name, ctypes.c_void_p) for name in _pointers),
        *((name, ctypes.c_int32) for name in ("rows", "columns", "steps", "shift", "low", "high")),
        *((name, ctypes.c_uint32) for name in ("image_rows", "out_rows", "image_reciprocal", "padding")),
    ]  # fmt: skip


@dataclass(frozen=True)
class Split:
    """How a product is split.

    Attributes:
        columns: of a CTA, a multiple of 32.
        consumers: warpgroups that multiply 64 rows each.
        resident: whether all weights of the CTA's columns stay in shared memory.
        parts: CTAs that share the rows of a block of columns.
    """

    columns: int
    consumers: int
    resident: bool
    parts: int

    @property
    def rows(self) -> int:
        """Of a tile."""
        return 64 if self.resident else 64 * self.consumers

    @property
    def stage_bytes(self) -> int:
        """Of a stage of the ring buffer."""
        return (self.rows + (0 if self.resident else self.columns)) * STEP


def available(device: torch.device) -> bool:
    """Whether kernels for compute capability 9.0 run on a device: other GPUs have the backend `cuda` too."""
    return get_backend("cuda").unavailable() is None and on_hopper(device)


def serves(weight: Tensor) -> bool:
    """Whether the kernel serves a product with weights ``[N, K]`` here."""
    n, k = weight.shape
    return available(weight.device) and n % 8 == 0 and k % 16 == 0


def padded(weight: Tensor) -> Tensor:
    """The weights ``[N, K]`` with rows of zeros up to a multiple of 32: themselves, or a copy."""
    missing = -len(weight) % GROUP_COLUMNS
    return torch.nn.functional.pad(weight, (0, 0, 0, missing)) if missing else weight


def fixed_bytes(columns: int, k: int, table_bytes: int, resident: bool) -> int:
    """Bytes of shared memory but the ring buffer: weights, constants, table and barriers."""
    steps = -(-k // STEP)
    barriers = 16 * MOST_STAGES + 8 * MOST_CONSUMERS + 8 * steps * resident
    return steps * columns * STEP * resident + columns * 8 + 128 + table_bytes + barriers


def stages_of(split: Split, k: int, table_bytes: int) -> int:
    """The stages of the ring buffer that fit, at most 8."""
    fixed = fixed_bytes(split.columns, k, table_bytes, split.resident)
    return min(MOST_STAGES, (SHARED_BYTES - fixed) // split.stage_bytes)


def table_copies(entry_bytes: int, bits: int) -> int:
    """Copies of a table in shared memory: as many as 32 KB hold."""
    return max(1, min(32, (32 << 10) // (entry_bytes << bits)))


# A model of a product's time in clocks of an H100, fitted to measured times of ViT-B's and DeiT-S's products.
_START = 2500
_STEP_CLOCKS = 18  # of a warpgroup between two steps
_PRODUCT_RATE = 0.7  # of the tensor cores' peak
_LOAD_BYTES = 71  # of a multiprocessor in a clock
_L2_BYTES = 24  # of each, if all load
_EPILOGUE_VALUES = {"codes": 16.5, "table": 9.0, "residual": 16.0, "accumulator": 16.5}  # of a CTA in a clock


def _clocks(split: Split, m: int, n: int, k: int, epilogue: str, processors: int) -> float:
    steps, columns = -(-k // STEP), split.columns
    slabs, tiles = -(-n // columns), -(-m // split.rows)
    rounds = -(-tiles // split.parts) * -(-slabs * split.parts // processors)
    load_bytes = min(_LOAD_BYTES, _L2_BYTES * processors / min(processors, slabs * split.parts))
    product = steps * 2 * columns / _PRODUCT_RATE
    finish = columns * 64 / _EPILOGUE_VALUES[epilogue]
    load = split.stage_bytes * steps / load_bytes
    if split.resident:  # epilogues overlap with other warpgroups' products
        weights = columns * STEP * steps / load_bytes
        each = max(product, load, finish / split.consumers + 0.1 * finish)
        return _START + weights + rounds * each + steps * _STEP_CLOCKS + finish
    each = max(product * split.consumers, load) + 0.9 * finish * split.consumers**0.3
    return _START + rounds * each + steps * _STEP_CLOCKS


# (N, K) -> rows -> columns, warpgroups, resident: the fastest that were measured on an H100 or H200.
_MEASURED = {
    (2304, 768): {197: (96, 1, True), 1576: (256, 2, False), 12608: (192, 3, False), 50432: (192, 3, True)},
    (3072, 768): {197: (96, 2, False), 1576: (96, 3, True), 12608: (192, 2, True), 50432: (192, 3, True)},
    (768, 3072): {197: (64, 1, False), 1576: (192, 1, False), 12608: (192, 2, False), 50432: (256, 2, False)},
    (768, 768): {197: (64, 1, False), 1576: (160, 1, False), 12608: (128, 2, True), 50432: (192, 2, True)},
    (1152, 384): {197: (64, 1, True), 1576: (96, 3, True), 50432: (192, 3, True)},
    (1536, 384): {197: (64, 1, False), 1576: (128, 3, True), 50432: (192, 3, True)},
    (384, 1536): {197: (32, 1, False), 1576: (96, 1, False), 50432: (192, 2, False)},
    (384, 384): {197: (32, 1, False), 1576: (64, 2, True), 50432: (128, 2, True)},
}  # fmt: skip
_MANY_ROWS = 8192  # such products are alike


def _measured(m: int, n: int, k: int) -> Split | None:
    """The measured split of about as many rows."""
    found = _MEASURED.get((n, k), {})
    near = [rows for rows in found if rows / 1.5 < m < rows * 1.5 or min(m, rows) >= _MANY_ROWS]
    if not near:
        return None
    return Split(*found[min(near, key=lambda rows: abs(math.log(rows / m)))], 1)


def _with_parts(split: Split, m: int, n: int, processors: int) -> Split:
    tiles, slabs = -(-m // split.rows), -(-n // split.columns)
    return replace(split, parts=min(tiles, max(1, processors // slabs), GRID_LIMIT))


@functools.cache
def choose_split(m: int, n: int, k: int, epilogue: str, table_bytes: int, processors: int) -> Split:
    """The split of ``[m, k]`` times ``[k, n]``: a measured one, or the one that ends first by the model of its time.

    Args:
        processors: of the GPU.
    """
    measured = _measured(m, n, k)
    if measured is not None and stages_of(measured, k, table_bytes) >= LEAST_STAGES:
        return _with_parts(measured, m, n, processors)
    most = min(256, -(-n // GROUP_COLUMNS) * GROUP_COLUMNS)
    candidates = []
    for columns in range(GROUP_COLUMNS, most + 1, GROUP_COLUMNS):
        slabs = -(-n // columns)
        for resident, consumers in itertools.product((True, False), (1, 2, 3)):
            if consumers == 3 and columns > (160 if epilogue == "residual" else 192):
                continue  # the registers
            split = Split(columns, consumers, resident, 1)
            tiles = -(-m // split.rows)
            if stages_of(split, k, table_bytes) < LEAST_STAGES:
                continue
            if resident and (consumers > 1) != (tiles * slabs > processors):
                continue  # a second warpgroup is for a second tile
            candidates.append(_with_parts(split, m, n, processors))
    return min(candidates, key=lambda split: _clocks(split, m, n, k, epilogue, processors))


def x_map(x: Tensor, rows: int) -> TensorMap:
    """Of codes ``[M, K]``, in boxes of `rows` rows."""
    m, k = x.shape
    return TensorMap((k, m, 1, 1, 1), (k, k * m, k * m, k * m), (STEP, rows, 1, 1, 1), 128, x.data_ptr())


def weight_map(weight: Tensor, columns: int) -> TensorMap:
    """Of weights ``[N, K]``, N a multiple of 32.

    Row 8 i + 2 q + j of a box is column 32 (i / 4) + 8 q + 2 (i % 4) + j.
    """
    n, k = weight.shape
    groups = columns // GROUP_COLUMNS
    sizes, strides = (k, 2, 4, 4, n // GROUP_COLUMNS), (k, 8 * k, 2 * k, 32 * k)
    return TensorMap(sizes, strides, (STEP, 2, 4, 4, groups), 128, weight.data_ptr())


def quotient_reciprocal(x: int) -> int:
    """What `quotient` of csrc/cuda/params.cuh divides any number by x with; 0 where nothing is divided by x = 0."""
    return (2**32 - 1) // x if x else 0


def linear_launch(
    op: Linear, x: Tensor, weight: Tensor, bias: Tensor, multiplier: Tensor | None, table: Tensor | None,
    residual: Tensor | None, store_rows: Tensor | None, out: Tensor, buffer: Buffer, split: Split | None = None,
) -> CudaLaunch:  # fmt: skip
    """As `kernels.linear_launch`; weight: `padded`."""
    m, k = x.shape
    n, images = out.shape[-1], len(out)
    table_bytes, copies = 0, 1
    if table is not None:
        copies = table_copies(table.element_size(), op.bits)
        table_bytes = copies * table.element_size() << op.bits
    split = split or choose_split(m, n, k, op.epilogue, table_bytes, multiprocessors(x.device))
    low, high = buffer.limits
    if op.epilogue == "table":
        low, high = -(1 << (op.bits - 1)), (1 << (op.bits - 1)) - 1
    constant = residual is not None and residual.dim() == 2
    wide = op.shift < 32
    stages = stages_of(split, k, table_bytes)
    program = CudaProgram.of(
        "sm90/linear.cu", (Product(split.columns, "s8"),), "linear", COLUMNS=split.columns,
        CONSUMERS=split.consumers, STAGES=stages, RESIDENT=int(split.resident), EPILOGUE=op.epilogue.upper(),
        OUT=C_TYPES[out.dtype], WIDE_SHIFT=int(wide), TABLE_BITS=op.bits, TABLE_COPIES=copies,
        MAPPED=int(store_rows is not None), CONSTANT_RESIDUAL=int(constant),
    )  # fmt: skip
    tensors = dict(
        x=x, weight=weight, bias=bias, multiplier=multiplier, table=table, residual=residual, store_rows=store_rows,
        out=out,
    )  # fmt: skip
    tensors = {name: t for name, t in tensors.items() if t is not None}
    image_rows = m // images
    parameters = LinearParams(
        **{name: t.data_ptr() for name, t in tensors.items()}, rows=m, columns=n, steps=-(-k // STEP),
        shift=op.shift if wide else op.shift - 32, low=low + op.symmetric, high=high, image_rows=image_rows,
        out_rows=out[0].numel() // n, image_reciprocal=quotient_reciprocal(image_rows),
    )  # fmt: skip
    grid = (-(-n // split.columns), split.parts, 1)
    shared = fixed_bytes(split.columns, k, table_bytes, split.resident) + stages * split.stage_bytes
    maps = x_map(x, split.rows), weight_map(weight, split.columns)
    there = tuple(tensors.values())
    return CudaLaunch(program, grid, 128 * (split.consumers + 1), shared, parameters, x.device, there, True, maps)


class OutputParams(ctypes.Structure):
    _pointers = ("multiplier", "bias", "out")
    _fields_ = [
        *((name, ctypes.c_void_p) for name in _pointers),
        *((name, ctypes.c_int32) for name in ("shift", "low", "high", "padding")),
    ]  # fmt: skip


class LayerNormParams(ctypes.Structure):
    _pointers = ("x", "load_rows", "roots")
    _fields_ = [
        *((name, ctypes.c_void_p) for name in _pointers), ("first", OutputParams), ("second", OutputParams),
        ("eps", ctypes.c_int64), ("rows", ctypes.c_int32),
        *((name, ctypes.c_uint32) for name in ("image_rows", "in_rows", "image_reciprocal")),
    ]  # fmt: skip


_WARPS = 4  # of a CTA of layer_norm.cu
_CTAS_PER_SM = (7, 5, 4, 3, 3, 2)  # whose registers hold constants and rows, by the turns in which a row is read
_CTAS_OF_TWO = (5, 4, 3, 2)  # with two outputs
MOST_CHANNELS_OF_TWO = 1024
MOST_CHANNELS = {torch.int16: 1536, torch.int32: 1024}  # by the stream's dtype


def serves_layer_norm(x: Tensor, out: Tensor, load_rows: Tensor | None) -> bool:
    """Whether csrc/cuda/layer_norm.cu serves a LayerNorm of x ``[B, rows, channels]`` here."""
    channels = out.shape[-1]
    parts = 1 if load_rows is None else load_rows.shape[1]
    fits = channels % (8 * parts) == 0 and channels <= MOST_CHANNELS.get(x.dtype, 0)
    return fits and available(x.device)


class Scaled(NamedTuple):
    """An output of a LayerNorm ``[B, rows, channels]``, and what its channels are scaled with."""

    multiplier: Tensor
    bias: Tensor
    out: Tensor
    shift: int
    limits: tuple[int, int]


def layer_norm_launch(
    x: Tensor, multiplier: Tensor, bias: Tensor, out: Tensor, load_rows: Tensor | None, shift: int, eps: int,
    limits: tuple[int, int], second: Scaled | None = None,
) -> CudaLaunch:  # fmt: skip
    """As `kernels.layer_norm_launch`; second: another output of the same rows."""
    batch, rows, channels = out.shape
    lanes = 4
    while channels > 8 * 4 * lanes and lanes < 32:  # four turns
        lanes *= 2
    turns = -(-channels // (8 * lanes))
    ctas = (_CTAS_PER_SM if second is None else _CTAS_OF_TWO)[turns - 1] - (x.dtype == torch.int32)
    program = CudaProgram.of(
        "layer_norm.cu", (), "layer_norm", CHANNELS=channels, MAPPED=int(load_rows is not None),
        PARTS=1 if load_rows is None else load_rows.shape[1], IN=C_TYPES[x.dtype],
        OUT=C_TYPES[out.dtype], LANES=lanes, CTAS_PER_SM=ctas, SECOND=int(second is not None),
        OUT2=C_TYPES[out.dtype if second is None else second.out.dtype],
    )  # fmt: skip
    parameters = LayerNormParams(
        eps=eps, rows=batch * rows, image_rows=rows, in_rows=x.shape[1], image_reciprocal=quotient_reciprocal(rows)
    )
    there: list[Tensor] = []

    def point(struct: ctypes.Structure, **tensors: Tensor | None) -> None:
        for name, t in tensors.items():
            if t is not None:
                setattr(struct, name, t.data_ptr())
                there.append(t)

    point(parameters, x=x, load_rows=load_rows, roots=roots(x.device))
    outputs = {"first": Scaled(multiplier, bias, out, shift, limits), "second": second}
    for name, made in outputs.items():
        if made is not None:
            scaled = getattr(parameters, name)
            scaled.shift, (scaled.low, scaled.high) = made.shift, made.limits
            point(scaled, multiplier=made.multiplier, bias=made.bias, out=made.out)
    grid = (min(-(-batch * rows * lanes // (32 * _WARPS)), ctas * multiprocessors(x.device)), 1, 1)
    return CudaLaunch(program, grid, 32 * _WARPS, 0, parameters, x.device, tuple(there), True)
