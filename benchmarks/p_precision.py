"""How many bits of P a block of keys needs: why P of `intflash_bfp` has two digits everywhere.

P of 8 bits takes one product where P of 16 bits takes two. It is emulated in float64 with exact exponentials, relative
to the largest weight of each block of 128 keys, so that a sink costs only its own block.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

import intflash
from intflash import Recipe
from intflash.bench.accuracy import ceiling
from intflash.bench.experiments import Figure, Row, Setting, untimed
from intflash.bench.measure import exact_attention, sqnr
from intflash.numerics.groups import additions

KEYS, ROWS = 128, 64  # of a tile, for which a kernel decides whether its P has a second digit
LOSS, TILES = "dB below the ceiling", "tiles with two digits, %"
VALUES = {"0": 0.0, "small": 0.03, "as others": 1.0, "outlier": 4.0}  # of a sink, relative to those of other keys


class Digits(NamedTuple):
    """Bits of P; where a row's sum of P in a tile is below `least`, the tile's P has 8 bits more."""

    bits: int = 8
    least: int = 0
    dithers: bool = True


VARIANTS = {
    "8 bits, rounded": Digits(dithers=False),
    "8 bits": Digits(),
    "10 bits": Digits(bits=10),
    "8 bits, 16 below 512": Digits(least=512),
    "8 bits, 16 below 2048": Digits(least=2048),
}


def inputs(n: int, std: float, share: float, value: float, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Makes q, k, v and a bias. Scores have the standard deviation `std`, except those of key 0: the bias gives it the
    share of the mean row.
    """
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 1, rows, 64, generator=g) for rows in (256, n, n))
    q, k, bias = q * std**0.5, k * std**0.5, torch.zeros(1, 1, 1, n)
    if share:
        k[:, :, 0] = 0
        rest = (q @ k[:, :, 1:].mT / 8).logsumexp(-1).mean().item()
        bias[..., 0] = rest + math.log(share / (1 - share))
        v[:, :, 0] *= value
    return q, k, v, bias


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, digits: Digits) -> tuple[Tensor, float]:
    """Returns the output of one head, and the share of tiles whose P has a second digit."""
    codes = [Recipe().quantize(name, x) for name, x in (("q", q), ("k", k), ("v", v))]
    q, k, v = (x.data[0, 0].double() for x in codes)
    unit = math.prod(x.scale.double().item() for x in codes[:2]) / 8
    octaves = (q @ k.mT * unit + bias[0, 0].double()) / math.log(2)
    rows, n = octaves.shape
    has_value = (v != 0).any(1)
    blocks = octaves.masked_fill(~has_value, -math.inf)
    blocks = torch.nn.functional.pad(blocks, (0, -n % KEYS), value=-math.inf).view(rows, -1, KEYS)
    largest = torch.ceil(blocks.amax(-1, keepdim=True)).clamp(min=-1e6)  # a block may have no key with a value
    x = torch.exp2(blocks - largest) * (2**digits.bits - 1)
    count = blocks.shape[1] * KEYS
    added = additions(count).double().view(1, -1, KEYS) / 256 if digits.dithers else 0.5
    p = torch.floor(x + added)
    needs = (p.sum(-1) < digits.least).view(-1, ROWS, p.shape[1]).any(1).repeat_interleave(ROWS, 0)
    p = torch.where(needs[..., None], torch.floor(x * 256 + added) / 256, p)
    weight = torch.exp2(largest - largest.amax(1, keepdim=True))
    values = torch.nn.functional.pad(v, (0, 0, 0, -n % KEYS)).view(-1, KEYS, v.shape[1])
    acc = (torch.einsum("rbk,bkd->rbd", p, values) * weight).sum(1)
    total = (p.sum(-1) * weight[..., 0]).sum(1)
    # keys without a value count in the sum of weights alone, which costs no product
    total += torch.exp2(octaves[:, ~has_value] - largest.amax(1)).sum(1) * (2**digits.bits - 1)
    return (acc / total[:, None] * codes[2].scale.double().item())[None, None], needs.double().mean().item()


def _measure(setting: Setting) -> Iterator[Row]:
    sinks = [(0.0, "0"), *itertools.product((0.1, 0.5, 0.9), VALUES)]
    for n, std in ((1024, 1.0),) if setting.quick else itertools.product((197, 1024, 4096), (0.5, 1.0, 2.0)):
        case = f"N {n}, std {std:g}"
        setting.log(case)
        for name, some in {"no sink": sinks[:1], "sinks": sinks[1:]}.items():
            losses: dict[str, list[float]] = {}
            tiles: dict[str, list[float]] = {}
            for share, value in some:
                q, k, v, bias = inputs(n, std, share, VALUES[value], setting.seed)
                exact = exact_attention(q, k, v, bias=bias)
                best = sqnr(exact, ceiling(q, k, v, None, Recipe(), bias=bias))
                out = intflash.attention(q, k, v, bias=bias, method="intflash_bfp", backend=setting.backend)
                losses.setdefault("intflash_bfp", []).append(best - sqnr(exact, out))
                for series, digits in VARIANTS.items():
                    out, fraction = attend(q, k, v, bias, digits)
                    losses.setdefault(series, []).append(best - sqnr(exact, out))
                    tiles.setdefault(series, []).append(100 * fraction)
            for series, values in losses.items():
                yield Row(series, f"{case}, {name}", LOSS, max(values))
            for series in VARIANTS:
                if VARIANTS[series].least:
                    yield Row(series, f"{case}, {name}", TILES, max(tiles[series]))


EXPERIMENTS = (
    untimed(
        name="p_precision",
        title="P of 8 bits relative to each 128 keys",
        source="docs/numerics.md, section 2",
        measure=_measure,
        figures=(Figure(LOSS),),
        notes="One head, head_dim 64, 256 queries; float64 with exact exponentials, dithered as intflash_bfp unless "
        "rounded. Sinks: the worst of a first key with 10, 50 and 90 % of the weight and a value of 0, small, as "
        "others and larger than others. 'below': a tile of 64 queries and 128 keys in which a row's sum of P is "
        "smaller takes a second digit, and so a second product.",
    ),
)
