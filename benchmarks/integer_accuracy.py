"""Accuracy of integer models: every option, and the LayerNorm and GELU of I-BERT and I-ViT in the place of ours.

``python -m benchmarks.integer_accuracy benchmarks/results/accuracy`` takes minutes on two cores and needs timm for the
full-size models; ``... digits`` leaves those out.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from benchmarks.model_accuracy import sharpened
from intflash import integer
from intflash.bench.experiments import Row, Setting, run_experiment, untimed
from intflash.bench.measure import sqnr
from intflash.digits import load_model, load_split
from intflash.integer.graph import Dense, Graph, Norm
from intflash.integer.lower import Lowering
from intflash.integer.registry import translate
from intflash.integer.simulate import simulate

CALIBRATION_IMAGES = 128
OPTIONS = {
    "default": {},
    "observer percentile": {"observer": "percentile"},
    "observer mse": {"observer": "mse"},
    "without folding": {"fold": False},
    "without folding, scales per tensor": {"fold": False, "scales": "tensor"},
    "scales per tensor": {"scales": "tensor"},
    "residual 32 bits": {"residual_bits": 32},
    "activation index 8 bits": {"activation_bits": 8},
    "activation index 12 bits": {"activation_bits": 12},
    "attention intflash_p8": {"method": "intflash_p8"},
}
FULL_SIZE = {
    "deit_small_patch16_224": 16, "vit_base_patch16_224": 8, "swin_tiny_patch4_window7_224": 8,
}  # name -> images that are compared  # fmt: skip
FULL_SIZE_CALIBRATION = 32
TOP1, AGREES, SQNR = "Top-1, %", "agrees with float, %", "SQNR of the logits, dB"


def ibert_norm(x: Tensor) -> Tensor:
    """(x - mean) / standard deviation by I-BERT's Algorithm 4, of integers."""
    y = x - torch.round(x.mean(-1, keepdim=True))
    std = torch.floor(torch.sqrt(y.square().sum(-1, keepdim=True)))
    return _divided(y, torch.floor(2**31 / std.clamp(min=1)))


def ivit_norm(x: Tensor) -> Tensor:
    """The same by I-ViT's I-LayerNorm: ten steps of the integer square root from 2^16."""
    y = x - torch.round(x.mean(-1, keepdim=True))
    variance = y.square().sum(-1, keepdim=True)
    std = torch.full_like(variance, 2**16)
    for _ in range(10):
        std = torch.floor((std + torch.floor(variance / std)) / 2).clamp(min=1)
    return _divided(y, torch.floor((2**31 - 1) / std))


def _divided(y: Tensor, factor: Tensor) -> Tensor:
    return torch.floor(y * factor / 2) * (math.sqrt(y.shape[-1]) / 2**30)


def ibert_gelu(x: Tensor, scale: float) -> Tensor:
    """x * (1 + i-erf(x / sqrt 2)) / 2, I-BERT's Eq. 8; its products are not rounded here."""
    q = x / math.sqrt(2)
    erf = torch.sign(q) * (1 - 0.2888 * (q.abs().clamp(max=1.769) - 1.769).square())
    return x * (1 + erf) / 2


def ivit_gelu(x: Tensor, scale: float) -> Tensor:
    """I-ViT's ShiftGELU of 8-bit codes: x times a sigmoid of 1.702 x, of shifts and one division."""
    codes = torch.round(x / scale).clamp(-127, 127)
    top = codes.amax(-1, keepdim=True)
    unit = scale * 1.702
    exp, exp_top = _shift_exp(codes - top, unit), _shift_exp(-top, unit)
    factor = torch.floor((2**31 - 1) / (exp + exp_top).clamp(max=2**31 - 1))
    sigmoid = torch.floor(exp * factor / 2**24)  # 8 bits
    return codes * sigmoid * (scale / 128)


def _shift_exp(x: Tensor, unit: float, octaves: int = 23) -> Tensor:
    x = x + torch.floor(x / 2) - torch.floor(x / 16)
    x0 = math.floor(-1 / unit)
    x = torch.clamp(x, min=octaves * x0)
    q = torch.floor(x / x0)
    return torch.floor(((x - x0 * q) / 2 - x0) * 2.0 ** (octaves - q)).clamp(min=0)


PAPERS = {
    "LayerNorm and GELU of I-BERT": (ibert_norm, ibert_gelu),
    "LayerNorm and GELU of I-ViT": (ivit_norm, ivit_gelu),
}


