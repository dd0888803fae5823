"""Launches of the CUDA C++ kernels for compute capability 9.0: int8 products (csrc/cuda/sm90/linear.cu) and LayerNorm
(csrc/cuda/layer_norm.cu).
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from intflash.backends import get_backend
from intflash.backends.cuda import tensor_maps
from intflash.backends.cuda.parameters import quotient_reciprocal
from intflash.backends.cuda.program import C_TYPES, CudaLaunch, CudaProgram
from intflash.backends.cuda.tensor_maps import TensorMap
from intflash.backends.cuda.wgmma import Product
from intflash.integer.gpu.kernels import roots
from intflash.integer.program import Buffer, Linear

STEP = 128  # codes of a row that a step multiplies
GROUP_COLUMNS = 32  # columns of a quad of lanes
SHARED_BYTES = 227 * 1024
PROCESSORS = 132
MOST_STAGES = 8
_C_INT32 = "i32"


class LinearParams(ctypes.Structure):
    _pointers = ("x", "weight", "bias", "multiplier", "table", "residual", "store_rows", "out")
    _fields_ = [
        *((name, ctypes.c_void_p) for name in _pointers),
        *((name, ctypes.c_int32) for name in ("rows", "columns", "steps", "shift", "low", "high")),
        *((name, ctypes.c_uint32) for name in ("image_rows", "out_rows", "image_reciprocal", "padding")),
    ]  # fmt: skip


class LinearMaps(ctypes.Structure):
    _fields_ = [("x", ctypes.c_uint64 * 16), ("weight", ctypes.c_uint64 * 16)]


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
    def rings(self) -> int:
        """Ring buffers: one for each warpgroup that has tiles of its own."""
        return self.consumers if self.resident else 1

    @property
    def stage_bytes(self) -> int:
        """Of a stage of a ring buffer."""
        return (self.rows + (0 if self.resident else self.columns)) * STEP


def serves(weight: Tensor) -> bool:
    """Whether the kernel serves a product with weights ``[N, K]`` here."""
    n, k = weight.shape
    return get_backend("cuda").unavailable() is None and n % 8 == 0 and k % 16 == 0


def padded(weight: Tensor) -> Tensor:
    """The weights ``[N, K]`` with rows of zeros up to a multiple of 32: themselves, or a copy."""
    missing = -len(weight) % GROUP_COLUMNS
    return torch.nn.functional.pad(weight, (0, 0, 0, missing)) if missing else weight


def fixed_bytes(columns: int, k: int, table_bytes: int, resident: bool) -> int:
    """Bytes of shared memory but the ring buffer: weights, constants, table and barriers."""
    steps = -(-k // STEP)
    return steps * (columns * STEP + 8) * resident + columns * 8 + 128 + table_bytes + 16 * 2 * MOST_STAGES


def stages_of(split: Split, k: int, table_bytes: int) -> int:
    """The stages of each ring buffer that fit, at most 8."""
    fixed = fixed_bytes(split.columns, k, table_bytes, split.resident)
    return min(MOST_STAGES, (SHARED_BYTES - fixed) // (split.stage_bytes * split.rings))


def table_copies(entry_bytes: int, bits: int) -> int:
    """Copies of a table in shared memory: as many as 32 KB hold."""
    return max(1, min(32, (32 << 10) // (entry_bytes << bits)))


@functools.cache
def choose_split(m: int, n: int, k: int, table_bytes: int = 0, residual: bool = False) -> Split:
    """The split of ``[m, k]`` times ``[k, n]`` that ends first by a model of an H200's multiprocessors.

    In clocks: a warpgroup's product of 64 rows, 32 codes and c columns takes c / 2, a multiprocessor loads 32 bytes
    in one, and an epilogue finishes 16 values of a warpgroup.
    """
    steps = -(-k // STEP)
    best, least = None, float("inf")
    for columns in range(GROUP_COLUMNS, 257, GROUP_COLUMNS):
        slabs = -(-n // columns)
        if columns - GROUP_COLUMNS >= n or slabs > 65535:
            continue
        for resident, consumers in ((True, 1), (True, 2), (False, 1), (False, 2), (False, 3)):
            if consumers == 3 and columns > (160 if residual else 192):
                continue  # the registers
            split = Split(columns, consumers, resident, 1)
            if stages_of(split, k, table_bytes) < 3:
                continue
            tiles = -(-m // split.rows)
            if resident and (consumers > 1) != (tiles * slabs > PROCESSORS):
                continue  # a second warpgroup is for a second tile
            parts = min(tiles, max(1, PROCESSORS // slabs), 65535)
            rounds = -(-tiles // parts) * -(-slabs * parts // PROCESSORS)
            product = steps * 2 * columns * (1 if resident else consumers)
            epilogue = columns * 64 / 16
            if resident:
                load = 64 * STEP * steps / 32
                each = max(product, load, epilogue)
                time = columns * STEP * steps / 32 + rounds * each + epilogue
            else:
                load = (split.rows + columns) * STEP * steps / 32
                time = rounds * (max(product, load) + epilogue)
            if time < least:
                best, least = Split(columns, consumers, resident, parts), time
    assert best is not None
    return best


def x_map(x: Tensor, rows: int) -> TensorMap:
    """Of codes ``[M, K]``, in boxes of `rows` rows."""
    m, k = x.shape
    return TensorMap((k, m, 1, 1, 1), (k, k * m, k * m, k * m), (STEP, rows, 1, 1, 1), 128, 0, 0)


def weight_map(weight: Tensor, columns: int) -> TensorMap:
    """Of weights ``[N, K]``, N a multiple of 32.

    Row 8 i + 2 q + j of a box is column 32 (i / 4) + 8 q + 2 (i % 4) + j.
    """
    n, k = weight.shape
    groups = columns // GROUP_COLUMNS
    return TensorMap((k, 2, 4, 4, n // GROUP_COLUMNS), (k, 8 * k, 2 * k, 32 * k), (STEP, 2, 4, 4, groups), 128, 0, 0)


def _maps(x: TensorMap, weight: TensorMap, parameters: LinearParams) -> LinearMaps:
    return LinearMaps(tensor_maps.encoded(x, parameters.x), tensor_maps.encoded(weight, parameters.weight))


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
    split = split or choose_split(m, n, k, table_bytes, residual is not None)
    low, high = buffer.limits
    if op.epilogue == "table":
        low, high = -(1 << (op.bits - 1)), (1 << (op.bits - 1)) - 1
    constant = residual is not None and residual.dim() == 2
    wide = op.shift < 32
    stages = stages_of(split, k, table_bytes)
    program = CudaProgram.of(
        "sm90/linear.cu", (Product(split.columns, "s8"),), "linear", COLUMNS=split.columns,
        CONSUMERS=split.consumers, STAGES=stages, RESIDENT=int(split.resident), EPILOGUE=op.epilogue.upper(),
        OUT=C_TYPES.get(out.dtype, _C_INT32), WIDE_SHIFT=int(wide), TABLE_BITS=op.bits, TABLE_COPIES=copies,
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
    shared = fixed_bytes(split.columns, k, table_bytes, split.resident) + split.rings * stages * split.stage_bytes
    maps = functools.partial(_maps, x_map(x, split.rows), weight_map(weight, split.columns))
    places = {getattr(LinearParams, name).offset: t for name, t in tensors.items()}
    return CudaLaunch(
        program, grid, 128 * (split.consumers + 1), shared, parameters, x.device, places, True, maps
    )  # fmt: skip


class LayerNormParams(ctypes.Structure):
    _pointers = ("x", "multiplier", "bias", "load_rows", "roots", "out")
    _fields_ = [
        *((name, ctypes.c_void_p) for name in _pointers), ("eps", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("rows", "shift", "low", "high")),
        *((name, ctypes.c_uint32) for name in ("image_rows", "in_rows", "image_reciprocal", "padding")),
    ]  # fmt: skip


_WARPS = 4  # of a CTA of layer_norm.cu
_CTAS_PER_SM = (7, 5, 4, 3, 3, 2)  # whose registers hold constants and rows, by the turns in which a row is read
MOST_CHANNELS = {torch.int16: 1536, torch.int32: 1024}  # by the stream's dtype


def serves_layer_norm(x: Tensor, out: Tensor, load_rows: Tensor | None) -> bool:
    """Whether csrc/cuda/layer_norm.cu serves a LayerNorm of x ``[B, rows, channels]`` here."""
    channels = out.shape[-1]
    parts = 1 if load_rows is None else load_rows.shape[1]
    fits = channels % (8 * parts) == 0 and channels <= MOST_CHANNELS.get(x.dtype, 0)
    return fits and get_backend("cuda").unavailable() is None


def layer_norm_launch(
    x: Tensor, multiplier: Tensor, bias: Tensor, out: Tensor, load_rows: Tensor | None, shift: int, eps: int,
    limits: tuple[int, int],
) -> CudaLaunch:  # fmt: skip
    """As `kernels.layer_norm_launch`."""
    batch, rows, channels = out.shape
    lanes = 4
    while channels > 8 * 4 * lanes and lanes < 32:  # four turns
        lanes *= 2
    ctas = _CTAS_PER_SM[-(-channels // (8 * lanes)) - 1] - (x.dtype == torch.int32)
    program = CudaProgram.of(
        "layer_norm.cu", (), "layer_norm", CHANNELS=channels, MAPPED=int(load_rows is not None),
        PARTS=1 if load_rows is None else load_rows.shape[1],
        IN=C_TYPES.get(x.dtype, _C_INT32), OUT=C_TYPES.get(out.dtype, _C_INT32), LANES=lanes, CTAS_PER_SM=ctas,
    )  # fmt: skip
    tensors = dict(x=x, multiplier=multiplier, bias=bias, load_rows=load_rows, roots=roots(x.device), out=out)
    tensors = {name: t for name, t in tensors.items() if t is not None}
    parameters = LayerNormParams(
        **{name: t.data_ptr() for name, t in tensors.items()}, eps=eps, rows=batch * rows, shift=shift, low=limits[0],
        high=limits[1], image_rows=rows, in_rows=x.shape[1], image_reciprocal=quotient_reciprocal(rows),
    )  # fmt: skip
    places = {getattr(LayerNormParams, name).offset: t for name, t in tensors.items()}
    grid = (min(-(-batch * rows * lanes // (32 * _WARPS)), ctas * PROCESSORS), 1, 1)
    return CudaLaunch(program, grid, 32 * _WARPS, 0, parameters, x.device, places, True)
