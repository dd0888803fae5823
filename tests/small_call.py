"""One small call of `attention`, with options that tests change."""

import intflash
from oracle import randn

Q, K, V = randn(2, 4, 20, 16)


def attend(**changes):
    options = dict(q=Q, k=K, v=V) | changes
    return intflash.attention(options.pop("q"), options.pop("k"), options.pop("v"), **options)


def codes(granularity="tensor", **changes):
    return {n: intflash.quantize(x, granularity) for n, x in (("q", Q), ("k", K), ("v", V))} | changes
