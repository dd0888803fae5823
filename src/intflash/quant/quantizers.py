"""Symmetric quantizers: the one definition of codes and scales that every backend reproduces.

Rule "exact" (ours): ``s = float32(amax) / 127``, ``inv = float32(1) / s`` and the code is the exact
product ``x * inv`` rounded once, half to even, then clamped. Rule "divide" (the papers'): the float32
quotient ``x / s`` rounded half to even. An amax below 2^-100 counts as 0: scale 1, codes 0.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor

from intflash.dense import check_dense
from intflash.errors import InputError
from intflash.quant.qtensor import (
    FLOAT32_MAX,
    GRANULARITIES,
    QTensor,
    _shown,
    check_block_size,
    check_scale_tensor,
)

LEAST_FLOAT = 2.0**-149  # the smallest float32
LEAST_SCALE = 2.0**-126  # the reciprocal, by which floats are quantized, is finite from here on
TINY_AMAX = 2.0**-100
RULES = ("exact", "divide")
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Recipe:
    """How float Q, K and V become integer codes. Where K and V are codes already, only what it says of Q counts.

    Args:
        q, k, v: granularity of each: "tensor", "head", "token", "block", "channel",
            or "none" for a method that keeps it in floating point. Default: "head", one scale for each head of each
            image, so that images do not depend on each other; "tensor" where the static scale is one value.
        bits: 8, or 4 (codes in [-7, 7] held in int8).
        block_size: tokens per scale where a granularity is "block".
        q_scale, k_scale, v_scale: static scales (a float or a tensor of `QTensor`'s scale shape);
            None takes the absolute maximum of the call's own tensor.
        smooth_k: subtract K's mean over tokens first (softmax does not change by it).
        rotate: rotate Q and K by a Hadamard matrix first (their product does not change by it);
            uses the largest power of two that divides head_dim.
        rule: how a float is divided by the scale, "exact" (ours) or "divide" (the papers'): docs/numerics.md section 1.

    Raises:
        InputError: an option is unknown, a scale that is a number is not finite and > 0, or one that is a tensor is
            empty or not of real numbers.

    Example:
        >>> from intflash import Recipe
        >>> Recipe(q="token", smooth_k=True).v, Recipe(v_scale=0.02).v
        ('head', 'tensor')
    """

    q: str | None = None  # None only until __post_init__
    k: str | None = None
    v: str | None = None
    bits: int = 8
    block_size: int = 128
    q_scale: Tensor | float | None = None
    k_scale: Tensor | float | None = None
    v_scale: Tensor | float | None = None
    smooth_k: bool = False
    rotate: bool = False
    rule: str = "exact"

    def __post_init__(self) -> None:
        for name in ("q", "k", "v"):
            scale = getattr(self, f"{name}_scale")
            check_number(scale, f"Recipe.{name}_scale")
            if isinstance(scale, Real):  # of any library's kind
                object.__setattr__(self, f"{name}_scale", float(scale))
            if getattr(self, name) is None:
                one = scale is not None and (not isinstance(scale, Tensor) or scale.numel() == 1)
                object.__setattr__(self, name, "tensor" if one else "head")
            _check_granularity(getattr(self, name), (*GRANULARITIES, "none"), f"Recipe.{name}")
        for name in ("smooth_k", "rotate"):
            if not isinstance(chosen := getattr(self, name), bool):
                raise InputError(f"Recipe.{name} must be True or False, got {chosen!r}")
        _check_options(self.bits, self.block_size, self.rule, "Recipe.")

    @property
    def scales(self) -> tuple[Tensor | float | None, ...]:
        """The static scales of q, k, v."""
        return self.q_scale, self.k_scale, self.v_scale

    def granularity_of(self, name: str, x: QTensor | Tensor) -> str:
        """The granularity of `x` as tensor `name` ("q", "k" or "v"): of codes their own."""
        return x.granularity if isinstance(x, QTensor) else getattr(self, name)

    def quantize(self, name: str, x: Tensor) -> QTensor | Tensor:
        """Quantize `x` as tensor `name` ("q", "k" or "v") of this recipe; "none" returns it as it is."""
        granularity = getattr(self, name)
        if granularity == "none":
            return x
        return quantize(
            x, granularity, scale=getattr(self, f"{name}_scale"), bits=self.bits, block_size=self.block_size,
            rule=self.rule,
        )  # fmt: skip


def _check_granularity(granularity: str, known: tuple[str, ...], name: str) -> None:
    if granularity not in known:
        raise InputError(f"{name} must be one of {known}, got {granularity!r}")


def _check_options(bits: int, block_size: int, rule: str, of: str = "") -> None:
    if not isinstance(bits, Integral) or bits not in (4, 8):
        raise InputError(f"{of}bits must be 4 or 8, got {bits!r}")
    check_block_size(block_size, f"{of}block_size")
    if rule not in RULES:
        raise InputError(f"{of}rule must be one of {RULES}, got {rule!r}")


def check_number(scale: Tensor | float | None, name: str) -> None:
    """A scale is a tensor of real numbers, or a number that is a normal float32: finite and > 0, as its reciprocal is
    then."""
    if isinstance(scale, Tensor):
        check_scale_tensor(scale, name)
        if scale.numel() == 0:
            raise InputError(f"{name} must not be empty, got shape {list(scale.shape)}")
    if scale is None or isinstance(scale, (Tensor, torch.SymFloat)):
        return
    if not isinstance(scale, Real):
        raise InputError(f"{name} must be a number or a tensor, got {type(scale).__name__}")
    if not LEAST_SCALE <= scale <= FLOAT32_MAX:
        raise InputError(f"{name} must be finite and > 0, got {_shown(scale)} (as a normal float32)")


def quantize(
    x: Tensor,
    granularity: str = "tensor",
    *,
    scale: Tensor | float | None = None,
    bits: int = 8,
    block_size: int = 128,
    rule: str = "exact",
) -> QTensor:
    """Quantize a float tensor ``[B, H, N, D]`` to symmetric integer codes, without waiting for the device.

    Args:
        x: float32, float16 or bfloat16; not changed.
        granularity: "tensor", "head", "token", "block" or "channel".
        scale: a static scale (values past its range saturate); None takes the absolute maximum.
        bits: 8 or 4.
        block_size: tokens per scale for "block".
        rule: "exact" (ours) or "divide" (the papers'): docs/numerics.md section 1.

    Returns:
        Codes ``[B, H, N, D]`` in int8 with their float32 scale.

    Raises:
        InputError: x is no float tensor of four axes, an option is unknown, or a scale does not fit.

    Example:
        >>> import torch, intflash
        >>> q = intflash.quantize(torch.tensor([[[[1.0, -0.5]]]]))
        >>> q.data.tolist(), round(q.scale.item(), 5)
        ([[[[127, -64]]]], 0.00787)
    """
    _check_granularity(granularity, GRANULARITIES, "granularity")
    _check_options(bits, block_size, rule)
    if isinstance(x, Tensor):
        check_dense(x, "x")
    if not isinstance(x, Tensor) or x.dtype not in FLOAT_DTYPES or x.ndim != 4 or 0 in x.shape:
        got = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise InputError(f"quantize takes [B, H, N, D] of {FLOAT_DTYPES}, none of them 0, got {got}")
    check_number(scale, "scale")
    xf = _as_float32(x.detach())
    block = block_size if granularity == "block" else None
    if scale is None:
        scale = scale_of_maximum(absolute_maximum(xf, granularity, block_size), bits)
    holder = QTensor(torch.empty_like(xf, dtype=torch.int8), scale, granularity, block, bits)  # checks the scale
    return QTensor(codes_of(xf, holder.token_scale(), bits, rule), holder.scale, granularity, block, bits)


def _as_float32(x: Tensor) -> Tensor:
    """x in float32, with the sign of each NaN: torch's conversion of float16 on a CPU drops some."""
    xf = x.float()
    if x.dtype != torch.float16 or not x.is_cpu:
        return xf
    nan = xf.new_full((), math.nan)
    return torch.where(x.isnan(), torch.where(x.view(torch.int16) < 0, -nan, nan), xf)


def scale_of_maximum(amax: Tensor, bits: int) -> Tensor:
    """The dynamic scale of float32 absolute maxima."""
    # docs/numerics.md, "Unchecked calls": without a finite maximum there is no scale, as without values
    amax = amax.nan_to_num(nan=0.0, posinf=0.0)
    scale = divided(amax, (1 << (bits - 1)) - 1)
    return torch.where(amax < TINY_AMAX, 1.0, scale)  # 1: every code is 0


def divided(x: Tensor, by: float) -> Tensor:
    """x / by of floats, rounded once on every device: CUDA multiplies by the reciprocal of a Python number."""
    return x / torch.full_like(x, by)


def codes_of(x: Tensor, scale: Tensor, bits: int, rule: str) -> Tensor:
    """The int8 codes of float32 x at a float32 scale that broadcasts to it."""
    qmax = (1 << (bits - 1)) - 1
    if rule == "divide":
        codes = torch.round(x / scale)
    else:  # 24 x 24 bit product: exact in float64, so this is one rounding
        codes = torch.round(x.double() * (1.0 / scale).double())
    codes = codes.clamp(-qmax, qmax)
    if x.device.type == "cpu":  # the code of a converted NaN depends on the processor
        codes = torch.where(codes.isnan(), torch.copysign(torch.full_like(codes, qmax), x), codes)
    return codes.to(torch.int8)


def absolute_maximum(x: Tensor, granularity: str, block_size: int) -> Tensor:
    """max|x| of each group that shares a scale, in the shape of that scale."""
    if granularity == "tensor":  # in one pass over memory
        least, most = torch.aminmax(x)
        return torch.maximum(least.abs(), most.abs()).reshape(1, 1, 1, 1)
    magnitude = x.abs()
    if granularity == "head":
        return magnitude.amax(dim=(2, 3), keepdim=True)
    if granularity == "token":
        return magnitude.amax(dim=3, keepdim=True)
    if granularity == "channel":
        return magnitude.amax(dim=2, keepdim=True)
    n = x.shape[2]
    size = min(block_size, n)
    padded = torch.nn.functional.pad(magnitude.amax(dim=3), (0, -n % size))
    return padded.unflatten(2, (-1, size)).amax(dim=3)[..., None]


def key_mean(k: Tensor) -> Tensor:
    """Mean of K over its tokens, float32 ``[B, H, 1, D]``, summed in one fixed order on every device.

    The order (docs/numerics.md section 1) is a balanced tree over the tokens padded with zeros to a power of two, in
    elementwise float32 additions, so that the bits do not depend on a device's reduction.
    """
    n = k.shape[2]
    total = torch.nn.functional.pad(k.float(), (0, 0, 0, (1 << (n - 1).bit_length()) - n))
    while total.shape[2] > 1:
        half = total.shape[2] // 2
        total = total[:, :, :half] + total[:, :, half:]
    return total / torch.full_like(total, n)  # a tensor: CUDA multiplies by a Python number's reciprocal


def hadamard_rotate(x: Tensor) -> Tensor:
    """x times an orthonormal Hadamard matrix over head_dim, float32, in one fixed order of additions.

    A head_dim that is no power of two is rotated in equal blocks of the largest power of two that
    divides it; an odd one cannot be rotated.

    Raises:
        InputError: head_dim is odd.
    """
    d = x.shape[-1]
    size = d & -d
    if size == 1:
        raise InputError(f"Hadamard rotation needs an even head_dim, got {d}")
    y = x.float().unflatten(-1, (d // size, size))
    step = 1
    while step < size:
        y = y.unflatten(-1, (size // (2 * step), 2, step))
        a, b = y[..., 0, :], y[..., 1, :]
        y = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        step *= 2
    return (y * ctypes.c_float(1.0 / math.sqrt(size)).value).flatten(-2)
