"""The GPU executor of a program: one replay of a captured CUDA graph is a forward pass, all of it on integers.

`executor.py` holds it, `kernels.py` the Triton kernels, which serve every NVIDIA GPU, and `hopper.py` the products for
compute capability 9.0. Triton is imported at the first question whether it can run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from intflash.backends import get_backend
from intflash.integer.program import Program


def run(program: Program, inputs: Mapping[str, Tensor], read: Callable[[dict[str, Tensor]], Any] | None = None) -> Any:
    """The buffers of the program's outputs ``[B, *shape]``. The first call of a shape captures its graph.

    Args:
        program: a checked one, whose tensors are on the inputs' device.
        inputs: by name, with a batch axis, as `Input` says; indices int64, masks bool.
        read: makes what is returned of the buffers, and copies them: the next call overwrites them. None copies.
    """
    from intflash.integer.gpu import executor

    return executor.run(program, inputs, read)


def refused(program: Program, device: torch.device) -> str | None:
    """Why this executor cannot run a program on a device, or None."""
    missing = get_backend("triton").unavailable()
    if missing is not None:
        return missing
    if device.type != "cuda":
        import triton

        if not triton.knobs.runtime.interpret:
            return f"it takes CUDA tensors, got {device}"
    return None
