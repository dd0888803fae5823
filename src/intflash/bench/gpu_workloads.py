"""`intflash bench attention --device cuda --suite workloads`: the calls that models make, by the public API.

Each workload is a shape with its masks, timed as torch's float16 SDPA, as the FP8 attention of installed peers on FP8
codes, and as `intflash.attention` with float16 inputs and output, quantization included, with static and with dynamic
scales. In decode K and V are int8 codes, as a cache holds them, with a scale for each head: Q alone is quantized in the
call.
"""

from __future__ import annotations

import concurrent.futures
import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from intflash import attention, quantize, quantize_bias, which_backend
from intflash.bench import peers
from intflash.bench.experiments import describe
from intflash.bench.gpu_attention import DYNAMIC, STATIC, Measured, measure_all, require_device
from intflash.bench.gpu_launches import TORCH
from intflash.bench.gpu_timing import time_calls
from intflash.bench.workloads import QFLASH
from intflash.quant import Recipe

log = logging.getLogger("intflash")

METHODS = ("intflash_online", "intflash_p8", "intflash", "intflash_bfp")
TITLE = "Attention calls of models: intflash.attention beside torch's float16 SDPA and FP8 peers"
NOTES = "Device time of whole calls from CUDA graphs, medians, quantization of float16 inputs included; FP8 peers have \
FP8 codes as inputs. Ratio: the fastest float16 time of torch's over this one, in the same run."
FP8 = "FP8 codes"
BUDGET_S = 150.0  # in which the suite ends


@dataclass(frozen=True)
class ModelCall:
    """One attention call of a model: q ``[batch, heads, nq, d]``, k and v ``[batch, kv_heads, nk, d]``.

    mask: "" none, "causal", "padding" (a bool mask of keys), "bias" (one for each batch, head, query and key) or "bias
    of windows" (shared by the batches). cache: K and V are int8 codes.
    """

    name: str
    batch: int
    heads: int
    nq: int
    d: int
    nk: int = 0  # 0: as many as queries
    kv_heads: int = 0  # 0: as many as heads
    mask: str = ""
    cache: bool = False

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
    ModelCall("Llama decode", 32, 32, 1, 128, nk=8192, kv_heads=8, cache=True),
    ModelCall("Llama decode, batch 1", 1, 32, 1, 128, nk=8192, kv_heads=8, cache=True),
    ModelCall("Llama, 8 tokens", 1, 32, 8, 128, nk=8192, kv_heads=8, cache=True),
    *(
        ModelCall(f"{name} batch {batch}", w.batched(batch).shape[0], w.heads, w.n, w.head_dim)
        for batch in (1, 8, 64, 1024)
        for name, w in QFLASH.items()
    ),
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


class Contender(NamedTuple):
    """What is timed; `make` returns its backend and its call."""

    method: str
    variant: str
    make: Callable[[], tuple[str | None, Callable[[], Any]]]


def our_contenders(call: ModelCall, tensors: tuple[Tensor, ...], mask: Tensor | None) -> Iterator[Contender]:
    """Yields our methods with static and dynamic scales. A float bias is quantized once, before."""
    scales = {f"{n}_scale": (x.abs().amax() / 127).item() for n, x in zip("qkv", tensors, strict=True)}
    recipes = Recipe(**scales), Recipe()
    if call.cache:
        q, k, v = tensors
        tensors = q, quantize(k, "head"), quantize(v, "head")
        recipes = Recipe(q_scale=scales["q_scale"]), Recipe()
    options = dict(is_causal=call.mask == "causal", enable_gqa=call.heads != call.key_heads)
    if call.mask.startswith("bias"):
        options["bias"] = quantize_bias(mask)
    elif mask is not None:
        options["attn_mask"] = mask

    def make(method: str, recipe: Recipe) -> tuple[str, Callable[[], Any]]:
        arguments = dict(method=method, recipe=recipe, **options)
        return which_backend(*tensors, **arguments), partial(attention, *tensors, **arguments)

    for method in METHODS:
        for variant, recipe in zip((STATIC, DYNAMIC), recipes, strict=True):
            yield Contender(method, variant, partial(make, method, recipe))


