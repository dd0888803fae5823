"""The demo: classifies the held-out digits with attention computed by every method."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import intflash
from intflash.bench import figures
from intflash.bench.measure import environment, exact_attention, sqnr
from intflash.digits import Split, float_attention, load_model, load_split

BATCH = 100
WARM_UP = 10  # images before the time measurement starts
# Queries are multiplied by 64: float32 keeps most of its Top-1, while qflash overflows int32.
QUERY_FACTOR = 64.0


@dataclass(frozen=True)
class MethodResult:
    """One row of the demo's table. SQNR is in dB against float64 attention on the same inputs."""

    method: str
    top1: float = math.nan
    agreement: float = math.nan
    worst_sqnr: float = math.nan
    mean_sqnr: float = math.nan
    logits_sqnr: float = math.nan
    ms_per_image: float = math.nan
    scaled_top1: float = math.nan
    backend: str = ""
    error: str | None = None


class MethodAttention:
    """A method as a digit model's attention, which also measures the SQNR of every layer.

    Args:
        method, backend: as in `intflash.attention`.
        query_factor: multiplies the queries.
        measured: compute each layer's float64 attention too; `overhead_s` is the time that took.
    """

    def __init__(self, method: str, backend: str | None, query_factor: float = 1.0, measured: bool = False) -> None:
        self.method, self.backend, self.query_factor, self.measured = method, backend, query_factor, measured
        self.used_backend = ""
        self.overhead_s = 0.0
        self._layer = 0
        self._squares: list[list[float]] = []  # per layer: power of the signal and of the noise

    def start_batch(self) -> None:
        self._layer = 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None = None, keep: Tensor | None = None):
        if self.query_factor != 1.0:
            q = q * self.query_factor
        options = dict(bias=bias, method=self.method, backend=self.backend)
        out = intflash.attention(q, k, v, keep, **options)
        if self.measured and q.is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        if not self.used_backend:
            self.used_backend = intflash.which_backend(q, k, v, keep, **options)
        if self.measured:
            self._record(exact_attention(q, k, v, bias=bias, keep=keep), out)
        self.overhead_s += time.perf_counter() - start
        return out

    def _record(self, ref: Tensor, out: Tensor) -> None:
        if self._layer == len(self._squares):
            self._squares.append([0.0, 0.0])
        squares = self._squares[self._layer]
        squares[0] += ref.square().sum().item()
        squares[1] += (out.double() - ref).square().sum().item()
        self._layer += 1

    def layer_sqnr(self) -> list[float]:
        """Returns the SQNR of each layer over all images so far, in dB."""
        return [10 * math.log10(s / n) if s > 0 and 0 < n < math.inf else -math.inf for s, n in self._squares]


def _now(data: Split) -> float:
    """Returns the time in seconds, after the device has finished its work."""
    if data.images.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def _logits(model: nn.Module, data: Split, attention: Callable, advance: Callable[[], None]) -> Tensor:
    batches = []
    for images in data.images.split(BATCH):
        if isinstance(attention, MethodAttention):
            attention.start_batch()
        batches.append(model(images, attention))
        advance()
    return torch.cat(batches)


def _top1(logits: Tensor, data: Split) -> float:
    return 100 * (logits.argmax(1) == data.labels).double().mean().item()


@torch.inference_mode()
def run_method(
    method: str, backend: str | None, model: nn.Module, data: Split, expected: Tensor, advance: Callable[[], None]
) -> MethodResult:
    """Measures one method. `expected` are the float32 logits. Calls `advance` 2 x batches times."""
    attention = MethodAttention(method, backend, measured=True)
    warm_up = MethodAttention(method, backend)
    scaled = MethodAttention(method, backend, QUERY_FACTOR)
    try:
        model(data.images[:WARM_UP], warm_up)
        start = _now(data)
        logits = _logits(model, data, attention, advance)
        seconds = _now(data) - start - attention.overhead_s
        scaled_logits = _logits(model, data, scaled, advance)
    except (intflash.InputError, intflash.BackendError) as error:
        return MethodResult(method, error=str(error))
    layers = attention.layer_sqnr()
    return MethodResult(
        method=method,
        top1=_top1(logits, data),
        agreement=100 * (logits.argmax(1) == expected.argmax(1)).double().mean().item(),
        worst_sqnr=min(layers),
        mean_sqnr=sum(layers) / len(layers),
        logits_sqnr=sqnr(expected, logits),
        ms_per_image=1e3 * seconds / len(data),
        scaled_top1=_top1(scaled_logits, data),
        backend=attention.used_backend,
    )


@dataclass(frozen=True)
class DemoResult:
    """All rows, float32's own Top-1, and the machine."""

    model: str
    images: int
    float_top1: float
    float_scaled_top1: float
    float_ms_per_image: float
    rows: list[MethodResult]

    def save(self, folder: Path) -> list[Path]:
        """Writes demo-<model>.json and .png into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        data = folder / f"demo-{self.model}.json"
        content = asdict(self) | {"query_factor": QUERY_FACTOR, "environment": environment()}
        data.write_text(json.dumps(finite(content), indent=1) + "\n")
        picture = folder / f"demo-{self.model}.png"
        figures.demo(self, picture)
        return [data, picture]


def finite(value):
    """Replaces NaN and infinity, which JSON does not have, by None and text."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def run_demo(
    model_name: str,
    methods: Sequence[str],
    backend: str | None = None,
    images: int | None = None,
    device: str = "cpu",
    on_total: Callable[[int], None] = lambda steps: None,
    on_step: Callable[[str], None] = lambda method: None,
    on_row: Callable[[MethodResult], None] = lambda row: None,
) -> DemoResult:
    """Classify the held-out digits with every method.

    Args:
        model_name: "vit" or "swin".
        methods: names from ``intflash.info()["methods"]``.
        backend: as in `intflash.attention`.
        images: only the first so many of the 599.
        device: "cpu" or "cuda".
        on_total, on_step, on_row: told the number of steps, each step's method, each finished row.

    Example:
        >>> from intflash.bench.demo import run_demo
        >>> run_demo("vit", ["intflash"], images=10).rows[0].method
        'intflash'
    """
    model, (_, data) = load_model(model_name), load_split()
    model, data = model.to(device), (data if images is None else data.take(images)).to(device)
    batches = math.ceil(len(data) / BATCH)
    on_total(2 * batches * (len(methods) + 1))

    def scaled_float(q, k, v, *, bias=None, keep=None):
        return float_attention(q * QUERY_FACTOR, k, v, bias=bias, keep=keep)

    with torch.inference_mode():
        model(data.images[:WARM_UP])
        start = _now(data)
        expected = _logits(model, data, float_attention, lambda: on_step("float32"))
        seconds = _now(data) - start
        scaled_logits = _logits(model, data, scaled_float, lambda: on_step("float32"))
    rows = []
    for method in methods:
        row = run_method(method, backend, model, data, expected, lambda method=method: on_step(method))
        rows.append(row)
        on_row(row)
    return DemoResult(
        model=model_name,
        images=len(data),
        float_top1=_top1(expected, data),
        float_scaled_top1=_top1(scaled_logits, data),
        float_ms_per_image=1e3 * seconds / len(data),
        rows=rows,
    )
