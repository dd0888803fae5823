"""The integer codes of an additive mask on a GPU, by csrc/cuda/bias_codes.cu."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from intflash.backends.cuda.program import CudaLaunch, CudaProgram
from intflash.numerics import exp

_C_TYPES = {
    torch.int32: "i32", torch.float16: "half_t", torch.bfloat16: "bfloat_t", torch.float32: "float",
    torch.float64: "double",
}  # fmt: skip
_THREADS, _CTA_ELEMENTS = 256, 2048


def bias_codes_launch(bias: Tensor, fraction_bits: int) -> tuple[CudaLaunch, Tensor]:
    """The launch for a contiguous mask, of floats or int32 from `quantize_bias`, and the codes that it writes."""
    codes = torch.empty_like(bias, dtype=torch.int32)
    least = torch.finfo(bias.dtype).min / 2 if bias.dtype.is_floating_point else 0.0
    program = CudaProgram.of(
        "bias_codes.cu", (), "bias_codes", IN=_C_TYPES[bias.dtype], CODE_BITS=exp.BIAS_FRACTION_BITS,
        FRACTION_BITS=fraction_bits,
    )  # fmt: skip
    parameters = struct.pack("<QQQdd", bias.data_ptr(), codes.data_ptr(), bias.numel(), least, exp.LOG2_E)
    grid = (-(-bias.numel() // _CTA_ELEMENTS), 1, 1)
    return CudaLaunch(program, grid, _THREADS, 0, parameters, bias.device, (bias, codes), overlaps=True), codes
