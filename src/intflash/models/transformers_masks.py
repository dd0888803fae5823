"""What masks of transformers say, so that sliding windows reach the kernels as windows.

transformers writes a sliding window into a mask of all queries and keys. The functions here make the same masks, and
note the `Window` of a mask that says nothing but a sliding window and padding. A tensor that is made from such a mask
(a slice, a sum, a copy on another device) is another tensor, and a mask like any other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sliding_window_bidirectional_overlay,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

from intflash.models.base import Window

# mask -> (its version counter when it was made, its window), as long as the mask exists
_WINDOWS = WeakTensorKeyDictionary()


def noting(make_mask: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a mask function of transformers, whose arguments come by name, and notes the windows of its masks."""

    @functools.wraps(make_mask)
    def made(*args: Any, **kwargs: Any) -> Any:
        mask = make_mask(*args, **kwargs)
        # changes of an inference tensor are not counted
        if isinstance(mask, Tensor) and not torch.compiler.is_compiling() and not mask.is_inference():
            window = _window(**kwargs)
            if window is not None:
                _WINDOWS[mask] = mask._version, window
        return mask

    return made


def window_of(mask: Tensor | None, queries: int, keys: int) -> Window | None:
    """Returns the window of a mask of so many queries and keys; None where it has none or was changed since."""
    if mask is None or torch.compiler.is_compiling() or mask not in _WINDOWS:
        return None
    version, window = _WINDOWS[mask]
    return window if mask._version == version and mask.shape[2:] == (queries, keys) else None


def _window(
    q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function, attention_mask: Tensor | None = None, **others: Any,
) -> Window | None:  # fmt: skip
    """Returns what the mask of these arguments says, where that is a sliding window and padding."""
    size = _sliding_window(mask_function)
    if size is None or not all(type(x) is int for x in (*size, q_length, kv_length, q_offset, kv_offset)):
        return None
    own = q_offset - kv_offset  # the key of the first query
    if own not in (0, kv_length - q_length):  # a static cache, whose last keys are not there yet
        return None
    keep = None
    if attention_mask is not None:
        if attention_mask.ndim != 2 or attention_mask.dtype != torch.bool:
            return None
        end = kv_offset + kv_length
        keep = F.pad(attention_mask, (0, max(0, end - attention_mask.shape[1])))[:, kv_offset:end]
        keep = keep[:, None, None].clone()
    return Window(keep, size, "top_left" if own == 0 else "bottom_right")


def _sliding_window(mask_function: Callable[..., Any]) -> tuple[int, int] | None:
    """Returns how many keys before and after a query's own its window has; None for a function of other masks.

    Of transformers' window w, key j is present for query i iff i - w < j <= i, or in a model that is not causal iff
    |i - j| <= w.
    """
    if getattr(mask_function, "__code__", None) is not sliding_window_causal_mask_function(1).__code__:
        return None
    parts = mask_function.__closure__[0].cell_contents  # the functions whose masks it combines
    if len(parts) != 2 or not parts[0].__closure__:
        return None
    (overlay, shape), window = parts, parts[0].__closure__[0].cell_contents
    if overlay.__code__ is sliding_window_overlay(1).__code__ and shape is causal_mask_function:
        return window - 1, 0
    if overlay.__code__ is sliding_window_bidirectional_overlay(1).__code__ and shape is bidirectional_mask_function:
        return window, window
    return None
