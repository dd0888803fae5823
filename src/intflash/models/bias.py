"""Integer codes of the float biases and masks that patched layers are given, computed once for each of them.

Layers of one forward often share a bias (T5), and a model may be given the same mask in every forward.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from intflash.backends.bias import bias_codes
from intflash.methods import example
from intflash.numerics.exp import ABSENT, BIAS_DTYPES, BIAS_FRACTION_BITS

# bias -> (its version counter, its GPU's stream and the fraction bits when it was quantized, its codes or, where they
# cannot hold it, None), as long as the bias exists
_CODES = WeakTensorKeyDictionary()


@functools.cache
def fraction_bits(method: str) -> int | None:
    """Returns the fraction bits in which a method, or every one that "auto" may be, quantizes a float bias; None where
    it takes floats.
    """
    return example(method).bias_fraction_bits


def exact_codes(bias: Tensor, bits: int) -> Tensor | None:
    """Returns codes in the unit of `quantize_bias` with which a method that quantizes a float bias to so many fraction
    bits computes the same bits as from the floats. None: they are past what these codes hold, +-1419.56.

    With fewer bits than `quantize_bias` has it reads values.
    """
    codes, more = bias_codes(bias, bits), BIAS_FRACTION_BITS - bits
    if more == 0:  # both saturate at the same values
        return codes
    absent = codes == ABSENT
    if bool((codes.masked_fill(absent, 0).abs() >> (31 - more)).any()):
        return None
    return torch.where(absent, codes, codes << more)


def codes_of(bias: Tensor, bits: int) -> Tensor:
    """Returns `exact_codes`, the same tensor as long as the same bias comes unchanged, or `bias` itself.

    It is `bias` itself where codes cannot hold it, where a change of it could not be seen (inference tensors have no
    version counter, and a compiled function or a CUDA graph runs again without this code), where it is no plain float
    tensor, and where its values would be read on a GPU, which waits for the device.
    """
    if torch.compiler.is_compiling() or type(bias) is not Tensor or bias.dtype not in BIAS_DTYPES:
        return bias
    if bias.is_inference() or bias.requires_grad or bias.device.type not in ("cpu", "cuda"):
        return bias
    if bias.is_cuda and (bits != BIAS_FRACTION_BITS or torch.cuda.is_current_stream_capturing()):
        return bias
    stream = torch.cuda.current_stream(bias.device).cuda_stream if bias.is_cuda else None
    when = bias._version, stream, bits
    known = _CODES.get(bias)
    if known is None or known[0] != when:
        known = when, exact_codes(bias, bits)
        _CODES[bias] = known
    return bias if known[1] is None else known[1]


def with_codes(attn_mask: Tensor | None, bias: Tensor | None, bits: int) -> tuple[Tensor | None, Tensor | None]:
    """Returns the arguments `attn_mask` and `bias` of `intflash.attention` with a float one as codes."""
    if bias is not None:
        return attn_mask, codes_of(bias, bits)
    codes = attn_mask if attn_mask is None or attn_mask.dtype == torch.bool else codes_of(attn_mask, bits)
    return (attn_mask, None) if codes is attn_mask else (None, codes)
