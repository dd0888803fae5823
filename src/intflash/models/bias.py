"""Integer codes of the float biases and masks that patched layers are given, computed once for each of them.

Layers of one forward often share a bias (T5), and a model may be given the same mask in every forward.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from intflash.backends.bias import bias_codes
from intflash.methods import METHODS
from intflash.numerics.exp import BIAS_DTYPES, BIAS_FRACTION_BITS

# bias -> (its version counter and its GPU's stream when it was quantized, its codes), as long as the bias exists
_CODES = WeakTensorKeyDictionary()


@functools.cache
def takes_codes(method: str) -> bool:
    """Whether a method quantizes a float bias as `quantize_bias` does, so that these codes can stand for it.

    "auto" may be a method with another unit, whose range is larger.
    """
    return method in METHODS and METHODS[method].bias_fraction_bits == BIAS_FRACTION_BITS


def codes_of(bias: Tensor) -> Tensor:
    """Returns ``quantize_bias(bias)``, the same tensor as long as the same bias comes unchanged.

    It returns `bias` itself where a change of it could not be seen (inference tensors have no version counter, and a
    compiled function or a CUDA graph runs again without this code), and where it is no plain float tensor.
    """
    if torch.compiler.is_compiling() or type(bias) is not Tensor or bias.dtype not in BIAS_DTYPES:
        return bias
    if bias.is_inference() or bias.requires_grad or bias.device.type not in ("cpu", "cuda"):
        return bias
    if bias.is_cuda and torch.cuda.is_current_stream_capturing():
        return bias
    stream = torch.cuda.current_stream(bias.device).cuda_stream if bias.is_cuda else None
    when = bias._version, stream
    known = _CODES.get(bias)
    if known is None or known[0] != when:
        known = when, bias_codes(bias)
        _CODES[bias] = known
    return known[1]


def with_codes(attn_mask: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Returns the arguments `attn_mask` and `bias` of `intflash.attention` with a float one as codes."""
    if bias is not None:
        return attn_mask, codes_of(bias)
    codes = attn_mask if attn_mask is None or attn_mask.dtype == torch.bool else codes_of(attn_mask)
    return (attn_mask, None) if codes is attn_mask else (None, codes)
