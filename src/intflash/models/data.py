"""Image classifiers by name with their preprocessing, and folders of images in ImageNet's layout."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from intflash.errors import InputError

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff"}
HF_PREFIX = "transformers:"
DIGITS_PREFIX = "digits:"


class ImageFolder(torch.utils.data.Dataset):
    """``(image, label)`` of ``root/class/*.jpg``. Labels number the class folders in sorted order.

    Args:
        root: the folder of classes, or a folder that contains it as "val".
        transform: from a PIL image to a tensor ``[3, H, W]``.
    """

    def __init__(self, root: str | Path, transform: Callable[[Any], Tensor]) -> None:
        root = Path(root)
        root = root / "val" if (root / "val").is_dir() else root
        if not root.is_dir():
            raise InputError(f"{root} is not a folder")
        self.classes = sorted(d.name for d in root.iterdir() if d.is_dir())
        self.items = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((root / name).rglob("*"))
            if path.suffix.lower() in SUFFIXES
        ]
        if not self.items:
            raise InputError(f"{root} has no images in class folders (root/class/image.jpg)")
        self.transform = transform

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        path, label = self.items[index]
        with Image.open(path) as image:
            return self.transform(image.convert("RGB")), label


class Logits(nn.Module):
    """A transformers classifier that takes pixel values and returns logits, as timm's classifiers do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.model(pixel_values=pixel_values).logits


def unwrapped(model: nn.Module) -> nn.Module:
    """The transformers model inside `Logits`, or the model itself: what scales and integer models are made of."""
    return model.model if isinstance(model, Logits) else model


def load_classifier(
    name: str, *, pretrained: bool = True, checkpoint: str | Path | None = None
) -> tuple[nn.Module, Callable[[Any], Tensor]]:
    """Returns a classifier in evaluation mode and its transform from a PIL image.

    Args:
        name: a timm name, "transformers:" with a hub name or a folder, "digits:vit" or "digits:swin".
        pretrained: load the published weights; False: random ones, seeded.
        checkpoint: a file of weights for a timm model, instead of the published ones.

    Raises:
        InputError: the library is missing, has no such model or finds no weights for it.
    """
    torch.manual_seed(0)
    if name.startswith(DIGITS_PREFIX):
        return _load_digits(name.removeprefix(DIGITS_PREFIX), pretrained, checkpoint)
    if name.startswith(HF_PREFIX):
        if checkpoint is not None:
            raise InputError(f"a checkpoint is for a timm model, got {name!r}: give the folder of its weights there")
        return _load_transformers(name.removeprefix(HF_PREFIX), pretrained)
    timm = import_timm()
    from timm.data import create_transform, resolve_model_data_config

    try:
        model = timm.create_model(name, pretrained=pretrained and checkpoint is None)
        if checkpoint is not None:  # in some versions, create_model's own loading runs pickled code
            timm.models.load_checkpoint(model, str(checkpoint), weights_only=True)
    except (RuntimeError, ValueError, OSError, pickle.UnpicklingError) as error:
        raise InputError(f"timm cannot make {name!r}: {error}") from None
    return model.eval(), create_transform(**resolve_model_data_config(model), is_training=False)


def _load_digits(name: str, pretrained: bool, checkpoint: str | Path | None) -> tuple[nn.Module, Callable[[Any], Any]]:
    from intflash.digits import load_model

    if checkpoint is not None or not pretrained:
        raise InputError(f"the digit models come with their weights, got {name!r} with others")
    return load_model(name), lambda image: image


def load_images(
    name: str, folder: str | Path | None, transform: Callable[[Any], Tensor], *, train: bool = False
) -> torch.utils.data.Dataset:
    """``(image, label)`` items for a classifier of `load_classifier`: of a folder, or the digits' own.

    Args:
        name: of the classifier.
        folder: as for `ImageFolder`; None for the digit models.
        train: the digits to calibrate on, not the held-out ones.

    Raises:
        InputError: the folder is missing, or one was given for the digits.
    """
    if name.startswith(DIGITS_PREFIX):
        if folder is not None:
            raise InputError(f"the digit models have data of their own, got the folder {folder}")
        from intflash.digits import load_split

        chosen = load_split()[0 if train else 1]
        return torch.utils.data.TensorDataset(chosen.images, chosen.labels)
    if folder is None:
        raise InputError(f"--data is needed: a folder of images for {name!r}")
    return ImageFolder(folder, transform)


def normalization(transform: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(mean, std) of a transform that ends with one normalization of an image in [0, 1].

    Raises:
        InputError: there is none in it.
    """
    last = list(getattr(transform, "transforms", []))[-1:]
    if not last or not all(hasattr(last[0], x) for x in ("mean", "std")):
        raise InputError("raw uint8 images need the mean and std of the model's normalization, which it does not say")
    return tuple(tuple(float(x) for x in torch.as_tensor(getattr(last[0], y)).flatten()) for y in ("mean", "std"))


def import_timm() -> ModuleType:
    """Imports timm.

    Raises:
        InputError: it is missing, or its torchvision does not match torch.
    """
    try:
        import timm
    except (ImportError, RuntimeError) as error:
        raise _not_importable("timm", error) from None
    return timm


def _not_importable(library: str, error: Exception) -> InputError:
    """Explains a failed import. A RuntimeError means that torchvision's operators do not match this torch."""
    needed = "pip install '.[models]' in a clone of IntFlash, and a torchvision built for this torch"
    return InputError(f"{library} cannot be imported ({error}); it needs: {needed}")


def _load_transformers(name: str, pretrained: bool) -> tuple[nn.Module, Callable[[Any], Tensor]]:
    try:
        from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification
    except (ImportError, RuntimeError) as error:
        raise _not_importable("transformers", error) from None

    try:
        if pretrained:
            model = AutoModelForImageClassification.from_pretrained(name)
        else:
            model = AutoModelForImageClassification.from_config(AutoConfig.from_pretrained(name))
        processor = AutoImageProcessor.from_pretrained(name)
    except (RuntimeError, ValueError, OSError) as error:
        raise InputError(f"transformers cannot make {name!r}: {error}") from None

    def transform(image: Any) -> Tensor:
        return processor(images=image, return_tensors="pt")["pixel_values"][0]

    return Logits(model).eval(), transform
