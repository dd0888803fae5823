"""Random models with an attention that is not flat, for tests without pretrained weights."""

import torch
from torch import Tensor, nn

PROJECTIONS = ("qkv", "in_proj", "q_proj", "k_proj", "v_proj", "to_q", "to_k", "to_v")


def sharpen(model: nn.Module, gain: float = 2.0) -> nn.Module:
    """Enlarges the Q, K, V projections and replaces heads of zeros and layer scales or norms of 0."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and any(part in name for part in PROJECTIONS):
                parameter.mul_(gain)
            if parameter.ndim == 2 and not parameter.any():
                torch.nn.init.normal_(parameter, std=0.05)
            if "gamma" in name or (name.endswith("weight") and parameter.ndim == 1 and not parameter.any()):
                parameter.fill_(0.5)
    return model.eval()


def run(model: nn.Module, *args: Tensor, **kwargs: Tensor) -> Tensor:
    """Returns the model's tensor output, the logits where it has several outputs."""
    with torch.no_grad():
        out = model(*args, **kwargs)
    if isinstance(out, Tensor):
        return out
    return next(getattr(out, name) for name in ("logits", "pooler_output", "sample") if hasattr(out, name))
