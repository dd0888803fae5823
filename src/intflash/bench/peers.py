"""Attention of other projects, which is timed where it is installed."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator

from torch import Tensor

logger = logging.getLogger("intflash")

# module -> its function of float16 (q, k, v), each [B, H, N, D], with quantization inside
PEERS = {"sageattention": "sageattn", "comfy_kitchen": "int8_attention"}


def installed() -> Iterator[tuple[str, Callable[[Tensor, Tensor, Tensor], Tensor]]]:
    """Returns (name, function) of the peers that can be imported here."""
    for module, function in PEERS.items():
        try:
            yield module, getattr(importlib.import_module(module), function)
        except Exception as error:  # not installed, a version without it, a build for another machine
            logger.debug("%s is not timed: %s", module, error)
