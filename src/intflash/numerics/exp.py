"""The integer exponential 2^x of `intflash` and the constants of its call.

Everything that a scale decides is decided here, once per call, in float64 on the scale's own
device; no value is read back to the host. See docs/numerics.md, "The score exponent".
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from intflash.dense import check_dense
from intflash.errors import InputError

LOG2_E = 1.4426950408889634

# Offset of the exponent: the row maximum lands at 14 octaves + 102/256, where its p16 is 65193
# and its p8 is 255. The low bits round the depth below the maximum to 8 fraction bits, half up:
# (T + K0 - Tmax) >> 24 == 3686 - ((Tmax - T + 2^23) >> 24).
K0 = (14 << 32) + (102 << 24) + (1 << 23) - 1
QUADRATIC_OFFSET = 132608  # m = u*u + 132608 ~ 3.02 * 2^16 * 2^f with u = 256 + 256 f; rms 0.12 %
P16_MAX = 65193  # p of the maximum itself, 16 bits
P8_MAX = 255  # the same, 8 bits
ABSENT = -(1 << 31)  # in an int32 bias: this key is absent

C_MAX = (1 << 31) - (1 << 8)
MAX_OCTAVES_PER_UNIT = 64.0  # with more, every key but the largest has p = 0 anyway
BIAS_FRACTION_BITS = 20  # Q11.20: 2048 octaves
BIAS_LIMIT = (1 << 31) - 1
BIAS_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def bias_bound(fraction_bits: int = BIAS_FRACTION_BITS) -> float:
    """The largest additive mask that an integer bias of so many fraction bits holds: a larger one saturates."""
    return BIAS_LIMIT / (1 << fraction_bits) / LOG2_E


OUTPUT_EXPONENTS = (-7, 29)  # frexp exponents of s_V / s_O
MAX_RATIO = 2.0**128  # of them; a subnormal s_O can be 0 in float32

# P of `intflash_online` has 1,024 entries, 1/112 octave apart. The last 16 are 0.
LAST_STEP = 1023


class ScoreUnit(NamedTuple):
    """The unit in which a method's T counts, in multiples of 2^-32, and how many fraction bits of c are kept in it.

    Attributes:
        sixteenths: units in 16 octaves.
        least_coarse: the c from which 24 fraction bits are kept. T then also fits a 32-bit product in 2^-24 unit.
        fraction_bits: of a smaller c.
    """

    sixteenths: int
    least_coarse: float
    fraction_bits: int

    @property
    def octave(self) -> int:
        """An octave in units of T."""
        return self.sixteenths << 28

    def bias_step(self, fraction_bits: int) -> int:
        """The unit of an integer bias, in octaves of so many fraction bits, in units of T."""
        return self.octave >> fraction_bits


# From `least_coarse` on c has at least 10 (OCTAVES) or 8 significant bits within FEW_FRACTION_BITS.
OCTAVES = ScoreUnit(16, 2.0**-14, 32)  # of `intflash` and `intflash_p8`
TABLE_STEPS = ScoreUnit(7, 2.0**-16, 30)  # of `intflash_online`: 256 steps of its table are one unit
FEW_FRACTION_BITS = 24

# Bounds: 255 * 127 * N < 2^31 and 65,193 * N < 2^32 (l and the digit sums); D * 127^2 < 2^31.
MAX_KEYS = 65_536
MAX_HEAD_DIM = 256


def exponent_constants(
    q_scale: Tensor, k_scale: Tensor, sm_scale: float, unit: ScoreUnit = OCTAVES
) -> tuple[Tensor, Tensor]:
    """The multiplier C and pre-shift k with T = (S << k) * C in 2^-32 of a unit.

    Args:
        q_scale: float32 ``[B|1, H|1, Nq|1, 1]``.
        k_scale: float32 ``[B|1, H|1, 1, key blocks|1]`` (transposed to the score's axes).
        sm_scale: the softmax scale, > 0.
        unit: of the method's T.

    Returns:
        ``(C, k)``, int64 tensors of the broadcast shape; 0 <= C < 2^31, 0 <= k <= 8, and C 2^k a multiple of 2^8
        from c = `unit.least_coarse` on.
    """
    c = ((q_scale.double() * k_scale.double()) * sm_scale) * LOG2_E
    c = c.clamp(max=MAX_OCTAVES_PER_UNIT) * (unit.sixteenths / 16)  # one rounding
    k = torch.frexp(c)[1].to(torch.int64) + 1  # c in [2^(e-1), 2^e), so c / 2^(e+1) < 0.5
    k = torch.where(c < 0.5, torch.zeros_like(k), k)
    zeros = torch.where(c < unit.least_coarse, 32 - unit.fraction_bits, 32 - FEW_FRACTION_BITS)  # bits not kept
    kept = torch.round(c * (torch.ones_like(k) << (32 - zeros)).double()).to(torch.int64)  # half to even
    return (kept << (zeros - k)).clamp(max=C_MAX), k


def scalar_exponent_constants(q_scale: float, k_scale: float, sm_scale: float) -> tuple[int, int]:
    """`exponent_constants` in octaves of one score scale, in Python floats: the same bits without tensors.

    >>> scalar_exponent_constants(0.0315, 0.0315, 0.125)
    (768512, 0)
    """
    c = min(((q_scale * k_scale) * sm_scale) * LOG2_E, MAX_OCTAVES_PER_UNIT)
    k = 0 if c < 0.5 else math.frexp(c)[1] + 1
    zeros = 0 if c < OCTAVES.least_coarse else 32 - FEW_FRACTION_BITS
    return min(round(math.ldexp(c, 32 - zeros)) << (zeros - k), C_MAX), k


def quantize_bias(bias: Tensor) -> Tensor:
    """Turn an additive mask or bias into the integers that the kernels add to the scores, once for many calls.

    Args:
        bias: floating point, of any shape that `attention` broadcasts; not changed. -inf or <= finfo(dtype).min / 2
            makes its key absent. Values are not checked: those past 2048 octaves (1419.56) saturate, which
            `attention` refuses where it reads values, and NaN makes its key absent. `intflash_bfp` holds +-363,408 of a
            float bias, in coarser steps.

    Returns:
        int32 of the same shape in 2^-20 octave, `ABSENT` (-2^31) for absent keys.

    Raises:
        InputError: bias is no floating-point tensor.

    Source: docs/numerics.md section 2.

    Example:
        >>> import torch, intflash
        >>> intflash.quantize_bias(torch.tensor([1.0, float("-inf")])).tolist()
        [1512775, -2147483648]
    """
    if isinstance(bias, Tensor):
        check_dense(bias, "bias")
    if not isinstance(bias, Tensor) or bias.dtype not in BIAS_DTYPES:
        got = bias.dtype if isinstance(bias, Tensor) else type(bias).__name__
        raise InputError(f"quantize_bias takes a floating-point tensor, got {got}")
    return bias_codes(bias)


def bias_codes(bias: Tensor, fraction_bits: int = BIAS_FRACTION_BITS) -> Tensor:
    """A float mask in octaves of so many fraction bits: saturated at +-(2^31 - 1), `ABSENT` for NaN as for -inf."""
    octaves = bias.double() * LOG2_E
    q = torch.round(octaves * (1 << fraction_bits)).clamp(-BIAS_LIMIT, BIAS_LIMIT)
    return q.masked_fill(makes_absent(bias), float(ABSENT)).to(torch.int32)


def makes_absent(bias: Tensor) -> Tensor:
    """Returns which values of a float mask make their key absent: -inf, those to finfo.min / 2, and NaN."""
    return (bias > torch.finfo(bias.dtype).min / 2).logical_not()


def dequantize_bias(bias: Tensor) -> Tensor:
    """The float32 additive mask of an integer one; -inf for `ABSENT`."""
    octaves = bias.double() / (1 << BIAS_FRACTION_BITS)
    return torch.where(bias == ABSENT, float("-inf"), octaves / LOG2_E).float()


def output_multiplier(v_scale: Tensor, out_scale: Tensor, gap: Tensor | int = 0) -> tuple[Tensor, Tensor]:
    """(Mr, e) with s_V / s_O = Mr * 2^(e - 24): Mr int64 in [2^23, 2^24], e the frexp exponent.

    Below e = -7 every output is less than half a step of s_O: Mr is 0. e saturates at [-7, 29 + gap], where the
    epilogue's shift is above 0 for every l, and without a gap below 63.
    """
    f, e = torch.frexp((v_scale.double() / out_scale.double()).clamp(max=MAX_RATIO))
    low, high = OUTPUT_EXPONENTS
    exponent = e.to(torch.int64).clamp(min=low).clamp(max=gap + high)
    return torch.where(e < low, 0, torch.round(f * (1 << 24)).to(torch.int64)), exponent


def log_sum_exp(t_max: Tensor, l: Tensor, p_max: int) -> Tensor:
    """ln(sum exp(score)) from the row maximum (2^-32 octave) and the sum of p; -inf without keys."""
    octaves = t_max.double() / (1 << 32) + torch.log2(l.double()) - math.log2(p_max)
    return torch.where(l > 0, octaves * math.log(2.0), float("-inf")).float()
