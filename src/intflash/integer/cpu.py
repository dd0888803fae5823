"""The native CPU executor of a program: one call of C++ computes the whole forward pass on one pool of threads.

`csrc/cpu/program.cpp` holds it. A program is packed once: weights in the order in which the processor's kernels read
them, and every buffer at its place in one workspace, in which buffers that do not live at the same time share memory.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from intflash.backends import cpu
from intflash.integer.program import (
    Attention,
    Buffer,
    Embedding,
    LayerNorm,
    Linear,
    Patches,
    Pool,
    Program,
)

LINE = 64  # bytes: buffers begin at cache lines
# In the order of the native enumerations.
WIDTHS = {torch.int8: 0, torch.int16: 1, torch.int32: 2}
EPILOGUES = {"codes": 0, "table": 1, "residual": 2, "accumulator": 3}


DTYPES = {"float": torch.float32, "uint8": torch.uint8, "index": torch.int64, "mask": torch.bool}  # of inputs

_packed: weakref.WeakKeyDictionary[Program, PackedProgram] = weakref.WeakKeyDictionary()
_packing = threading.Lock()


def run(program: Program, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The buffers of the program's outputs ``[B, *shape]``. The first call packs the program.

    Args:
        program: a checked one that is not `refused`.
        inputs: by name, with a batch axis, as `Input` says; indices int64, masks bool.
    """
    with _packing:
        packed = _packed.get(program)
        if packed is None:
            packed = _packed[program] = PackedProgram(program)
    return packed.run(inputs)


def refused(program: Program, device: torch.device) -> str | None:
    """Why this executor cannot run a program on a device, or None."""
    missing = cpu.BACKEND.unavailable()
    if missing is not None:
        return missing
    if device.type != "cpu":
        return f"it takes CPU tensors, got {device}"
    heads = {name for name, buffer in program.buffers.items() if len(buffer.shape) == 4}
    for operation in program.operations:
        if not isinstance(operation, Attention) and heads.intersection(program.reads(operation)):
            return f"queries, keys and values can be read by attention only, {operation.name!r} reads them"
    if heads.intersection(output.buffer for output in program.outputs):
        return "queries, keys and values cannot be outputs"
    return None


@dataclass(frozen=True)
class Block:
    """Memory of the workspace that one buffer has, or several one after another in time or side by side in rows."""

    first: int  # the operations between which it is in use
    last: int
    size: int  # bytes of one image


@dataclass(frozen=True)
class Plan:
    """Where each buffer is.

    Attributes:
        places: buffer -> (offset of its block for one image, bytes to its first column, bytes from row to row).
        image_bytes: of the workspace.
    """

    places: dict[str, tuple[int, int, int]]
    image_bytes: int


