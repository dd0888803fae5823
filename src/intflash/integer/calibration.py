"""`calibrate`: one pass of batches through a model's graph, with the ranges of every value that conversion needs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from intflash.errors import InputError
from intflash.integer.graph import Attend, Dense, Graph, Mean, Norm
from intflash.integer.program import Input
from intflash.integer.registry import translate
from intflash.quant.calibrate import OBSERVERS, Histogram
from intflash.quant.quantizers import TINY_AMAX

CHANNEL_BINS = 256  # of a histogram with a group for each channel
SAMPLE = 1 << 20  # values of a batch that are counted; every value widens the range
# Largest difference of graph and model, of the largest output: the graph computes in float32.
AGREEMENT = {torch.float16: 2e-2, torch.bfloat16: 5e-2}
FLOAT32_AGREEMENT = 1e-3


class Ranges:
    """What was seen of one value: two histograms, of x above and of -x below zero, for each channel or in all, and the
    extremes and the mean of each channel."""

    def __init__(self, per_channel: bool) -> None:
        self.per_channel = per_channel
        self.rows = 0
        self.total: Tensor | None = None  # of each channel, as the next two; float64
        self.least: Tensor | None = None
        self.largest: Tensor | None = None
        self.histogram = Histogram("channel", CHANNEL_BINS) if per_channel else Histogram("head")

    def observe(self, x: Tensor) -> None:
        """Count the values of x ``[rows, channels]``.

        Raises:
            InputError: one is NaN or infinite.
        """
        extremes = torch.stack((x.amax(0), x.amin(0)))
        largest, least = extremes.double().cpu()
        every = max(1, x.numel() // SAMPLE)
        kept = torch.cat((extremes, x[::every])) if every > 1 else x  # shapes need no more values, ranges all
        self.histogram.observe(torch.stack((kept, -kept))[None].clamp(min=0))  # [1, 2, rows, channels]
        self.rows += len(x)
        total = x.sum(0, dtype=torch.float64).cpu()
        first = self.total is None
        self.total = total if first else self.total + total
        self.least = least if first else torch.minimum(self.least, least)
        self.largest = largest if first else torch.maximum(self.largest, largest)

    def clips(self, observer: str) -> tuple[Tensor, Tensor]:
        """(low, high) that the observer chooses, float64: of each channel ``[channels]``, or of all ``[1]`` with
        low <= 0 <= high. A channel of one sign ends where its values do, not at zero."""
        high, low = OBSERVERS[observer](self.histogram).view(2, -1)
        if not self.per_channel:
            return -low, high
        return torch.where(self.least > 0, self.least, -low), torch.where(self.largest < 0, self.largest, high)

    @property
    def mean(self) -> Tensor:
        """Of each channel, float64."""
        return self.total / self.rows

    @property
    def amax(self) -> float:
        return float(self.histogram.amax.max())


@dataclass(eq=False)
class Calibration:
    """What `convert` needs to know of a model's values, and which model they are of.

    Attributes:
        model: the model's class.
        images: how many images (sequences) were seen.
        size: what the integer model takes: channels, height and width of its images, or the most tokens of a sequence.
        fingerprints: layer -> digest of its weights.
        ranges: value -> its ranges.
        versions: of the libraries.
    """

    model: str
    images: int
    size: tuple[int, ...]
    fingerprints: dict[str, str]
    ranges: dict[str, Ranges] = field(repr=False)
    versions: dict[str, str]

    def check(self, model: nn.Module, graph: Graph) -> None:
        """Refuse a model that is not the calibrated one.

        Raises:
            InputError: names the first layer that differs.
        """
        if type(model).__name__ != self.model:
            raise InputError(f"the calibration is of {self.model}, this is {type(model).__name__}")
        now = graph.fingerprints()
        for name in (*self.fingerprints, *now):
            if now.get(name) != self.fingerprints.get(name):
                raise InputError(
                    f"{name}: the model was changed after its calibration (fingerprint {self.fingerprints.get(name)} "
                    f"then, {now.get(name)} now): calibrate it again"
                )


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    images: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Calibration:
    """Observe every value that an integer model needs, in one pass.

    The model runs as its translation to a graph, in float32 on the model's device; the first batch's outputs are
    compared with the model's own. Sequences may have several lengths: the longest, padding included, is the most that
    the integer model will take. Padding, where the batch's mask is 0, is not observed.

    Args:
        model: a classifier or encoder that `convert` knows, in evaluation mode; not changed.
        batches: an iterable of inputs, each a tensor, a tuple (``model(*batch)``) or a mapping (``model(**batch)``).
        images: how many images there must be; None: as many as come.
        progress: called with the number of images seen after each batch; None: a line on the terminal, where there is
            one.

    Returns:
        The `Calibration` for `convert`.

    Raises:
        InputError: a module has no integer form (named), weights or values hold NaN or infinity (the layer is named),
            there are fewer images than asked for, or the model computes something else than its translation.

    Example:
        >>> import torch
        >>> from intflash import integer
        >>> from intflash.digits import load_model
        >>> integer.calibrate(load_model("vit"), [torch.rand(8, 1, 8, 8)]).images
        8
    """
    if images is not None and images < 1:
        raise InputError(f"images must be at least 1, got {images}")
    if isinstance(batches, Tensor) or hasattr(batches, "keys"):  # its rows or names would be taken for batches
        raise InputError(f"batches must be an iterable of inputs, got one {type(batches).__name__}: pass [x] for one x")
    graph = translate(model).check()
    graphs = {graph.inputs[0].shape: graph}
    sizes: set[tuple[int, ...]] = set()
    observed = _observed(graph)
    device = next((x.device for x in model.parameters()), torch.device("cpu"))
    present: Tensor | None = None  # which of the batch's tokens are no padding

    def seen(name: str, x: Tensor) -> None:
        rows = _matrix(x)
        if present is not None and len(rows) == len(present):
            rows = rows[present]
        if name not in observed:  # a result
            if not bool(torch.isfinite(rows).all()):
                raise InputError(f"{name}: calibration needs finite values, got NaN or infinity")
            return
        try:
            observed[name].observe(rows)
        except InputError as error:
            raise InputError(f"{name}: {error}") from None

    count = 0
    with torch.no_grad(), _shown(progress, images) as show:
        for batch in batches:
            size = _size(graph, batch)
            if size not in graphs:
                graphs[size] = translate(model, size)
            graph = graphs[size]
            sizes.add(graph.inputs[0].shape)
            if len(size) > 1 and len(sizes) > 1:
                raise InputError(f"expected calibration images of one size, got {sorted(sizes)}")
            inputs = bind(graph.inputs, batch, device)
            present = next((inputs[i.name].flatten() for i in graph.inputs if i.kind == "mask"), None)
            found = graph.run(inputs, seen=seen)
            if count == 0:
                _compare(graph, found, _call(model, batch))
            count += len(next(iter(inputs.values())))
            show(count)
    if count == 0:
        raise InputError("calibration needs batches of images: none were given")
    if images is not None and count < images:
        raise InputError(f"calibration was asked for {images} images, {count} came")
    for name, ranges in observed.items():
        if ranges.amax < TINY_AMAX:
            raise InputError(f"{name}: its calibrated range is zero, so that no scale can be chosen")
    size = max(sizes)
    return Calibration(type(model).__name__, count, size, graphs[size].fingerprints(), observed, _versions(model))


def _size(graph: Graph, batch: Any) -> tuple[int, ...]:
    """The shape of a batch's first input, without the batch axis; the graph's where it is no such tensor."""
    own = graph.inputs[0]
    x = named(graph.inputs, batch).get(own.name)
    return tuple(x.shape[1:]) if isinstance(x, Tensor) and x.ndim == 1 + len(own.shape) else own.shape


def _observed(graph: Graph) -> dict[str, Ranges]:
    """The values to observe: per channel where a scale of a channel can be folded into the next weights."""
    found: dict[str, Ranges] = {}
    accumulators = graph.accumulators()
    for layer in graph.layers:
        match layer:
            case Norm() | Mean():
                found[layer.out] = Ranges(per_channel=True)
            case Attend():
                found |= {name: Ranges(per_channel=True) for name in (layer.q, layer.k, layer.v, layer.out)}
            case Dense(activation=None):
                if len(layer.out) == 1 and layer.out[0] not in accumulators:
                    found[layer.out[0]] = Ranges(per_channel=False)
            case Dense():
                found[layer.out[0] + Graph.PRE] = Ranges(per_channel=False)
                found[layer.out[0]] = Ranges(per_channel=False)
            case _:
                found[layer.out] = Ranges(per_channel=False)
    return found


def _matrix(x: Tensor) -> Tensor:
    """All rows and channels of a value; the channels of heads are head * D + d."""
    if x.ndim == 5:
        x = x.permute(0, 1, 3, 2, 4).flatten(3)  # [B, S, N, heads * D]
    return x.reshape(-1, x.shape[-1])


Inputs = list[Input] | tuple[Input, ...]


def named(wanted: Inputs, batch: Any) -> dict[str, Any]:
    """The inputs of a call by name: of a tensor, a tuple or a mapping."""
    if isinstance(batch, Tensor):
        batch = (batch,)
    if hasattr(batch, "keys"):
        return dict(batch)
    if len(batch) > len(wanted):
        raise InputError(f"expected at most {len(wanted)} inputs, got {len(batch)}")
    return {i.name: x for i, x in zip(wanted, batch, strict=False)}


def bind(wanted: Inputs, batch: Any, device: torch.device) -> dict[str, Tensor]:
    """The inputs of a call by name, as `Input` says, on the device: those of a tensor, a tuple or a mapping.

    Sequences that are shorter than the inputs are padded, where a mask can say so: with index 0 and mask False.

    Raises:
        InputError: one is missing, unknown, or of another shape, type or range.
    """
    given = named(wanted, batch)
    unknown = given.keys() - {i.name for i in wanted}
    if unknown:
        raise InputError(f"unknown inputs {sorted(unknown)}; the model takes {[i.name for i in wanted]}")
    found: dict[str, Tensor] = {}
    size = None
    padded = any(i.kind == "mask" for i in wanted)
    for i in wanted:
        x = given.get(i.name)
        if x is None:
            if not i.optional:
                raise InputError(f"expected the input {i.name!r}")
            continue
        x = found[i.name] = _checked(i, x, padded)
        if x.device != device:
            found[i.name] = x.to(device)
        shape = tuple(x.shape) if padded else (len(x),)
        if size not in (None, shape):
            raise InputError(f"inputs of different batches: {list(size)} and {list(shape)} ({i.name})")
        size = shape
    for i in wanted:
        if i.name not in found:
            shape = size if padded else (*size, *i.shape)
            mask = i.kind == "mask"  # made on the device, which a graph capture demands
            found[i.name] = torch.full(shape, mask, dtype=torch.bool if mask else torch.int64, device=device)
    if padded:
        found = {i.name: F.pad(found[i.name], (0, i.shape[0] - size[1])) for i in wanted}
    return {i.name: found[i.name] for i in wanted}


def _checked(i: Input, x: Any, padded: bool) -> Tensor:
    """One input, after refusing what is not as `Input` says; values are read where they are in CPU memory."""
    if not isinstance(x, Tensor):
        raise InputError(f"{i.name}: expected a tensor, got {type(x).__name__}")
    shorter = padded and x.ndim == 2 and 0 < x.shape[1] <= i.shape[0]
    if x.ndim != 1 + len(i.shape) or not (shorter or tuple(x.shape[1:]) == i.shape) or len(x) == 0:
        most = "at most " if padded else ""
        raise InputError(
            f"{i.name}: expected a batch of shape [B, {most}{', '.join(map(str, i.shape))}], got {list(x.shape)}"
        )
    fits = {
        "float": x.dtype in (torch.float32, torch.float16, torch.bfloat16),
        "uint8": x.dtype == torch.uint8,
        "index": x.dtype in (torch.int64, torch.int32),
        "mask": x.dtype == torch.bool or not x.dtype.is_floating_point,
    }[i.kind]
    if not fits:
        kinds = {"float": "float32, float16 or bfloat16", "uint8": "uint8", "index": "int64 or int32"}
        raise InputError(f"{i.name}: expected {kinds.get(i.kind, 'bool or integers')}, got {x.dtype}")
    x = x.detach()
    # by NumPy: after an operation of their own torch's threads spin on the cores that the model's need
    if i.kind == "float" and x.is_cpu and not np.isfinite(x.float().numpy()).all():
        raise InputError(f"{i.name}: expected finite values, got NaN or infinity")
    if i.kind == "index":
        x = x.to(torch.int64)
        if x.is_cpu and not (0 <= int(x.min()) and int(x.max()) < i.bound):
            raise InputError(f"{i.name}: expected indices in [0, {i.bound}), got {int(x.min())} to {int(x.max())}")
    return x != 0 if i.kind == "mask" else x


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return model(batch)
    return model(**batch) if hasattr(batch, "keys") else model(*batch)


def _compare(graph: Graph, found: Mapping[str, Tensor], result: Any) -> None:
    """Refuse a model that computes something else than its graph."""
    for name, expected in graph.read(result).items():
        ours, theirs = found[name].double(), expected.double().reshape(found[name].shape)
        apart, largest = float((ours - theirs).abs().max()), float(theirs.abs().max())
        if not apart <= AGREEMENT.get(expected.dtype, FLOAT32_AGREEMENT) * largest:
            raise InputError(
                f"the model's {name} differ from those of its translation by {apart:.3g} (the largest is "
                f"{largest:.3g}): it holds hooks or changed modules that have no integer form"
            )


def _versions(model: nn.Module) -> dict[str, str]:
    import intflash

    found = {"intflash": intflash.__version__, "torch": torch.__version__}
    library = type(model).__module__.partition(".")[0]
    if library in sys.modules and library not in ("intflash", "__main__"):
        found[library] = getattr(sys.modules[library], "__version__", "unknown")
    return found


@contextmanager
def _shown(progress: Callable[[int], None] | None, images: int | None) -> Iterator[Callable[[int], None]]:
    """How progress is shown: by the caller's function, or by a line on the terminal, where there is one."""
    if progress is not None:
        yield progress
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("calibrating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("images", total=images)
        yield lambda count: bar.update(task, completed=count)
