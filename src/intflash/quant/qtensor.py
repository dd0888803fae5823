"""A quantized tensor: integer codes with their scale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor

from intflash.dense import check_dense
from intflash.errors import InputError

GRANULARITIES = ("tensor", "head", "token", "block", "channel")
LARGEST_BLOCK = (1 << 31) - 1
FLOAT32_MAX = torch.finfo(torch.float32).max
_SCALE_DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip


def check_scale_tensor(scale: Tensor, name: str) -> None:
    """A dense tensor of real numbers."""
    check_dense(scale, name)
    if scale.dtype not in _SCALE_DTYPES:
        raise InputError(f"{name} must be of real numbers, such as float32, got {scale.dtype}")


def check_block_size(size: object, name: str) -> None:
    if not (isinstance(size, (int, torch.SymInt)) and size >= 1):
        raise InputError(f"{name} must be an integer of at least 1, got {size!r}")
    if size > LARGEST_BLOCK:
        raise InputError(f"{name} must be an integer below 2^31, got {size!r}")


def _shown(number: Real) -> str:
    """Returns the text of a number that may have hundreds of digits."""
    text = str(number)
    return text if len(text) <= 24 else f"{text[:8]}... of {len(text)} digits"


def shaped_scale(scale: Tensor, data_shape: tuple[int, ...], granularity: str, block_size: int | None) -> Tensor:
    """The scale of codes ``[B, H, N, D]`` with the four axes that its granularity has.

    Raises:
        InputError: its shape does not fit.
    """
    b, h = data_shape[:2]
    if granularity == "tensor" and scale.numel() == 1:
        return scale.reshape(1, 1, 1, 1)
    if granularity == "head" and scale.shape in ((h,), (b, h)):
        scale = scale.reshape(-1, h, 1, 1)
    want = _scale_shape(data_shape, granularity, block_size)
    if scale.ndim != 4 or scale.shape[0] not in (1, b) or tuple(scale.shape[1:]) != want:
        first = "1" if b == 1 else f"1 or {b}"
        raise InputError(
            f"a {granularity!r} scale of data {tuple(data_shape)} must have shape "
            f"[{first}, {', '.join(map(str, want))}], got {tuple(scale.shape)}"
        )
    return scale


def _scale_shape(data_shape: tuple[int, ...], granularity: str, block_size: int | None) -> tuple[int, int, int]:
    """The axes of a scale after the first."""
    _, h, n, d = data_shape
    blocks = -(-n // block_size) if block_size else 0
    tail = {"tensor": (1, 1), "head": (1, 1), "token": (n, 1), "block": (blocks, 1), "channel": (1, d)}
    return (1 if granularity == "tensor" else h, *tail[granularity])


@dataclass(frozen=True)
class QTensor:
    """Symmetric integer codes and their scale: value = data * scale.

    Args:
        data: int8 codes in [-127, 127] (int16 for 16-bit outputs), shape ``[B, H, N, D]``.
        scale: a number, or a float32 tensor; kept as float32, 4-D and broadcast-shaped:
            tensor ``[1, 1, 1, 1]``, head ``[B|1, H, 1, 1]`` (given as that, ``[H]`` or ``[B, H]``),
            token ``[B|1, H, N, 1]``, block ``[B|1, H, ceil(N / block_size), 1]``, channel ``[B|1, H, 1, D]``.
        granularity: which of these.
        block_size: tokens that share a scale, for "block" only.
        bits: 8, or 4 (codes in [-7, 7] held in int8), or 16.

    Raises:
        InputError: a dtype, shape or granularity does not fit.

    Example:
        >>> import torch
        >>> from intflash import QTensor
        >>> x = QTensor(torch.ones(1, 2, 3, 4, dtype=torch.int8), 0.5)
        >>> x.scale.shape, x.dequantize().sum().item()
        (torch.Size([1, 1, 1, 1]), 12.0)
    """

    data: Tensor
    scale: Tensor
    granularity: str = "tensor"
    block_size: int | None = None
    bits: int = 8

    def __post_init__(self) -> None:
        if not isinstance(self.data, Tensor) or self.data.dtype not in (torch.int8, torch.int16):
            got = self.data.dtype if isinstance(self.data, Tensor) else type(self.data).__name__
            raise InputError(f"QTensor data must be an int8 or int16 tensor, got {got}")
        check_dense(self.data, "QTensor data")
        if self.data.ndim != 4:
            raise InputError(f"QTensor data must be [B, H, N, D], got shape {tuple(self.data.shape)}")
        if self.granularity not in GRANULARITIES:
            raise InputError(f"granularity must be one of {GRANULARITIES}, got {self.granularity!r}")
        if not isinstance(self.bits, Integral) or self.bits not in (4, 8, 16):
            raise InputError(f"bits must be 4, 8 or 16, got {self.bits!r}")
        if self.bits == 16 and self.data.dtype == torch.int8:
            raise InputError("QTensor data of 16 bits must be int16, got torch.int8")
        if (self.block_size is not None) != (self.granularity == "block"):
            raise InputError(f"block_size goes with granularity 'block', got {self.granularity!r}, {self.block_size}")
        if self.block_size is not None:
            check_block_size(self.block_size, "block_size")
        scale = self.scale
        if isinstance(scale, Tensor):
            check_scale_tensor(scale, "a QTensor's scale")
            if scale.is_meta and not self.data.is_meta:
                raise InputError("a QTensor's scale must have values, got a tensor on device meta")
        elif not isinstance(scale, (Real, torch.SymFloat)):
            raise InputError(f"a QTensor's scale must be a number or a tensor, got {type(scale).__name__}")
        elif isinstance(scale, Real) and FLOAT32_MAX < abs(scale) < math.inf:
            raise InputError(f"a QTensor's scale must be a float32, at most {FLOAT32_MAX:.6g}, got {_shown(scale)}")
        object.__setattr__(self, "scale", self._normal_scale())

    def _normal_scale(self) -> Tensor:
        if not isinstance(self.scale, Tensor):  # a fill, not a copy from the host: fits a CUDA graph
            want = _scale_shape(self.data.shape, self.granularity, self.block_size)
            return torch.full((1, *want), float(self.scale), dtype=torch.float32, device=self.data.device)
        scale = shaped_scale(self.scale, self.data.shape, self.granularity, self.block_size)
        return scale.to(dtype=torch.float32, device=self.data.device)

    @classmethod
    def unchecked(cls, data: Tensor, scale: Tensor, granularity: str, bits: int) -> QTensor:
        """Returns a QTensor of codes and a scale that the library itself has made, in a tenth of the time of the
        checks.
        """
        if torch.compiler.is_compiling():  # not every torch traces __new__ of a frozen class
            return cls(data, scale, granularity, None, bits)
        x = cls.__new__(cls)
        x.__dict__.update(data=data, scale=scale, granularity=granularity, block_size=None, bits=bits)
        return x

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """Refuses functions of torch. A mode that redirects one to `attention`, as `patch` does, comes before."""
        raise InputError(f"{func.__name__} of torch takes tensors, got a QTensor: its dequantize() returns one")

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def device(self) -> torch.device:
        return self.data.device

    def token_scale(self) -> Tensor:
        """The scale with its block axis expanded to tokens: ``[B|1, H|1, N|1, 1|D]``."""
        if self.granularity != "block":
            return self.scale
        n = self.data.shape[2]
        return self.scale.repeat_interleave(min(self.block_size, n), dim=2)[:, :, :n]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """data * scale in float32, then `dtype`; shape ``[B, H, N, D]``."""
        return (self.data.float() * self.token_scale()).to(dtype)