def contenders(call: ModelCall, tensors: tuple[Tensor, ...], mask: Tensor | None) -> Iterator[Contender]:
    """Yields torch's kernels, FP8 peers where they serve the call, and ours."""
    for name, run in _torch_calls(call, tensors, mask):
        yield Contender(name, "float16", lambda run=run: (None, run))
    if mask is None and call.keys == call.nq:
        codes = [x.to(torch.float8_e4m3fn) for x in tensors]
        for name, maker in peers.installed_fp8():
            yield Contender(name, FP8, partial(_of_peer, maker, codes, call.mask == "causal"))
    yield from our_contenders(call, tensors, mask)


def _of_peer(maker: Callable[..., Any], codes: list[Tensor], causal: bool) -> tuple[None, Callable[[], Any]]:
    return None, maker(*codes, causal)


def _running(call: ModelCall) -> tuple[list[tuple[Contender, str | None, Callable[[], Any]]], list[Measured]]:
    """Returns the contenders that run, after one run each, and rows of those that do not."""
    running, refused = [], []
    for contender in contenders(call, *inputs(call, "cuda")):
        try:
            backend, run = contender.make()
            run()
            torch.cuda.synchronize()
            running.append((contender, backend, run))
        except Exception as error:  # a refusal is a result too, and so is a failure of a contender
            method, variant = contender[:2]
            refused.append(Measured(call.name, call.shape, method, None, variant, note=describe(error)))
    return running, refused


def measure(call: ModelCall, rounds: int = 9) -> list[Measured]:
    """Measures every contender of a workload; those that cannot run get a row with the reason."""
    running, rows = _running(call)
    seconds = time_calls([run for *_, run in running], rounds=rounds)
    floats = [s for (contender, *_), s in zip(running, seconds, strict=True) if contender.variant == "float16"]
    best = min(floats, default=None)
    operations = 4 * call.batch * call.heads * call.nq * call.keys * call.d
    for (contender, backend, _), s in zip(running, seconds, strict=True):
        ratio = None if best is None else best / s
        named = call.name, call.shape, contender.method, backend, contender.variant
        rows.append(Measured(*named, 1e6 * s, ratio, tops=operations / s / 1e12))
    return rows


def _measure_until(end: float, rounds: int, call: ModelCall) -> list[Measured]:
    """Measures a call, or says that there is no time left or why it failed as a whole."""
    note = "not measured: the time of the suite was over"
    if time.monotonic() < end:
        try:
            return measure(call, rounds)
        except Exception as error:  # such as no memory for the inputs; the next workloads are measured all the same
            note = describe(error)
    return [Measured(call.name, call.shape, "all", None, "", note=note)]


def _rehearse(call: ModelCall) -> None:
    _running(call)


def compile_all(calls: list[ModelCall], seconds: float) -> None:
    """Compiles what `run` will time into the cache on disk, by several processes. What is not compiled after `seconds`
    is left to the measurements.
    """
    jobs = min(16, os.cpu_count() or 1, len(calls))
    pool = concurrent.futures.ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
    started = [pool.submit(_rehearse, call) for call in calls]
    _, waiting = concurrent.futures.wait(started, timeout=seconds)
    for future in waiting:
        future.cancel()
    for process in list(pool._processes.values()) if waiting else ():
        process.terminate()
    pool.shutdown(cancel_futures=True)
    for future in started:
        if future.done() and not future.cancelled() and future.exception() is not None:
            log.warning("compiling in advance: %s", describe(future.exception()))


def run(out: Path, quick: bool = False, budget_s: float = BUDGET_S) -> list[Measured]:
    """Measures all workloads within `budget_s` and writes attention.{json,csv,png} under `out`, the rows as they come.

    Raises:
        RuntimeError: there is no CUDA device.
    """
    require_device()
    end = time.monotonic() + budget_s
    calls = [call for call in CALLS if not quick or call.name in _QUICK]
    compile_all(calls, 0.6 * budget_s)
    rounds = 3 if quick else 9
    return measure_all(calls, partial(_measure_until, end - 5, rounds), out, TITLE, NOTES)
