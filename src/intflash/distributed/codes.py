"""One quantization for all ranks: the scales, K's mean and the codes that one process would find in whole tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch import Tensor

from intflash.backends.gpu.scales import Qkv, dynamic_scales
from intflash.distributed.groups import Ranks
from intflash.distributed.shards import Shards
from intflash.quant import QTensor, Recipe, key_mean
from intflash.quant.quantizers import codes_of


@dataclass(frozen=True)
class Operand:
    """Q, K or V of this rank with the scale that all ranks share.

    Attributes:
        x: int8 codes, or floats that are quantized as they are written to a message.
        scale: float32, as `QTensor.scale`; of "token" and "block" this rank's part.
        granularity, block_size, bits: as of `QTensor`.
        rule: of the codes to be made.
    """

    x: Tensor
    scale: Tensor
    granularity: str
    block_size: int | None
    bits: int
    rule: str = "exact"

    @classmethod
    def of_codes(cls, x: QTensor) -> Operand:
        return cls(x.data, x.scale, x.granularity, x.block_size, x.bits)

    @classmethod
    def of_floats(cls, x: Tensor, name: str, recipe: Recipe, dynamic: Tensor | None) -> Operand:
        """With the recipe's static scale, or the `dynamic` one of all ranks, float32."""
        granularity, static = getattr(recipe, name), getattr(recipe, f"{name}_scale")
        scale = dynamic if static is None else static
        block = recipe.block_size if granularity == "block" else None
        holder = QTensor(torch.empty_like(x, dtype=torch.int8), scale, granularity, block, recipe.bits)
        return cls(x, holder.scale, granularity, block, recipe.bits, recipe.rule)

    @property
    def can_stay_float(self) -> bool:
        """Whether a call of attention beside codes of K and V makes the same codes of it."""
        known = self.bits == 8 and self.rule == "exact" and self.granularity in ("tensor", "head")
        return known and self.x.is_floating_point()

    def by_token(self) -> Operand:
        """With a scale for each token where blocks of them have one: the same numbers, which can be cut anywhere."""
        if self.granularity != "block":
            return self
        return replace(self, scale=self._token_scale(), granularity="token", block_size=None)

    def _token_scale(self) -> Tensor:
        if self.granularity != "block":
            return self.scale
        return self.tensor(torch.empty_like(self.x, dtype=torch.int8)).token_scale()

    def heads(self, heads: slice) -> Operand:
        scale = self.scale if self.scale.shape[1] == 1 else self.scale[:, heads]
        return replace(self, x=self.x[:, heads], scale=scale)

    def write(self, out: Tensor, padding: int = 1) -> Tensor:
        """The codes into `out` ``[B, H, n, D]``, int8 of any strides, with room behind the last token up to a multiple
        of `padding`, which may be overwritten."""
        if self.x.dtype == torch.int8:
            return out.copy_(self.x)
        scale = self._token_scale()
        kernels = _kernels() if self.x.is_cuda and self.rule == "exact" and self.bits == 8 else None
        if kernels is None:
            return out.copy_(codes_of(self.x.float(), scale, self.bits, self.rule))
        kernels.codes_launch(self.x, scale, out, padding).run()
        return out

    def codes(self) -> Tensor:
        """The codes of this rank ``[B, H, n, D]``."""
        return self.x if self.x.dtype == torch.int8 else self.write(torch.empty_like(self.x, dtype=torch.int8))

    def tensor(self, codes: Tensor, scale: Tensor | None = None) -> QTensor:
        """Codes, of other tokens too, with this scale or another of its kind."""
        return QTensor(codes, self.scale if scale is None else scale, self.granularity, self.block_size, self.bits)


def _kernels() -> ModuleType | None:
    """Triton's kernels, which make codes in one pass over memory; None where Triton is not installed."""
    try:
        from intflash.backends.triton import quantize
    except ImportError:
        return None
    return quantize


def fused_maxima(q: Tensor, k: Tensor, v: Tensor, recipe: Recipe) -> Tensor | None:
    """The maxima of the scales of Q, K and V, in this order, as `bits_of`, by one launch; None without a kernel."""
    kernels = _kernels() if q.is_cuda else None
    kinds = {recipe.q, recipe.k, recipe.v}
    if kernels is None or not kinds <= {"tensor", "head"} or any(s is not None for s in recipe.scales):
        return None
    found = dynamic_scales(Qkv(q, k, v), recipe)
    kernels.amax_launch(Qkv(q, k, v), found).run()
    return found.amax


def bits_of(amax: Tensor) -> Tensor:
    """A maximum >= 0 as its float32's bits, int32, which order as it does; NaN as infinity, whose scale is 1 too."""
    return amax.float().nan_to_num(nan=torch.inf, posinf=torch.inf).view(torch.int32)


def shared_mean(k: Tensor, ranks: Ranks, shards: Shards) -> Tensor:
    """`key_mean` of K on all ranks, float32 ``[B, H, 1, D]``, with its bits.

    The mean is a sum in one fixed order over all tokens of a channel. So each rank gets some of the channels of all
    tokens, (R - 1) / R of K's own bytes, and sums them as one process does.
    """
    if ranks.size == 1:
        return key_mean(k)
    b, h, n, d = k.shape
    each = -(-b * h * d // ranks.size)  # channels of a rank
    columns = k.new_zeros(each * ranks.size, shards.longest)
    columns[: b * h * d, :n].unflatten(0, (b, h, d)).copy_(k.mT)
    across, along = ranks.across.size, ranks.along.size
    columns = ranks.along.exchange(columns.view(along, across * each, -1))  # [along, across * each, longest]
    columns = columns.unflatten(1, (across, each)).transpose(0, 1).contiguous()
    columns = ranks.across.exchange(columns).flatten(0, 1)  # [ranks, each, longest]
    whole = shards.collect(columns[:, None, :, :, None], k.new_empty(1, each, shards.tokens, 1))
    mean = ranks.along.gather(ranks.across.gather(key_mean(whole).flatten()))
    return mean.flatten()[: b * h * d].view(b, h, 1, d)
