"""The integer codes of an additive mask, on a GPU by one kernel where it can be compiled."""

from __future__ import annotations

from torch import Tensor

from intflash.backends.cuda import BACKEND
from intflash.numerics import exp


def bias_codes(bias: Tensor, fraction_bits: int = exp.BIAS_FRACTION_BITS) -> Tensor:
    """`numerics.exp.bias_codes` of a tensor with values. An axis of stride 0 stays one."""
    if not bias.is_cuda or bias.numel() == 0 or BACKEND.unavailable() is not None:
        return exp.bias_codes(bias, fraction_bits)
    from intflash.backends.cuda.bias import bias_codes_launch

    once = bias[tuple(slice(1) if stride == 0 else slice(None) for stride in bias.stride())]
    launch, codes = bias_codes_launch(once.contiguous(), fraction_bits)
    launch.run()
    return codes.expand(bias.shape)
