"""The accuracy tables of docs/guide/evaluate.md: digit models with static scales, full-size models with random weights.

``python -m benchmarks.model_accuracy benchmarks/results/accuracy`` takes about a minute on two cores and needs timm.
"""

import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn

import intflash
from intflash.bench.experiments import Row, Setting, run_experiment, untimed
from intflash.bench.measure import sqnr
from intflash.digits import load_model, load_split
from intflash.models.evaluate import FLOAT, Variant, evaluate

CALIBRATION_IMAGES, BATCH = 256, 100
STATIC = {  # name -> observer, granularity
    "static absmax": ("absmax", {}),
    "static percentile": ("percentile", {}),
    "static mse": ("mse", {}),
    "static absmax, per head": ("absmax", dict.fromkeys("qkv", "head")),
}
FULL_SIZE = ("deit_tiny_patch16_224", "vit_small_patch16_224", "swin_tiny_patch4_window7_224")
METHODS = ("fp16", "bf16", "int_flash_half", "intflash", "intflash_p8", "intflash_online", "qflash")
TOP1, SQNR = "Top-1, %", "SQNR of the logits, dB"


def digits(setting: Setting) -> Iterator[Row]:
    train, held_out = load_split()
    data = torch.utils.data.TensorDataset(held_out.images, held_out.labels)
    for name in ("vit", "swin"):
        model, calibration = load_model(name), train.take(CALIBRATION_IMAGES).images
        variants = [Variant("intflash")]
        for label, (observer, granularity) in STATIC.items():
            scales = intflash.calibrate(model, [calibration], observer=observer, granularity=granularity)
            variants.append(Variant("intflash", scales, label))
        result = evaluate(model, data, variants, batch_size=BATCH)
        for label, row in zip((FLOAT, "dynamic", *STATIC), result.rows, strict=True):
            yield Row(label, name, TOP1, row.top1)
            if row.logits_sqnr is not None:
                yield Row(label, name, SQNR, row.logits_sqnr)


def sharpened(name: str, seed: int) -> nn.Module:
    """Doubles the random weights of the Q, K, V projections, so that the softmax is not flat."""
    import timm

    torch.manual_seed(seed)
    model = timm.create_model(name).eval().requires_grad_(False)
    for at, parameter in model.named_parameters():
        if at.endswith("qkv.weight"):
            parameter.mul_(2)
    return model


@torch.no_grad()
def full_size(setting: Setting) -> Iterator[Row]:
    for name in FULL_SIZE:
        model, image = sharpened(name, setting.seed), torch.randn(1, 3, 224, 224)
        expected = model(image)
        for method in METHODS:
            with intflash.patch(model, method):
                yield Row(method, name, SQNR, sqnr(expected, model(image)))


EXPERIMENTS = (
    untimed(
        name="digits_static",
        title="Trained digit models with dynamic and static scales, method intflash",
        source="docs/guide/evaluate.md",
        measure=digits,
        notes=f"The held-out third, 599 images in batches of {BATCH}, against float32. Static scales come from the "
        f"first {CALIBRATION_IMAGES} training images in one batch; dynamic ones are those of each head of each image.",
    ),
    untimed(
        name="full_size_random",
        title="Full-size models with random weights, dynamic scales",
        source="docs/guide/evaluate.md",
        measure=full_size,
        notes=f"timm {version('timm')}'s initial weights with Q, K, V projections doubled and one normal image, "
        "torch.manual_seed(0), against float32.",
    ),
)


if __name__ == "__main__":
    for experiment in EXPERIMENTS:
        outcome = run_experiment(experiment, Setting())
        print(*outcome.save(Path(sys.argv[1])), outcome.error or "")
