"""`evaluate`: Top-1 and Top-5 of a classifier with its attention computed by every method, in one pass over the
images.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from intflash.backends import get_backend
from intflash.errors import BackendError, InputError
from intflash.integer import IntegerModel
from intflash.methods import example
from intflash.models.base import FloatCore
from intflash.models.data import Logits, unwrapped
from intflash.models.papers import PAPER_BITS_PER_MAC, PaperRow, paper_row
from intflash.models.patch import attach, patch, unpatch
from intflash.quant.calibrate import Scales

FLOAT = "float"  # the model without a patch
SAVE_SECONDS = 20.0


@dataclass(frozen=True)
class Variant:
    """One row of the table: a method with dynamic scales, or with the scales of a file, or an integer model."""

    method: str
    scales: Scales | None = None
    file: str = ""  # granularity of the scales, or the integer model's file
    integer: IntegerModel | None = None  # in place of the model; `method` is that of its attention

    @property
    def name(self) -> str:
        if self.integer is not None:
            return f"integer model ({', '.join(part for part in (self.method, self.file) if part)})"
        if self.scales is None:
            return self.method
        return f"{self.method} (static, {', '.join(part for part in (self.scales.observer, self.file) if part)})"


@dataclass
class Tally:
    """Sums over images: counts, and the squared logits of the float model and of the differences."""

    images: int = 0
    top1: int = 0
    top5: int = 0
    agree: int = 0
    signal: float = 0.0
    noise: float = 0.0
    seconds: float = 0.0

    def add(self, logits: Tensor, float_logits: Tensor, labels: Tensor, seconds: float) -> None:
        best = logits.topk(min(5, logits.shape[1]), dim=1).indices
        hit = best == labels[:, None]
        self.images += len(labels)
        self.top1 += int(hit[:, 0].sum())
        self.top5 += int(hit.any(1).sum())
        self.agree += int((best[:, 0] == float_logits.argmax(1)).sum())
        self.signal += float(float_logits.double().square().sum())
        self.noise += float((logits.double() - float_logits.double()).square().sum())
        self.seconds += seconds


@dataclass
class VariantRow:
    """One variant's row of the table: percentages, dB and milliseconds."""

    name: str
    images: int
    top1: float
    top5: float
    agreement: float
    logits_sqnr: float | None
    ms_per_image: float
    integer_only: bool
    granularity: str
    replaced: int
    gbops: float | None = None
    paper: PaperRow | None = None
    error: str | None = None


@dataclass
class Evaluation:
    """The result: rows, the layers that were not patched, and what was evaluated."""

    model: str
    data: str
    images: int
    rows: list[VariantRow]
    left: dict[str, str] = field(default_factory=dict)

    def save(self, path: str | Path) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")


