"""How many bytes a rank sends: the formulas of docs/design/distributed.md, which tests compare with what is counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from intflash.distributed.shards import Shards
from intflash.errors import InputError
from intflash.quant import Recipe

FINGERPRINT = 512  # int32 in the first all-reduce: what tells whether the calls agree, and maxima
STAMP = 5  # of them tell whether the calls agree
KEY_PADDING = 16  # V's rows of keys have a multiple of as many, as tensor cores read them and kernels write them
SCHEMES = ("gather", "ulysses", "merge")


@dataclass(frozen=True)
class Sizes:
    """What a call's bytes depend on.

    Attributes:
        q, k, v: the whole shapes ``[B, H, N, D]``.
        across, along: ranks among which K and V are gathered, and among which heads are exchanged.
        layout: of the shards.
        out_dtype, return_lse: of the output.
        recipe: None for int8 inputs, which bring their scales.
        keys_sharded: whether they are, or every rank has all keys.
        blocks: scales of K for each head and rank that travel, where it has one per block of tokens.
        token_scales: queries have scales of their own.
        float_bytes: of an element of K, for the mean of K smoothing.
    """

    q: Sequence[int]
    k: Sequence[int]
    v: Sequence[int]
    across: int
    along: int
    layout: str = "contiguous"
    out_dtype: torch.dtype = torch.float16
    return_lse: bool = False
    recipe: Recipe | None = field(default_factory=Recipe)
    keys_sharded: bool = True
    blocks: int = 0
    token_scales: bool = False
    float_bytes: int = 2

    @property
    def ranks(self) -> int:
        return self.across * self.along


def with_padding(keys: int) -> int:
    """The length of V's rows of keys."""
    return -(-keys // KEY_PADDING) * KEY_PADDING


def data_bytes(sizes: Sizes, scheme: str) -> float:
    """Bytes of K, V, Q and outputs that a rank sends."""
    (b, hq, nq, d), (_, hk, nk, _), dv = sizes.q, sizes.k, sizes.v[3]
    if scheme == "local":
        return 0.0
    if scheme == "merge":  # Tmax; then l and acc, all int64
        return _reduced(sizes, 8 * b * hq * nq) + _reduced(sizes, 8 * b * hq * nq * (dv + 1))
    tokens = Shards(nk, sizes.ranks, sizes.layout).longest
    across, along = sizes.across, sizes.along
    kv = b * hk * (tokens * d + with_padding(tokens) * dv)
    sent = kv * (along - 1) / along + kv * (across - 1)  # of this row's heads what `along` ranks hold is gathered
    if along > 1:
        rows = Shards(nq, sizes.ranks, sizes.layout).longest
        back = dv * sizes.out_dtype.itemsize + 4 * sizes.return_lse
        sent += b * hq * rows * (d + 4 * sizes.token_scales + back) * (along - 1) / along
    return sent


def control_bytes(sizes: Sizes) -> float:
    """Bytes of what makes ranks agree: fingerprint, shared scales, K's mean, scales of blocks."""
    sent = _reduced(sizes, 4 * FINGERPRINT)
    (b, hk, nk, d), recipe = sizes.k, sizes.recipe
    sent += _gathered(sizes, 4 * sizes.blocks * hk)
    if recipe is None:
        return sent
    if recipe.smooth_k and sizes.keys_sharded:
        each = -(-b * hk * d // sizes.ranks)
        columns = each * sizes.ranks * Shards(nk, sizes.ranks, sizes.layout).longest
        columns *= 4 if recipe.rotate else sizes.float_bytes
        sent += columns * ((sizes.across - 1) / sizes.across + (sizes.along - 1) / sizes.along)
        sent += 4 * each * (sizes.across - 1) + 4 * each * sizes.across * (sizes.along - 1)
    apart = apart_maxima(recipe, sizes.q, sizes.k, sizes.v)
    return sent + (_reduced(sizes, 4 * apart) if apart else 0)


def apart_maxima(recipe: Recipe, q: Sequence[int], k: Sequence[int], v: Sequence[int]) -> int:
    """How many maxima of Q, K and V need an all-reduce of their own: none where they fit beside the fingerprint and are
    known before it."""
    counts = []
    for name, shape, scale in zip("qkv", (q, k, v), recipe.scales, strict=True):
        of = {"tensor": 1, "head": shape[0] * shape[1], "channel": shape[0] * shape[1] * shape[3]}
        counts.append(0 if scale is not None else of.get(getattr(recipe, name), 0))
    changes = recipe.smooth_k or recipe.rotate
    return sum(counts) if changes or sum(counts) > FINGERPRINT - STAMP else 0


def _reduced(sizes: Sizes, nbytes: float) -> float:
    """An all-reduce in each group of the grid."""
    return sum(2 * nbytes * (size - 1) / size for size in (sizes.across, sizes.along))


def _gathered(sizes: Sizes, part: float) -> float:
    """An all-gather of a part among all ranks."""
    return part * (sizes.along - 1) + part * sizes.along * (sizes.across - 1)


def bytes_sent(
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    v_shape: Sequence[int] | None = None,
    *,
    ranks: int | tuple[int, int],
    scheme: str = "gather",
    out_dtype: torch.dtype = torch.float16,
    return_lse: bool = False,
) -> float:
    """The bytes of Q, K, V and output that each rank sends in one call of `intflash.distributed.attention`.

    Args:
        q_shape, k_shape, v_shape: the whole shapes ``[B, Hq, Nq, D]``, ``[B, Hk, Nk, D]``, ``[B, Hk, Nk, Dv]``, by
            default v's as k's.
        ranks: the number of ranks, or of a grid (gather, ulysses).
        scheme: "gather", "ulysses" or "merge"; a grid has none.
        out_dtype, return_lse: as for `attention`.

    Returns:
        Bytes, without the few of the fingerprint and the shared scales, as ring algorithms send them. Of shards that
        are not even, each message has the length of the longest.

    Raises:
        InputError: an unknown scheme, or fewer tokens than ranks.

    Example:
        >>> from intflash.distributed import bytes_sent
        >>> shape = (1, 12, 32760, 128)
        >>> bytes_sent(shape, shape, ranks=2), bytes_sent(shape, shape, ranks=2, scheme="ulysses")
        (50325504.0, 62902272.0)
    """
    if scheme not in SCHEMES:
        raise InputError(f"scheme must be one of {SCHEMES}, got {scheme!r}")
    across, along = ranks if isinstance(ranks, tuple) else (1, ranks) if scheme == "ulysses" else (ranks, 1)
    sizes = Sizes(
        q_shape, k_shape, k_shape if v_shape is None else v_shape, across, along, out_dtype=out_dtype,
        return_lse=return_lse,
    )  # fmt: skip
    return float(data_bytes(sizes, scheme))
