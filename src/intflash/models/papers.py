"""The results that papers print for whole models, to compare with ours: QFlash, Table 5 (ImageNet-1k Top-1, %)."""

from __future__ import annotations

from dataclasses import dataclass

# timm names of the weights whose float32 Top-1 is nearest to the paper's
QFLASH_MODELS = {
    "vit_small_patch16_224.augreg_in21k_ft_in1k": "ViT-S",
    "vit_base_patch16_224.augreg2_in21k_ft_in1k": "ViT-B",
    "deit_tiny_patch16_224.fb_in1k": "DeiT-T",
    "deit_small_patch16_224.fb_in1k": "DeiT-S",
    "deit_base_patch16_224.fb_in1k": "DeiT-B",
    "swin_tiny_patch4_window7_224.ms_in1k": "Swin-T",
    "swin_small_patch4_window7_224.ms_in1k": "Swin-S",
}

_COLUMNS = ("fp32", "qflash", "ivit", "ibert", "fqvit", "int_flash_full", "int_flash_half", "qattn")
_TOP1 = {
    "ViT-S": (81.38, 82.24, 81.19, 81.00, 81.06, 80.60, 80.62, 80.23),
    "ViT-B": (85.10, 86.84, 85.02, 83.97, 84.82, 84.74, 84.83, 84.68),
    "DeiT-T": (72.21, 71.70, 71.70, 71.20, 71.53, 71.64, 71.64, 71.25),
    "DeiT-S": (79.85, 79.46, 79.53, 79.48, 79.39, 79.64, 79.68, 79.43),
    "DeiT-B": (81.85, 81.59, 81.47, 81.59, 81.72, 81.85, 81.90, 81.85),
    "Swin-T": (81.35, 80.06, 80.83, 81.11, 80.90, 80.04, 80.05, 80.13),
    "Swin-S": (83.20, 81.86, 82.81, 83.09, 83.15, 82.11, 83.20, 82.24),
}
# Giga bit operations of the int8 methods as printed. Methods with P V in 16 bits have twice as many.
_BOPS = {"ViT-S": 17.2, "ViT-B": 34.3, "DeiT-T": 17.2, "DeiT-S": 34.3, "DeiT-B": 68.7, "Swin-T": 13.5, "Swin-S": 22.0}
_HALF = ("int_flash_half", "qattn")
# The printed numbers are 192 (384 with 16-bit P V) bit operations per multiply-accumulate of one product,
# for DeiT and Swin exactly; ViT-S and ViT-B print half of that.
PAPER_BITS_PER_MAC = 192


def timm_name(model: str) -> str:
    """Returns the timm name of a model of the paper, such as "DeiT-T". Other names are returned unchanged."""
    return next((full for full, short in QFLASH_MODELS.items() if short.lower() == model.lower()), model)


@dataclass(frozen=True)
class PaperRow:
    """One group of cells of QFlash's Table 5."""

    top1: float
    bops: float | None


def paper_row(model: str, method: str) -> PaperRow | None:
    """Returns the paper's numbers for a timm model and a method, or None."""
    stem = model.partition(".")[0]
    name = next(
        (short for full, short in QFLASH_MODELS.items() if full in (model,) or full.startswith(stem + ".")), None
    )
    if name is None or method not in _COLUMNS:
        return None
    bops = None if method == "fp32" else _BOPS[name] * (2 if method in _HALF else 1)
    return PaperRow(_TOP1[name][_COLUMNS.index(method)], bops)
