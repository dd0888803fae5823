"""Attention kernels on prepared inputs, for timing: as launches alone, and as calls of the backend.

The launches of a backend are recorded while it serves a call. The attention launch (for unfused methods: all launches)
keeps its tensors, so that it can run again alone, without quantization, allocation or constants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from intflash.backends import select
from intflash.backends.cuda.program import CudaLaunch
from intflash.backends.gpu.float_softmax import operands
from intflash.backends.gpu.tensors import contiguous_keys
from intflash.backends.triton import mixed_precision, unfused
from intflash.backends.triton.launch import TritonLaunch
from intflash.backends.triton.tile_loop import Statistics
from intflash.bench.experiments import describe
from intflash.methods import get_method
from intflash.problem import Problem
from intflash.quant import Recipe

TORCH = {
    "cuDNN fp16": SDPBackend.CUDNN_ATTENTION,
    "flash fp16": SDPBackend.FLASH_ATTENTION,
    "efficient fp16": SDPBackend.EFFICIENT_ATTENTION,
}
_INPUTS = {"fp16": torch.float16, "bf16": torch.bfloat16}
Call = Callable[[], Any]


@dataclass(frozen=True)
class Kernel:
    """One contender.

    Attributes:
        backend: the backend that runs it.
        launch: the attention kernel alone; for torch its call.
        whole: the backend's call on the same inputs, with constants and allocation.
        read: returns the output of the last run as floats.
    """

    backend: str
    launch: Call
    whole: Call
    read: Callable[[], Tensor]


def make_kernel(
    name: str, q: Tensor, k: Tensor, v: Tensor, *, backend: str | None = None, recipe: Recipe | None = None,
    out_dtype: torch.dtype | None = None,
) -> Kernel:  # fmt: skip
    """Returns a method's kernel, of the backend that `backend=None` chooses, or one of TORCH on float tensors.

    Integer methods write int8, the others float16. "lite, dual" and the like select how the Triton backend
    converts scores to floats (`backends.triton.online_softmax`).
    """
    name, _, conversion = name.partition(", ")
    if name in TORCH:
        call = partial(torch_attention, TORCH[name], *(x.half() for x in (q, k, v)))
        return Kernel("torch", call, call, call)
    method = get_method(name)
    dtype = out_dtype or (torch.int8 if method.integer_only else torch.float16)
    q, k, v = (x.to(_INPUTS.get(name, x.dtype)) for x in (q, k, v))
    problem = Problem(name, q, k, v, q.shape[3] ** -0.5, recipe=recipe or method.recipe, out_dtype=dtype).quantized()
    if conversion:
        out = torch.empty_like(q, dtype=dtype)
        nothing = Statistics(None, None)
        launch = mixed_precision.mixed_launch(problem, operands(problem), out, nothing, conversion=conversion)
        return of_launch(launch, out)
    if method.integer_only and name not in unfused.METHODS and k.shape[2] > 64:
        # as the quantizer writes V; the window kernel transposes it in registers
        problem = replace(problem, v=replace(problem.v, data=contiguous_keys(problem.v.data, 128)))
    chosen = select(problem, backend)
    with recorded() as launches:
        result = chosen.run(problem)
    launches = launches if name in unfused.METHODS else launches[-1:]
    whole = partial(chosen.run, problem)

    def read() -> Tensor:
        return result.out if result.out_scale is None else result.out.double() * result.out_scale

    return Kernel(chosen.name, partial(_run_all, launches) if launches else whole, whole, read)


def of_launch(launch: TritonLaunch, out: Tensor) -> Kernel:
    """Wraps a launch of the Triton backend that fills `out` with floats. It is run once."""
    launch.run()
    return Kernel("triton", launch.run, launch.run, lambda: out)


def make_kernels(names: Sequence[str], inputs: Sequence[Tensor]) -> tuple[dict[str, Kernel], dict[str, str]]:
    """Returns the kernels that run, after one run each, and for the others the reason."""
    found, refused = {}, {}
    for name in names:
        try:
            kernel = make_kernel(name, *inputs)
            kernel.launch()
            torch.cuda.synchronize()
            found[name] = kernel
        except Exception as error:  # a failure of a contender is a result too
            refused[name] = describe(error)
    return found, refused


def torch_attention(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v)


def uniform_inputs(shape: Sequence[int], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns inputs uniform in [-4, 4], as in the QFlash benchmark, drawn on the GPU."""
    g = torch.Generator("cuda").manual_seed(seed)
    return tuple(torch.rand(tuple(shape), generator=g, device="cuda") * 8 - 4 for _ in range(3))


@contextmanager
def recorded() -> Iterator[list[Any]]:
    """Records the attention backends' launches inside the context, in order."""
    made: list[Any] = []
    kinds = (TritonLaunch, CudaLaunch)
    originals = [kind.run for kind in kinds]

    def recording(original: Callable[[Any], None]) -> Callable[[Any], None]:
        def run(launch: Any) -> None:
            made.append(launch)
            original(launch)

        return run

    try:
        for kind, original in zip(kinds, originals, strict=True):
            kind.run = recording(original)
        yield made
    finally:
        for kind, original in zip(kinds, originals, strict=True):
            kind.run = original


def _run_all(launches: Sequence[Any]) -> None:
    for launch in launches:
        launch.run()
