"""The integer reciprocal square root of LayerNorm: a table of 192 entries and two Newton steps (docs/numerics.md,
section 4).

For n in [2^30, 2^32) the table gives 2^46 / sqrt(n) to 2^-8; each step squares the error.
"""

from __future__ import annotations

import math

TABLE_BITS = 24  # of n that the table does not see
TABLE = tuple(round((1 << 46) / math.sqrt((i + 64.5) * (1 << TABLE_BITS))) for i in range(192))
LARGEST = (1 << 31) - 1


def newton_step(root, n):
    """One step towards 2^46 / sqrt(n), of integers or of an int64 array: root < 2^31 + 2^24, n < 2^32."""
    u = (((root * root) >> 32) * n) >> 32  # 2^28 at the root
    return (root * ((3 << 28) - u)) >> 29


def rsqrt(n: int) -> int:
    """2^46 / sqrt(n) to 2^-27 for n in [2^30, 2^32): in [2^30, 2^31).

    >>> rsqrt(1 << 30), rsqrt((1 << 32) - 1)
    (2147483647, 1073741826)
    """
    root = TABLE[(n >> TABLE_BITS) - 64]
    return min(newton_step(newton_step(root, n), n), LARGEST)
