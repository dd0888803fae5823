"""The integer codes of an additive mask on a GPU, by csrc/cuda/bias_codes.cu."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from intflash.backends.cuda.program import C_TYPES, CudaLaunch, CudaProgram
from intflash.numerics import exp

_THREADS, _ELEMENTS = 256, 8  # a CTA's, and those of a thread


def bias_codes_launch(bias: Tensor, fraction_bits: int) -> tuple[CudaLaunch, Tensor]:
    """The launch for a contiguous float mask, and the codes that it writes."""
    codes = torch.empty_like(bias, dtype=torch.int32)
    least = torch.finfo(bias.dtype).min / 2
    program = CudaProgram.of(
        "bias_codes.cu", (), "bias_codes", IN=C_TYPES[bias.dtype], FRACTION_BITS=fraction_bits,
        CTA_THREADS=_THREADS, ELEMENTS=_ELEMENTS,
    )  # fmt: skip
    parameters = struct.pack("<QQQdd", bias.data_ptr(), codes.data_ptr(), bias.numel(), least, exp.LOG2_E)
    grid = (-(-bias.numel() // (_THREADS * _ELEMENTS)), 1, 1)
    return CudaLaunch(program, grid, _THREADS, 0, parameters, bias.device, (bias, codes), overlaps=True), codes
