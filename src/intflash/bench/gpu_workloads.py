"""`intflash bench attention --device cuda --suite workloads`: the calls that models make, by the public API.

Each workload is a shape with its masks, timed as torch's float16 SDPA and as `intflash.attention` with float16 inputs
and output, quantization included, with static and with dynamic scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from intflash import attention, quantize_bias, which_backend
from intflash.bench.experiments import describe
from intflash.bench.gpu_attention import DYNAMIC, STATIC, Measured, measure_all
from intflash.bench.gpu_launches import TORCH
from intflash.bench.gpu_timing import time_calls
from intflash.quant import Recipe

METHODS = ("intflash_online", "intflash_p8", "intflash")


@dataclass(frozen=True)
class ModelCall:
    """One attention call of a model: q ``[batch, heads, nq, d]``, k and v ``[batch, kv_heads, nk, d]``.

    mask: "" none, "causal", "padding" (a bool mask of keys), "bias" (one for each batch, head, query and key) or "bias
    of windows" (shared by the batches).
    """

    name: str
    batch: int
    heads: int
    nq: int
    d: int
    nk: int = 0  # 0: as many as queries
    kv_heads: int = 0  # 0: as many as heads
    mask: str = ""

    @property
    def keys(self) -> int:
        return self.nk or self.nq

    @property
    def key_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def shape(self) -> str:
        return f"{self.batch}x{self.heads}/{self.key_heads}x{self.nq}x{self.keys}x{self.d} {self.mask}".rstrip()


CALLS = (
    ModelCall("SAM-B windows", 25, 12, 196, 64, mask="bias"),
    ModelCall("Swin-B stage 3", 32, 16, 49, 32, mask="bias of windows"),
    ModelCall("BERT-base", 32, 12, 512, 64, mask="padding"),
    ModelCall("SigLIP-so400m", 32, 16, 729, 72),
    ModelCall("ViT-L/14-336", 32, 16, 577, 64),
    ModelCall("ViT-H", 32, 16, 257, 80),
    ModelCall("DINOv2-L", 8, 16, 1370, 64),
    ModelCall("Whisper encoder", 8, 20, 1500, 64),
    ModelCall("SD1.5 4096", 2, 8, 4096, 40),
    ModelCall("SD1.5 1024", 2, 8, 1024, 80),
    ModelCall("SD1.5 256", 2, 8, 256, 160),
    ModelCall("SDXL self", 2, 10, 4096, 64),
    ModelCall("SDXL cross 4096", 2, 10, 4096, 64, nk=77),
    ModelCall("SDXL cross 1024", 2, 20, 1024, 64, nk=77),
    ModelCall("Flux, SD3", 2, 24, 4608, 128),
    ModelCall("Wan", 1, 12, 32760, 128),
    ModelCall("Llama prefill", 1, 32, 8192, 128, kv_heads=8, mask="causal"),
    ModelCall("Llama decode", 32, 32, 1, 128, nk=8192, kv_heads=8),
)
_QUICK = ("SAM-B windows", "BERT-base", "ViT-H", "SDXL cross 1024")


def inputs(call: ModelCall, device: str) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
    """Returns float16 Q, K and V, normal with seed 0, and the mask."""
    g = torch.Generator(device).manual_seed(0)
    shapes = [(call.batch, h, n, call.d) for h, n in ((call.heads, call.nq), *((call.key_heads, call.keys),) * 2)]
    q, k, v = (torch.randn(shape, generator=g, device=device).half() for shape in shapes)
    mask = None
    if call.mask.startswith("bias"):
        shape = (call.batch if call.mask == "bias" else 1, call.heads, call.nq, call.keys)
        mask = torch.randn(shape, generator=g, device=device).half()
    elif call.mask == "padding":
        lengths = torch.randint(call.keys // 4, call.keys + 1, (call.batch, 1, 1, 1), generator=g, device=device)
        mask = torch.arange(call.keys, device=device) < lengths
    return (q, k, v), mask


def _torch_calls(call: ModelCall, tensors: tuple[Tensor, ...], mask: Tensor | None) -> Iterator[tuple[str, Callable]]:
    wide = None if mask is None else mask.expand(call.batch, mask.shape[1], call.nq, call.keys)

    def run(kernel: Any) -> Tensor:
        with sdpa_kernel(kernel):
            return scaled_dot_product_attention(
                *tensors, attn_mask=wide, is_causal=call.mask == "causal", enable_gqa=call.heads != call.key_heads
            )

    for name, kernel in TORCH.items():
        yield f"SDPA {name.removesuffix(' fp16')}", partial(run, kernel)


def our_calls(
    call: ModelCall, tensors: tuple[Tensor, ...], mask: Tensor | None
) -> Iterator[tuple[str, str, str, Callable]]:
    """Yields method, scales, backend and call. A float bias is quantized once, before."""
    static = Recipe(**{f"{n}_scale": (x.abs().amax() / 127).item() for n, x in zip("qkv", tensors, strict=True)})
    masks = dict(bias=quantize_bias(mask)) if call.mask.startswith("bias") else dict(attn_mask=mask)
    options = dict(is_causal=call.mask == "causal", enable_gqa=call.heads != call.key_heads, **masks)
    for method in METHODS:
        for variant, recipe in ((STATIC, static), (DYNAMIC, Recipe())):
            arguments = dict(method=method, recipe=recipe, **options)
            yield method, variant, which_backend(*tensors, **arguments), partial(attention, *tensors, **arguments)


def measure(call: ModelCall, rounds: int = 9) -> list[Measured]:
    """Measures every contender of a workload; those that cannot run get a row with the reason."""
    tensors, mask = inputs(call, "cuda")
    contenders = [(name, "float16", None, run) for name, run in _torch_calls(call, tensors, mask)]
    contenders += our_calls(call, tensors, mask)
    running, rows = [], []
    for contender in contenders:
        method, variant, backend, run = contender
        try:
            run()
            torch.cuda.synchronize()
            running.append(contender)
        except (RuntimeError, ValueError) as error:  # a refusal is a result too
            rows.append(Measured(call.name, call.shape, method, backend, variant, note=describe(error)))
    seconds = time_calls([run for *_, run in running], rounds=rounds)
    floats = [s for (_, variant, *_), s in zip(running, seconds, strict=True) if variant == "float16"]
    best = min(floats, default=None)
    operations = 4 * call.batch * call.heads * call.nq * call.keys * call.d
    for (method, variant, backend, _), s in zip(running, seconds, strict=True):
        ratio = None if best is None else best / s
        rows.append(
            Measured(call.name, call.shape, method, backend, variant, 1e6 * s, ratio, tops=operations / s / 1e12)
        )
    return rows


def run(out: Path, quick: bool = False) -> list[Measured]:
    """Measures all workloads and writes attention.{json,csv,png} under `out`.

    Raises:
        RuntimeError: there is no CUDA device.
    """
    calls = [call for call in CALLS if not quick or call.name in _QUICK]
    return measure_all(calls, partial(measure, rounds=3 if quick else 9), out)
