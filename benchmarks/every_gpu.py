"""The kernels for every GPU from compute capability 8.0 on, timed on the GPU at hand beside FlashAttention-2 and, where
it is installed, SageAttention: what a GPU without kernels of its own would take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from intflash.bench.experiments import Experiment, Figure, Row, Setting, describe
from intflash.problem import Problem
from intflash.quant import Recipe

US, RATIO = "us", "times FlashAttention-2's speed"
PEER = "FlashAttention-2, float16"
METHODS = ("intflash_online", "intflash_p8", "intflash", "intflash_bfp")
RECIPES = {
    "static scales": Recipe(q_scale=0.04, k_scale=0.04, v_scale=0.04),
    "scales per head found in the call": Recipe(),
}
# An A100's, for the plan: multiprocessors, compute capability, bytes of shared memory of a CTA.
PLANNED_FOR = (108, 8, 0, 163 << 10)


class Shape(NamedTuple):
    name: str
    batch: int
    heads: int
    n: int
    d: int
    is_causal: bool = False


SHAPES = (
    Shape("D 128, N 16,384", 1, 16, 16384, 128), Shape("D 128, N 16,384, causal", 1, 16, 16384, 128, True),
    Shape("D 64, N 16,384", 1, 16, 16384, 64), Shape("Flux, SD3", 2, 24, 4608, 128), Shape("SDXL", 2, 10, 4096, 64),
    Shape("ViT-L/14 at 336 pixels, batch 32", 32, 16, 577, 64), Shape("ViT-H, batch 32", 32, 16, 257, 80),
    Shape("A2 batch 1024", 1024, 6, 197, 64), Shape("A3 batch 64", 64, 12, 197, 64),
    Shape("A3 batch 1", 1, 12, 197, 64), Shape("A4 batch 128", 128 * 64, 3, 49, 32),
)  # fmt: skip


def _peers(shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Any]]:
    def flash() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=shape.is_causal)

    peers: dict[str, Callable[[], Any]] = {PEER: flash}
    try:
        from sageattention import sageattn
    except ImportError:
        return peers
    return peers | {"SageAttention": lambda: sageattn(q, k, v, tensor_layout="HND", is_causal=shape.is_causal)}


def _calls(shape: Shape) -> dict[str, Callable[[], Any]]:
    from intflash.backends.cuda import backend

    g = torch.Generator("cuda").manual_seed(0)
    size = shape.batch, shape.heads, shape.n, shape.d
    q, k, v = (torch.randn(size, device="cuda", dtype=torch.float16, generator=g) for _ in range(3))
    calls = _peers(shape, q, k, v)
    for method in METHODS:
        for scales, recipe in RECIPES.items():
            causal = 0 if shape.is_causal else None
            p = Problem(method, q, k, v, shape.d**-0.5, recipe=recipe, out_dtype=torch.float16, causal=causal)
            calls[f"{method}, {scales}"] = lambda p=p: backend.run(p)
    return calls


def _measure(setting: Setting) -> Iterator[Row]:
    from intflash.backends.cuda import plans

    with mock.patch.object(plans, "gpu_of", lambda device: PLANNED_FOR):
        for shape in SHAPES:
            setting.log(shape.name)
            calls = _calls(shape)
            for name in list(calls):
                try:
                    calls[name]()
                    torch.cuda.synchronize()
                except (RuntimeError, ValueError, AssertionError) as error:  # a peer's refusal
                    del calls[name]
                    yield Row(name, shape.name, US, None, note=describe(error))
            seconds = setting.times(calls)
            for name, time in seconds.items():
                yield Row(name, shape.name, US, 1e6 * time)
                if name != PEER and PEER in seconds:
                    yield Row(name, shape.name, RATIO, seconds[PEER] / time)


EXPERIMENTS = (
    Experiment(
        name="every_gpu",
        title="The kernels for every GPU, beside FlashAttention-2 on the same GPU",
        source="docs/design/cuda.md",
        measure=_measure,
        figures=(Figure(RATIO),),
        notes="float16 in and out, quantization included; device time of CUDA-graph replays, medians, contenders in "
        "turns. The plan is that of compute capability 8.0: the faster kernels of 9.0 are not used there either.",
        devices=("cuda",),
    ),
)
