"""Which executors there are, and the choice among them. All give the same bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from intflash.errors import InputError
from intflash.integer import cpu, gpu, portable, reference
from intflash.integer.program import Program


@dataclass(frozen=True)
class Executor:
    """What runs a program.

    Attributes:
        run: (program, inputs by name) -> the buffers of its outputs, by name.
        refused: (program, device) -> why it cannot run that, or None.
        device: the type of device that it is for.
        reads: run takes a third argument, see `results`.
    """

    run: Callable[..., dict[str, Tensor]]
    refused: Callable[[Program, torch.device], str | None] = lambda program, device: None
    device: str = "cpu"
    reads: bool = False

    def results(self, program: Program, inputs: Mapping[str, Tensor], read: Callable[[dict[str, Tensor]], Any]) -> Any:
        """What `read` makes of the outputs' buffers. It must copy them, because they may be the executor's own."""
        return self.run(program, inputs, read) if self.reads else read(self.run(program, inputs))


EXECUTORS = {  # in the order of the choice
    "cpu": Executor(cpu.run, cpu.refused),
    "gpu": Executor(gpu.run, gpu.refused, "cuda", reads=True),
    "torch": Executor(portable.run),
    "reference": Executor(reference.run),
}


def choose(name: str | None, program: Program, device: torch.device | None = None) -> str:
    """The name asked for, or with None that of the first that can run the program.

    Args:
        device: of the program's tensors; None: one that the executor is for.

    Raises:
        InputError: there is none of that name, or it cannot run this program.
    """
    if device is None:
        device = torch.device(EXECUTORS[name].device if name in EXECUTORS else "cpu")
    if name is None:
        return next(known for known, executor in EXECUTORS.items() if executor.refused(program, device) is None)
    if name not in EXECUTORS:
        raise InputError(f"backend of an integer model must be one of {tuple(EXECUTORS)}, got {name!r}")
    reason = EXECUTORS[name].refused(program, device)
    if reason is not None:
        raise InputError(f"backend {name!r} cannot run this integer model: {reason}")
    return name
