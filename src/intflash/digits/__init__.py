"""The digits: two small trained transformers whose attention is an argument, and their data.

`load_model("vit")` and `load_model("swin")` come with weights that `scripts/train_digits.py` made.
"""

from __future__ import annotations

from importlib import resources

from torch import nn

from intflash.digits.data import Split, load_split
from intflash.digits.layers import Attention, float_attention
from intflash.digits.swin import DigitsSwin
from intflash.digits.vit import DigitsViT
from intflash.errors import InputError

__all__ = [
    "ARCHITECTURES",
    "Attention",
    "DigitsSwin",
    "DigitsViT",
    "Split",
    "float_attention",
    "load_model",
    "load_split",
]

ARCHITECTURES: dict[str, type[nn.Module]] = {"vit": DigitsViT, "swin": DigitsSwin}


def load_model(name: str = "vit") -> nn.Module:
    """The trained digit model of that name ("vit" or "swin"), float32, in evaluation mode, on CPU.

    Raises:
        InputError: there is none of that name.

    Example:
        >>> import torch
        >>> from intflash.digits import load_model
        >>> load_model("vit")(torch.zeros(1, 1, 8, 8)).shape
        torch.Size([1, 10])
    """
    from safetensors.torch import load

    if name not in ARCHITECTURES:
        raise InputError(f"digit model must be one of {tuple(ARCHITECTURES)}, got {name!r}")
    model = ARCHITECTURES[name]()
    weights = resources.files("intflash.digits") / "weights" / f"{name}.safetensors"
    model.load_state_dict(load(weights.read_bytes()))
    return model.eval().requires_grad_(False)
