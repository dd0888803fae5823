"""Swin's windows as maps of rows: which token of an image a row of a window, or of a merged patch, is.

Tokens of an image of height x width are rows ``i * width + j``. A cyclic shift, the partition into windows and their
reverse are one map, and its use in a load or a store.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from intflash.integer.graph import Graph
from intflash.integer.registry import expect, refuse

Size = tuple[int, int]


def window_rows(size: Size, window: Size, shift: Size) -> Tensor:
    """The token that each row of each window holds, int64 ``[S * N]``, after a roll by -shift.

    Example:
        >>> from intflash.integer.windows import window_rows
        >>> window_rows((2, 4), (2, 2), (0, 1)).tolist()
        [1, 2, 5, 6, 3, 0, 7, 4]
    """
    tokens = torch.arange(size[0] * size[1]).view(size).roll((-shift[0], -shift[1]), (0, 1))
    return to_windows(tokens, window).flatten()


def to_windows(x: Tensor, window: Size) -> Tensor:
    """``[height, width]`` as ``[S, N]``, windows and their rows in order."""
    return x.unflatten(0, (-1, window[0])).unflatten(2, (-1, window[1])).transpose(1, 2).flatten(2).flatten(0, 1)


def shifted_mask(size: Size, window: Size, shift: Size) -> Tensor:
    """Which tokens of a window were neighbours before the shift, bool ``[S, 1, N, N]``."""
    height, width = (_regions(*of) for of in zip(size, window, shift, strict=True))
    regions = to_windows(3 * height[:, None] + width, window)
    return (regions[:, None, :] == regions[:, :, None])[:, None]


def _regions(size: int, window: int, shift: int) -> Tensor:
    """0, 1 and 2: the windows before the last, the last one's part that was not wrapped around, and the rest."""
    at = torch.arange(size)
    return (at >= size - window).long() + (at >= size - shift).long()


def merge_rows(size: Size, order: tuple[Size, ...]) -> Tensor:
    """The four tokens of each patch of 2 x 2, int64 ``[R, 4]``: their (row, column) within it in this order."""
    tokens = torch.arange(size[0] * size[1]).view(size)
    return torch.stack([tokens[i::2, j::2].flatten() for i, j in order], dim=1)


ROW_MAJOR = ((0, 0), (0, 1), (1, 0), (1, 1))
COLUMN_MAJOR = ((0, 0), (1, 0), (0, 1), (1, 1))  # of Swin v1: timm and torchvision


def window_attention(
    graph: Graph, name: str, x: str, norm_name: str, norm: nn.LayerNorm, module: nn.Module, *, heads: int, size: Size,
    window: Size, shift: Size, bias: Tensor, scale: float | None = None,
) -> str:  # fmt: skip
    """x plus the attention of its windows.

    Args:
        module: has the linears `qkv` and `proj`, and `name`.
        bias: relative-position bias ``[1, heads, N, N]``.

    Raises:
        InputError: windows do not divide the image; padded ones have no integer form.
    """
    if size[0] % window[0] or size[1] % window[1]:
        refuse(
            name, module,
            f"windows of {window[0]} x {window[1]} do not divide {size[0]} x {size[1]} tokens; padding is not served",
        )  # fmt: skip
    for part in ("qkv", "proj"):
        expect(getattr(module, part), f"{name}.{part}", nn.Linear)
    rows = window_rows(size, window, shift)
    in_order = bool((rows == torch.arange(len(rows))).all())
    count = len(rows) // (window[0] * window[1])
    mask = shifted_mask(size, window, shift) if any(shift) else None
    y = graph.layer_norm(norm_name, x, norm, None if in_order else rows[:, None])
    q, k, v = graph.heads(f"{name}.qkv", y, module.qkv.weight, module.qkv.bias, heads, count)
    y = graph.attention(f"{name}.attention", q, k, v, scale=scale, bias=bias, mask=mask)
    return graph.linear(
        f"{name}.proj", y, module.proj.weight, module.proj.bias, residual=x, store_rows=None if in_order else rows
    )


def merged(
    graph: Graph, name: str, x: str, norm: nn.LayerNorm, reduction: nn.Linear, size: Size,
    order: tuple[Size, ...] = COLUMN_MAJOR, *, names: tuple[str, str] = ("norm", "reduction"),
) -> str:  # fmt: skip
    """Patch merging: every 2 x 2 tokens as one, normalized and projected.

    Raises:
        InputError: a side is odd; padding has no integer form.
    """
    if size[0] % 2 or size[1] % 2:
        refuse(name, reduction, f"{size[0]} x {size[1]} tokens are no patches of 2 x 2, and padding is not served")
    expect(reduction, f"{name}.{names[1]}", nn.Linear)
    y = graph.layer_norm(f"{name}.{names[0]}", x, norm, merge_rows(size, order))
    return graph.linear(f"{name}.{names[1]}", y, reduction.weight, reduction.bias)
