"""`IntegerModel`: a program as an `nn.Module`, called as the float model that it was made of."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from intflash.integer import executors
from intflash.integer.calibration import bind, named
from intflash.integer.portable import attention_backend
from intflash.integer.program import (
    Attention,
    Buffer,
    Embedding,
    LayerNorm,
    Linear,
    Operation,
    Patches,
    Pool,
    Program,
)


class Results(dict):
    """Several results of a model by name, also as attributes and by position, as those of transformers."""

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the model's results are {', '.join(self)}; got {name!r}") from None

    def __getitem__(self, key: str | int) -> Tensor:
        return tuple(self.values())[key] if isinstance(key, int) else super().__getitem__(key)


class IntegerModel(nn.Module):
    """A model whose every operation between the quantized input and the last accumulators is on integers.

    Called as the float model: ``model(x)``, or by the names of its inputs. The same image gives the same bits alone and
    in any batch, on every backend and any number of threads. ``print(model)`` and `report` show every operation.

    Args:
        program: a checked `Program`.
        provenance: what the program was made of, kept in its file.
        backend: "cpu", "gpu", "torch" or "reference"; None: the best that can run it on the model's device.

    Raises:
        InputError: there is no such backend.
    """

    def __init__(
        self, program: Program, provenance: dict[str, Any] | None = None, *, backend: str | None = None
    ) -> None:
        super().__init__()
        self._program = program
        self.provenance = provenance or {}
        self.asked_backend = backend
        self.training = False
        self._chosen: str | None = None
        executors.choose(backend, program)

    @property
    def program(self) -> Program:
        return self._program

    @property
    def device(self) -> torch.device:
        return next(iter(self._program.tensors.values())).device

    @property
    def backend(self) -> str:
        """The name of the backend that runs this model on its device."""
        if self._chosen is None:
            self._chosen = executors.choose(self.asked_backend, self._program, self.device)
        return self._chosen

    @torch.compiler.disable  # it runs as it is, also inside of a compiled model
    def forward(self, *args: Any, **kwargs: Any) -> Tensor | Results:
        """The float model's results: each output's last integers times one scale, float32.

        Sequences may be shorter than the program's: they are padded, and a result of a row for each token is cut to
        their length. Padding changes no bit of the other tokens.

        Raises:
            InputError: an input has another shape, dtype or range than the program's, or, in CPU memory, NaN.
        """
        batch = kwargs if not args else (args if not kwargs else self._mixed(args, kwargs))
        batch = named(self._program.inputs, batch)
        device = self.device
        inputs = bind(self._program.inputs, batch, device)
        first = self._program.inputs[0]
        tokens = batch[first.name].shape[1] if first.kind == "index" else None
        executor, read = executors.EXECUTORS[self.backend], partial(self._results, tokens)
        with torch.no_grad():
            if not torch.is_autocast_enabled(device.type):
                return executor.results(self._program, inputs, read)
            with torch.autocast(device.type, enabled=False):  # exact products are not for autocast to round
                return executor.results(self._program, inputs, read)

    def _results(self, tokens: int | None, found: dict[str, Tensor]) -> Tensor | Results:
        """The outputs' integers as float32, times their scales, in one kernel each; tokens: of the call's sequences."""
        results = Results()
        for output in self._program.outputs:
            x = found[output.buffer]
            x = x.reshape(len(x), *output.shape)
            if tokens is not None and len(output.shape) == 2:
                x = x[:, :tokens]
            results[output.name] = x * self._program.tensors[output.scale]
        return next(iter(results.values())) if self._program.result == "tensor" else results

    def _mixed(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        names = [i.name for i in self._program.inputs]
        return dict(zip(names, args, strict=False)) | kwargs

    def _apply(self, fn, recurse: bool = True) -> nn.Module:
        """The constants follow the model's device; their dtypes are the program's."""
        device = fn(torch.zeros(1)).device
        moved = {name: x.to(device) for name, x in self._program.tensors.items()}
        self._program, self._chosen = replace(self._program, tensors=moved), None
        return self

    def digest(self) -> str:
        """Of the program, its constants and its provenance, as its file has it."""
        from intflash.integer.file import digest

        return digest(self)

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, which `intflash.integer.load` reads without the float model."""
        from intflash.integer.file import save

        save(self, path)

    def report(self) -> str:
        """A line for each operation: its name, what it does, the formats it reads and writes, its backend.

        The last lines are the results, whose scales are the only floating-point operations after the input's rounding.
        """
        program, backend = self._program, self.backend
        rows = [("operation", "what", "formats", "backend")]
        for op in program.operations:
            attends = isinstance(op, Attention) and backend == "torch"
            shown = f"torch, by {attention_backend(program, op)}" if attends else backend
            rows.append((op.name, _what(program, op), _formats(program, op), shown))
        for output in program.outputs:
            read = program.buffers[output.buffer]
            what = "times a scale" if program.tensors[output.scale].numel() == 1 else "times a scale for each channel"
            rows.append((output.name, what, f"{_shown(read)} -> float32 {_sizes(output.shape)}", "float"))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        return "\n".join("  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() for row in rows)

    def extra_repr(self) -> str:
        size = sum(x.numel() * x.element_size() for x in self._program.tensors.values())
        inputs = ", ".join(f"{i.name}: {i.kind} {list(i.shape)}" for i in self._program.inputs)
        made_of = self.provenance.get("model", "a program")
        return f"of {made_of}, {size / 1e6:.1f} MB, inputs {inputs}\n{self.report()}"


def _what(program: Program, op: Operation) -> str:
    match op:
        case Patches():
            rounded = next(i.kind for i in program.inputs if i.name == op.image) == "float"
            return f"patches {op.patch[0]}x{op.patch[1]}" + (f", rounded to steps of {op.scale:.4g}" if rounded else "")
        case Embedding():
            return f"embedding of {len(op.tables)} tables"
        case Linear(epilogue="table"):
            return f"linear, {op.bits}-bit table"
        case Linear():
            return f"linear, {op.epilogue}" + (", rows mapped" if op.store_rows else "")
        case LayerNorm():
            return "LayerNorm" + (", rows mapped" if op.load_rows else "")
        case Attention():
            scales = "head" if len(op.q_scale) > 1 else "tensor"
            return f"attention {op.method}, scales per {scales}"
        case Pool():
            return f"mean of rows {op.first} to {op.stop - 1}"


def _formats(program: Program, op: Operation) -> str:
    match op:
        case Patches():
            read = next(i.kind for i in program.inputs if i.name == op.image)
        case Embedding():
            stream = program.buffers[op.out].bits
            read = " + ".join([f"int{stream} table"] * len(op.tables) + [f"int{stream} rows"] * (op.rows is not None))
        case Linear():
            read = f"{_shown(program.buffers[op.x])} * int8 weights"
            if op.residual is not None:
                read += f" + int{program.buffers[op.out[0]].bits}"
        case _:
            read = _shown(program.buffers[program.reads(op)[0]])
    count, out = len(program.writes(op)), _shown(program.buffers[program.writes(op)[0]])
    return f"{read} -> {f'{count} of ' if count > 1 else ''}{out}"


def _shown(buffer: Buffer) -> str:
    return f"int{buffer.bits} {_sizes(buffer.shape)}"


def _sizes(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