def evaluate(
    model: nn.Module,
    dataset: torch.utils.data.Dataset,
    variants: list[Variant],
    *,
    name: str = "",
    data: str = "",
    batch_size: int = 32,
    workers: int = 0,
    limit: int | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    backend: str | None = None,
    state: str | Path | None = None,
    on_batch: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Classify every image by the float model and by each variant, and count.

    Args:
        model: a classifier: images to logits ``[B, classes]``.
        dataset: ``(image, label)`` items in a fixed order.
        variants: methods, with static scales or without.
        name, data: what to call them in the result; `name` finds the papers' numbers.
        limit: only the first so many images (of all processes together).
        state: a file where sums are kept, so that a call that was interrupted goes on where it was.
        on_batch: called with (images done, images in all) of this process.

    Returns:
        One row for the float model and one per variant. A variant that cannot run has its reason in
        `error`. Under an initialized `torch.distributed` group each process takes every n-th image
        and all return the same sums.

    Raises:
        InputError: there is no such method or backend, two variants have one name, the data has more
            classes than the model, or `state` is of another evaluation.
    """
    check_variants(variants)
    if backend is not None:
        get_backend(backend)
    rank, world = _group()
    total = min(len(dataset), limit if limit is not None else len(dataset))
    mine = list(range(rank, total, world))
    model = model.to(device=device, dtype=dtype).eval()
    progress = _Progress([FLOAT, *(v.name for v in variants)])
    if state is not None:
        key = {"model": name, "data": data, "total": total, "world": world, "dtype": str(dtype), "batch": batch_size,
               "device": torch.device(device).type, "backend": backend, "weights": _weights_digest(model),
               "variants": {v.name: _digest(v) for v in variants}}  # fmt: skip
        progress.resume(Path(f"{state}.{rank}"), key)
    tallies, errors = progress.tallies, progress.errors
    counts: dict[str, Any] = {}
    todo = torch.utils.data.Subset(dataset, mine[progress.done :])
    loader = torch.utils.data.DataLoader(todo, batch_size=batch_size, num_workers=workers)
    with torch.inference_mode():
        for images, labels in loader:
            images, labels = images.to(device=device, dtype=dtype), labels.to(device)
            if not counts:
                counts = _count(model, images)
                _check_labels(model, images, dataset)
            logits, seconds = _timed(model, images)
            tallies[FLOAT].add(logits, logits, labels, seconds)
            for variant in variants:
                if variant.name in errors:
                    continue
                try:
                    out, seconds = _variant_logits(model, variant, images, backend)
                except (InputError, BackendError) as error:
                    errors[variant.name] = str(error)
                    continue
                tallies[variant.name].add(out, logits, labels, seconds)
            progress.advance(len(labels))
            on_batch(progress.done, len(mine))
    progress.save()  # another process may have been interrupted
    counts = counts or _count(model, dataset[0][0][None].to(device=device, dtype=dtype))
    tallies = _sum_over_processes(tallies)
    progress.forget()
    rows = [_row(FLOAT, None, tallies[FLOAT], counts, name)]
    rows += [_row(v.name, v, tallies[v.name], counts, name, errors.get(v.name)) for v in variants]
    return Evaluation(name, data, total, rows, counts["left"])


def check_variants(variants: Sequence[Variant]) -> None:
    """Refuses variants of unknown methods, and two variants of one name.

    Raises:
        InputError: names the variant.
    """
    for variant in variants:
        example(variant.method)
    repeated = [name for name, count in Counter(v.name for v in variants).items() if count > 1]
    if repeated:
        raise InputError(f"each variant needs a name of its own, got more than one {', '.join(map(repr, repeated))}")


def _weights_digest(model: nn.Module) -> str:
    """Returns a digest of 16 digits of the names, shapes and values of a model's parameters and buffers."""
    digest = hashlib.sha256()
    for name, x in itertools.chain(model.named_parameters(), model.named_buffers()):
        digest.update(f"{name} {tuple(x.shape)}".encode())
        digest.update(x.detach().flatten().cpu().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def _digest(variant: Variant) -> str | None:
    if variant.integer is not None:
        return variant.integer.digest()[:16]
    return variant.scales and hashlib.sha256(json.dumps(asdict(variant.scales)).encode()).hexdigest()[:16]


def _variant_logits(model: nn.Module, variant: Variant, images: Tensor, backend: str | None) -> tuple[Tensor, float]:
    """The logits of the patched model or of the integer model, and their seconds."""
    if variant.integer is not None:
        if variant.integer.program.inputs[0].kind == "uint8":
            images = _pixels(images, variant.integer.provenance.get("options", {}))
        made = variant.integer.to(images.device)
        return _timed(Logits(made) if made.program.result == "dict" else made, images)
    with patch(unwrapped(model), variant.method, variant.scales, backend=backend):
        return _timed(model, images)


def _pixels(images: Tensor, options: Mapping[str, Any]) -> Tensor:
    """The uint8 pixels that were normalized to `images` by the mean and std that the integer model was made with."""
    mean, std = (torch.tensor(options[x], device=images.device).view(-1, 1, 1) for x in ("mean", "std"))
    return ((images.float() * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)


def _timed(model: nn.Module, images: Tensor) -> tuple[Tensor, float]:
    start = time.perf_counter()
    logits = model(images)
    if logits.is_cuda:
        torch.cuda.synchronize(logits.device)
    return logits, time.perf_counter() - start


class _Counting(FloatCore):
    """Counts the multiply-accumulates of Q K^T and P V."""

    def forward(self, q, k, v, *args: Any, **kwargs: Any) -> Tensor:
        scores = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
        self.macs = (scores * q.shape[3], scores * v.shape[3])
        return super().forward(q, k, v, *args, **kwargs)


def _count(model: nn.Module, images: Tensor) -> dict[str, Any]:
    """Returns attention's multiply-accumulates per image, the number of layers replaced, and the layers that were
    not.
    """
    cores: list[_Counting] = []

    def make(_name: str) -> _Counting:
        cores.append(_Counting())
        return cores[-1]

    with torch.inference_mode():
        report = attach(model, make)
        try:
            model(images[:1])
        finally:
            unpatch(model)
    macs = [sum(core.macs[i] for core in cores if hasattr(core, "macs")) for i in (0, 1)]
    return {"macs": macs, "replaced": len(report.replaced), "left": report.left}


def _check_labels(model: nn.Module, images: Tensor, dataset: Any) -> None:
    classes = model(images[:1]).shape[1]
    found = len(getattr(dataset, "classes", ()))
    if found > classes:
        raise InputError(f"the data has {found} classes, the model {classes}")


def _row(
    name: str, variant: Variant | None, tally: Tally, counts: dict[str, Any], model: str, error: str | None = None
) -> VariantRow:
    n = max(tally.images, 1)
    method = None if variant is None else example(variant.method)
    sqnr = 10 * math.log10(tally.signal / tally.noise) if tally.noise > 0 and tally.signal > 0 else None
    return VariantRow(
        name=name, images=tally.images, top1=100 * tally.top1 / n, top5=100 * tally.top5 / n,
        agreement=100 * tally.agree / n, logits_sqnr=sqnr, ms_per_image=1e3 * tally.seconds / n,
        integer_only=method is not None and method.integer_only, granularity=_granularity(variant),
        replaced=_replaced(variant, counts["replaced"]), gbops=_gbops(variant, counts["macs"]),
        paper=None if _is_integer(variant) else paper_row(model, "fp32" if variant is None else variant.method),
        error=error,
    )  # fmt: skip


def _is_integer(variant: Variant | None) -> bool:
    return variant is not None and variant.integer is not None


def _replaced(variant: Variant | None, layers: int) -> int:
    """How many attention layers, or operations of an integer model, took the place of the model's."""
    if variant is None:
        return 0
    return layers if variant.integer is None else len(variant.integer.program.operations)


def _granularity(variant: Variant | None) -> str:
    """Returns the granularities of Q, K and V, as "token/token/head", or "tensor" where all are."""
    if variant is None:
        return ""
    if variant.integer is not None:
        return variant.integer.provenance.get("options", {}).get("scales", "")
    recipe = example(variant.method).recipe
    of = {name: getattr(recipe, name) for name in "qkv"} if variant.scales is None else variant.scales.granularity
    kinds = [of[name] for name in "qkv"]
    return kinds[0] if len(set(kinds)) == 1 else "/".join(kinds)


def _gbops(variant: Variant | None, macs: list[int]) -> float | None:
    """Returns giga bit operations per image as QFlash's Table 5 counts them; None for float and integer models."""
    if variant is None or variant.integer is not None:
        return None
    recipe = example(variant.method).recipe
    if recipe.q == "none":
        return None
    sixteen_bit_p = recipe.v == "none" or variant.method == "qattn"
    return sum(macs) / 2 * PAPER_BITS_PER_MAC * (2 if sixteen_bit_p else 1) / 1e9


class _Progress:
    """The sums of an evaluation. With `resume` they are also on disk until it is finished, one file per process."""

    def __init__(self, names: list[str]) -> None:
        self.path: Path | None = None
        self.key: dict[str, Any] = {}
        self.done, self.saved = 0, time.monotonic()
        self.tallies = {name: Tally() for name in names}
        self.errors: dict[str, str] = {}  # variant -> why it cannot run

    def resume(self, path: Path, key: dict[str, Any]) -> None:
        """Keeps the sums in a file, and continues from the sums in it. Those of another evaluation are refused."""
        self.path, self.key = path, key
        if not path.exists():
            return
        content = json.loads(path.read_text())
        then = content["key"]
        if then != key:
            changed = {k: (then.get(k), key[k]) for k in key if then.get(k) != key[k]}
            raise InputError(f"{path} is of another evaluation (then, now): {changed}; delete it to start anew")
        self.done = content["done"]
        self.tallies.update({name: Tally(**sums) for name, sums in content["tallies"].items()})
        self.errors.update(content["errors"])

    def advance(self, images: int) -> None:
        self.done += images
        if time.monotonic() - self.saved > SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        sums = {name: asdict(tally) for name, tally in self.tallies.items()}
        content = {"key": self.key, "done": self.done, "tallies": sums, "errors": self.errors}
        fresh = self.path.with_suffix(self.path.suffix + ".new")
        fresh.write_text(json.dumps(content))
        fresh.replace(self.path)
        self.saved = time.monotonic()

    def forget(self) -> None:
        """Deletes the file of a finished evaluation."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _group() -> tuple[int, int]:
    """Returns (rank, world size) of the default process group; (0, 1) without one."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def _sum_over_processes(tallies: dict[str, Tally]) -> dict[str, Tally]:
    if _group()[1] == 1:
        return tallies
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    sums = torch.tensor([list(asdict(t).values()) for t in tallies.values()], dtype=torch.float64, device=device)
    torch.distributed.all_reduce(sums)
    summed = (dict(zip(asdict(Tally()), row, strict=True)) for row in sums.tolist())
    counts = ("images", "top1", "top5", "agree")
    return {
        name: Tally(**{k: int(x) if k in counts else x for k, x in values.items()})
        for name, values in zip(tallies, summed, strict=True)
    }


def batches(
    dataset: torch.utils.data.Dataset, images: int, batch_size: int, device: str, dtype: torch.dtype
) -> Iterator[Tensor]:
    """Yields batches of `images` images for calibration, spread evenly over the dataset."""
    count = min(images, len(dataset))
    chosen = [i * len(dataset) // count for i in range(count)]
    loader = torch.utils.data.DataLoader(torch.utils.data.Subset(dataset, chosen), batch_size=batch_size)
    for x, _ in loader:
        yield x.to(device=device, dtype=dtype)