def plan(program: Program) -> Plan:
    """Places for all buffers, so that few bytes serve all: the largest block first, each as low as is free.

    Queries, keys and values of one Linear lie side by side in its rows. The sum of a residual takes the place of the
    residual where nothing else needs that.
    """
    last_uses = program.last_uses()
    owner: dict[str, str] = {}  # buffer -> the first buffer of its block
    column: dict[str, int] = {}
    blocks: dict[str, Block] = {}
    for i, operation in enumerate(program.operations):
        names = program.writes(operation)
        last = max(last_uses[name] for name in names)
        replaced = operation.residual if isinstance(operation, Linear) else None
        if replaced in program.buffers and last_uses[replaced] == i:
            block = owner[names[0]] = owner[replaced]
            column[names[0]] = 0
            blocks[block] = Block(blocks[block].first, last, blocks[block].size)
            continue
        row = [_row_bytes(program.buffers[name]) for name in names]
        for j, name in enumerate(names):
            owner[name], column[name] = names[0], sum(row[:j])
        size = sum(_bytes(program.buffers[name]) for name in names)
        blocks[names[0]] = Block(i, last, -(-size // LINE) * LINE)
    offsets = _offsets(blocks)
    widths: dict[str, int] = {}
    for name in program.buffers:
        if name in owner:
            widths[owner[name]] = widths.get(owner[name], 0) + _row_bytes(program.buffers[name])
    places = {}
    for name in owner:
        side_by_side = len(program.buffers[name].shape) == 4
        step = widths[owner[name]] if side_by_side else _row_bytes(program.buffers[name])
        places[name] = (offsets[owner[name]], column[name], step)
    return Plan(places, max((offsets[b] + blocks[b].size for b in blocks), default=LINE))


def _offsets(blocks: Mapping[str, Block]) -> dict[str, int]:
    offsets: dict[str, int] = {}
    for name, block in sorted(blocks.items(), key=lambda item: -item[1].size):
        others = sorted(
            (offsets[other], blocks[other].size)
            for other in offsets
            if blocks[other].first <= block.last and block.first <= blocks[other].last
        )
        at = 0
        for offset, size in others:
            if at + block.size <= offset:
                break
            at = max(at, offset + size)
        offsets[name] = at
    return offsets


def _bytes(buffer: Buffer) -> int:
    return math.prod(buffer.shape) * buffer.dtype.itemsize


def _row_bytes(buffer: Buffer) -> int:
    """Bytes of a row: all channels, or of queries, keys and values all heads of a token."""
    channels = buffer.shape[1] * buffer.shape[3] if len(buffer.shape) == 4 else buffer.shape[-1]
    return channels * buffer.dtype.itemsize


class PackedProgram:
    """A program packed for this processor.

    Args:
        program: a checked one, whose tensors are on the CPU. It is not kept: the constants are copied.
        isa: one of `intflash.backends.cpu.instruction_sets()`; None takes the first. The bits do not depend on it.
    """

    def __init__(self, program: Program, isa: str | None = None) -> None:
        self._inputs = program.inputs
        self._outputs = {o.buffer: program.buffers[o.buffer] for o in program.outputs}
        self._program = program  # while it is packed
        self._plan = plan(program)
        self._native = cpu._native.Program(isa or "", self._plan.image_bytes)
        for operation in program.operations:
            _STEPS[type(operation)](self, operation)
        for i, (name, buffer) in enumerate(self._outputs.items()):
            self._native.output(x=self._place(name), bytes=_bytes(buffer), output=i)
        del self._program

    def run(self, inputs: Mapping[str, Tensor], threads: int | None = None) -> dict[str, Tensor]:
        """The buffers of the program's outputs ``[B, *shape]``.

        Args:
            inputs: by name, with a batch axis, as `Input` says.
            threads: at most so many, the caller among them; None takes `torch.get_num_threads()`. The bits do not
                depend on it.
        """
        given = tuple(
            None if inputs.get(i.name) is None else inputs[i.name].to(DTYPES[i.kind]).contiguous() for i in self._inputs
        )
        batch = next(len(x) for x in given if x is not None)
        out = {name: torch.empty((batch, *buffer.shape), dtype=buffer.dtype) for name, buffer in self._outputs.items()}
        if batch:
            self._native.run(
                images=batch, inputs=given, outputs=tuple(out.values()), threads=threads or torch.get_num_threads()
            )
        return out

    def _place(self, name: str) -> tuple[int, int, int]:
        return self._plan.places[name]

    def _tensor(self, name: str | None) -> Tensor | None:
        return None if name is None else self._program.tensors[name].contiguous()

    def _buffer(self, name: str) -> Buffer:
        return self._program.buffers[name]

    def _input(self, name: str) -> int:
        return [given.name for given in self._inputs].index(name)

    def _patches(self, op: Patches) -> None:
        given = self._inputs[self._input(op.image)]
        inverse = 1.0 / torch.tensor(op.scale, dtype=torch.float32)
        self._native.patches(
            image=self._input(op.image), out=self._place(op.out), is_float=given.kind == "float", shape=given.shape,
            patch=op.patch, inverse=float(inverse), zero_point=op.zero_point,
        )  # fmt: skip

    def _embedding(self, op: Embedding) -> None:
        out = self._buffer(op.out)
        self._native.embedding(
            indices=tuple(map(self._input, op.indices)), tables=tuple(map(self._tensor, op.tables)),
            rows=self._tensor(op.rows), out=self._place(op.out), width=WIDTHS[out.dtype], limits=out.limits,
            image_rows=out.shape[0], channels=out.shape[1],
        )  # fmt: skip

    def _linear(self, op: Linear) -> None:
        weight, out = self._tensor(op.weight), self._buffer(op.out[0])
        n, k = weight.shape
        rows = math.prod(self._buffer(op.x).shape) // k
        low, high = out.limits
        is_constant = op.residual in self._program.tensors
        self._native.linear(
            x=self._place(op.x), out=self._place(op.out[0]), weight=weight, bias=self._tensor(op.bias),
            multiplier=self._tensor(op.multiplier), shift=op.shift, rows=rows, epilogue=EPILOGUES[op.epilogue],
            width=WIDTHS[out.dtype], limits=(low + op.symmetric, high), table=self._tensor(op.table),
            table_bits=op.bits, store_rows=self._tensor(op.store_rows),
            residual_place=None if op.residual is None or is_constant else self._place(op.residual),
            residual=self._tensor(op.residual) if is_constant else None,
            out_rows=out.shape[0] if op.store_rows else rows,
        )  # fmt: skip

    def _layer_norm(self, op: LayerNorm) -> None:
        x, out = self._buffer(op.x), self._buffer(op.out)
        self._native.layer_norm(
            x=self._place(op.x), out=self._place(op.out), multiplier=self._tensor(op.multiplier),
            bias=self._tensor(op.bias), shift=op.shift, eps=op.eps, in_width=WIDTHS[x.dtype], width=WIDTHS[out.dtype],
            limits=out.limits, in_rows=x.shape[0], out_rows=out.shape[0], channels=out.shape[1],
            load_rows=self._tensor(op.load_rows),
        )  # fmt: skip

    def _attention(self, op: Attention) -> None:
        scales = (op.q_scale, op.k_scale, op.v_scale, op.out_scale)
        is_constant = op.mask in self._program.tensors
        self._native.attention(
            q=self._place(op.q), k=self._place(op.k), v=self._place(op.v), out=self._place(op.out),
            method=cpu.METHODS[op.method], shape=self._buffer(op.q).shape, sm_scale=op.sm_scale,
            scales=tuple(torch.tensor(scale, dtype=torch.float32) for scale in scales), bias=self._tensor(op.bias),
            mask=self._tensor(op.mask) if is_constant else None,
            mask_input=-1 if is_constant or op.mask is None else self._input(op.mask),
        )  # fmt: skip

    def _pool(self, op: Pool) -> None:
        x, out = self._buffer(op.x), self._buffer(op.out)
        self._native.pool(
            x=self._place(op.x), out=self._place(op.out), in_width=WIDTHS[x.dtype], width=WIDTHS[out.dtype],
            limits=out.limits, rows=x.shape[0], first=op.first, stop=op.stop, channels=x.shape[1],
            multiplier=op.multiplier, shift=op.shift,
        )  # fmt: skip


_STEPS = {
    Patches: PackedProgram._patches,
    Embedding: PackedProgram._embedding,
    Linear: PackedProgram._linear,
    LayerNorm: PackedProgram._layer_norm,
    Attention: PackedProgram._attention,
    Pool: PackedProgram._pool,
}