class PaperFunctions(TorchFunctionMode):
    """While entered, layer_norm and gelu of a simulated graph are a paper's, on the codes that ours would see."""

    def __init__(
        self, norm: Callable, gelu: Callable, graph: Graph, calibration: integer.Calibration, options: integer.Options
    ) -> None:
        super().__init__()
        streams = Lowering(graph, calibration, options).stream_scale
        ranges = calibration.ranges
        self.norm, self.gelu = norm, gelu
        self.streams = cycle([float(streams[x.x]) for x in graph.layers if isinstance(x, Norm)])
        self.steps = cycle(
            [ranges[x.name + Graph.PRE].amax / 127 for x in graph.layers if isinstance(x, Dense) and x.activation]
        )

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.layer_norm:
            x, weight, bias = args[0], kwargs["weight"], kwargs["bias"]
            return self.norm(torch.round(x / next(self.streams))) * weight + bias
        if func in (F.gelu, torch._C._nn.gelu) and args[0].ndim == 3:  # the others make a table
            return self.gelu(args[0], next(self.steps))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def digits(setting: Setting) -> Iterator[Row]:
    train, held_out = load_split()
    for name in ("vit", "swin"):
        model = load_model(name)
        calibration = integer.calibrate(model, [train.images[:CALIBRATION_IMAGES]], images=CALIBRATION_IMAGES)
        expected = model(held_out.images)
        yield from _rows("float32", name, expected, expected, held_out.labels)
        for label, options in OPTIONS.items():
            logits = integer.convert(model, calibration, **options)(held_out.images)
            yield from _rows(label, name, expected, logits, held_out.labels)
        inputs, options = {"images": held_out.images}, integer.Options()
        logits = simulate(model, calibration, options, inputs)["logits"]
        yield from _rows("float64 with the same quantizers", name, expected, logits, held_out.labels)
        for label, functions in PAPERS.items():
            with PaperFunctions(*functions, translate(model), calibration, options):
                logits = simulate(model, calibration, options, inputs)["logits"]
            yield from _rows(f"{label}, the rest as float64", name, expected, logits, held_out.labels)


def _rows(label: str, name: str, expected: Tensor, logits: Tensor, labels: Tensor) -> Iterator[Row]:
    best = logits.argmax(1)
    yield Row(label, name, TOP1, 100 * float((best == labels).double().mean()))
    if logits is not expected:
        yield Row(label, name, AGREES, 100 * float((best == expected.argmax(1)).double().mean()))
        yield Row(label, name, SQNR, sqnr(expected, logits))


@torch.no_grad()
def full_size(setting: Setting) -> Iterator[Row]:
    for name, count in FULL_SIZE.items():
        model: nn.Module = sharpened(name, setting.seed)
        batches = (torch.randn(8, 3, 224, 224) for _ in range(FULL_SIZE_CALIBRATION // 8))
        calibration = integer.calibrate(model, batches, images=FULL_SIZE_CALIBRATION)
        images = torch.randn(count, 3, 224, 224).split(4)
        expected = torch.cat([model(x) for x in images])
        for label, options in (("integer model", {}), ("integer model, intflash_p8", {"method": "intflash_p8"})):
            made = integer.convert(model, calibration, **options)
            yield Row(label, name, SQNR, sqnr(expected, torch.cat([made(x) for x in images])))
        found = [simulate(model, calibration, integer.Options(), {"x": x})["logits"] for x in images]
        yield Row("float64 with the same quantizers", name, SQNR, sqnr(expected, torch.cat(found)))


DIGITS = untimed(
    name="integer_digits",
    title="Trained digit models as integer models",
    source="docs/guide/integer-models.md",
    measure=digits,
    notes=f"The held-out third, 599 images, against float32; calibrated on the first {CALIBRATION_IMAGES} training "
    "images. The papers' functions take the codes that ours take, in the float64 computation with our quantizers.",
)
RANDOM = untimed(
    name="integer_full_size",
    title="Full-size models with random weights as integer models",
    source="docs/guide/integer-models.md",
    measure=full_size,
    notes=f"timm {version('timm')}'s initial weights with Q, K, V projections doubled, {FULL_SIZE_CALIBRATION} normal "
    "images to calibrate on and others to compare, torch.manual_seed(0), against float32.",
)
EXPERIMENTS = (DIGITS, RANDOM)


if __name__ == "__main__":
    for experiment in EXPERIMENTS[:1] if sys.argv[2:] == ["digits"] else EXPERIMENTS:
        outcome = run_experiment(experiment, Setting())
        print(*outcome.save(Path(sys.argv[1])), outcome.error or "")
