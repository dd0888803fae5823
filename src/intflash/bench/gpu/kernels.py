"""Calls that run one attention kernel on prequantized inputs, for timing: no quantization, no allocation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import intflash
from intflash.backends.triton import mixed, mixed_steps, unfused
from intflash.backends.triton.streaming import Statistics, Tile
from intflash.methods import get_method
from intflash.problem import Problem
from intflash.quant import QTensor

TORCH = {"cuDNN fp16": SDPBackend.CUDNN_ATTENTION, "flash fp16": SDPBackend.FLASH_ATTENTION}
FLOWS = {
    "lite": mixed_steps.LITE,
    "int_flash_half": {"float maximum": mixed_steps.HALF, "integer maximum": mixed_steps.HALF_RAISED},
}
Call = Callable[[], Any]


def torch_attention(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v)


def kernel_call(
    name: str, q: Tensor, k: Tensor, v: Tensor, *, tile: Tile | None = None, flow: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Call, Call]:  # fmt: skip
    """(the kernel, what reads its output as floats) of a method or of torch's attention, on CUDA float tensors.

    Integer methods write int8, the others float16. `flow` is one of FLOWS; "method, flow" is a name too.
    """
    name, _, named = name.partition(", ")
    flow = flow or named or None
    if name in TORCH:
        half = [x.half() for x in (q, k, v)]
        call = partial(torch_attention, TORCH[name], *half)
        return call, call
    method = get_method(name)
    dtype = out_dtype or (torch.int8 if method.integer_only else torch.float16)
    if name in ("fp16", "bf16"):
        q, k, v = (x.to(getattr(torch, {"fp16": "float16", "bf16": "bfloat16"}[name])) for x in (q, k, v))
    problem = Problem(name, q, k, v, q.shape[3] ** -0.5, recipe=method.recipe, out_dtype=dtype).quantized()
    out = torch.empty_like(q, dtype=dtype)
    if name in mixed.STEPS:
        steps = None if flow is None else FLOWS[name][flow]
        parts = mixed.operands(problem)
        launch = mixed.mixed_launch(problem, parts, out, Statistics(None, None), tile, steps)
        return launch.run, lambda: out
    if name in unfused.METHODS:
        launches, _, scale = unfused.unfused_launches(problem, out, [None, None, None])
        return partial(_run_all, launches), lambda: QTensor(out, scale).dequantize()
    codes = (problem.q, problem.k, replace(problem.v, data=mixed.key_major(problem.v.data)))
    call = partial(intflash.attention, *codes, method=name, out_dtype=dtype, check_finite=False)
    return call, lambda: call().dequantize() if dtype == torch.int8 else call()


def backend_of(name: str, q: Tensor, k: Tensor, v: Tensor) -> str:
    """The backend that `kernel_call` runs a method on."""
    name = name.partition(", ")[0]
    if name in TORCH:
        return "torch"
    if name in mixed.STEPS or name in unfused.METHODS:
        return "triton"
    return intflash.which_backend(q, k, v, method=name, out_dtype=torch.int8, recipe=get_method(name).recipe)


def _run_all(launches: list) -> None:
    for launch in launches:
        launch.run()
