"""The launch constants: where the score and output constants are stored, and from which scales they are computed.

A pair of 32-bit constants is packed in one int64 (high << 32 | low). Each backend has its own kernel that computes
them, following `numerics.exp.exponent_constants` and `output_multiplier` operation by operation.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from intflash.backends.gpu.tensors import View, view
from intflash.numerics import exp
from intflash.numerics.groups import MAX_GAP
from intflash.problem import Problem

WORD_KEYS = 128  # keys of the four words that tell which have no value


class Constants(NamedTuple):
    """What the attention kernels read: packed score and output constants, or s_V for float output."""

    score: View | None  # int64 [B|1, Hq|1, Nq|1, key blocks|1]: k << 32 | C; None where the kernel computes them
    output: View | None  # int64 [B|1, Hq|1, 1, Dv|1]: e << 32 | Mr; None for float output
    v_scale: View | None  # float32 [B|1, Hk|1, 1, Dv|1]; None for integer output
    # int32 [B, Hk, 1, words] for `intflash_bfp`: bit i of word j is set where all codes of key 32 j + i's value are 0
    valueless: View | None = None


class Shape(NamedTuple):
    b: int
    h: int
    n: int
    d: int


class ConstantBuffers(NamedTuple):
    """The tensors that a constants kernel reads and writes.

    Attributes:
        q_scale, k_scale, v_scale: float32, 4-D; Q's block axis is expanded to tokens.
        given: the caller's output scale, or None for the default and for float output.
        score, output: int64, uninitialized, the tensors of `Constants`; output is None for float output.
        out_scale: float32, the output's scale: the caller's, or uninitialized for the default; None for float output.
        qmax: the largest code of the output; 0 for float output.
    """

    q_scale: Tensor
    k_scale: Tensor
    v_scale: Tensor
    given: Tensor | None
    score: Tensor
    output: Tensor | None
    out_scale: Tensor | None
    qmax: int

    @property
    def constants(self) -> Constants:
        """What the attention kernel reads once the buffers are filled."""
        output = None if self.output is None else view(self.output)
        return Constants(view(self.score), output, None if self.qmax else view(self.v_scale))

    @property
    def score_shape(self) -> Shape:
        return Shape(*self.score.shape)

    @property
    def output_shape(self) -> Shape:
        return Shape(1, 1, 1, 1) if self.output is None else Shape(*self.output.shape)

    @property
    def counts(self) -> tuple[int, int]:
        """The number of score constants and of output constants."""
        return self.score.numel(), 0 if self.output is None else self.output.numel()


def constant_buffers(problem: Problem, scales: tuple[Tensor, Tensor, Tensor] | None = None) -> ConstantBuffers:
    """Returns the buffers of a problem's constants.

    `scales`: of Q (its block axis expanded to tokens), K and V where the problem's tensors are floats.
    """
    device, qmax = problem.q.device, output_limit(problem.out_dtype)
    heads = problem.q.shape[1]
    if scales is None:
        scales = problem.q.token_scale(), problem.k.scale, problem.v.scale
    q_scale, k_scale, v_scale = scales
    per_head = [s[:1] + (heads if s[1] > 1 else 1,) + s[2:] for s in (k_scale.shape, v_scale.shape)]
    score_shape = torch.broadcast_shapes(q_scale.shape, (*per_head[0][:2], 1, per_head[0][2]))
    score = torch.empty(score_shape, dtype=torch.int64, device=device)
    if not qmax:
        return ConstantBuffers(q_scale, k_scale, v_scale, None, score, None, None, 0)
    given = problem.out_scale
    output_shape = torch.broadcast_shapes(per_head[1], (1, 1, 1, 1) if given is None else given.shape)
    output = torch.empty(output_shape, dtype=torch.int64, device=device)
    out_scale = torch.empty(output_shape, dtype=torch.float32, device=device) if given is None else given
    return ConstantBuffers(q_scale, k_scale, v_scale, given, score, output, out_scale, qmax)


def score_unit(method: str) -> exp.ScoreUnit:
    """Returns the unit in which T of a method counts."""
    return exp.TABLE_STEPS if method == "intflash_online" else exp.OCTAVES


def most_output_exponent(method: str) -> int:
    """Returns where the exponent of s_V / s_O saturates: below, a kernel of `intflash_bfp` has a row's own bound."""
    return exp.OUTPUT_EXPONENTS[1] + (MAX_GAP if method == "intflash_bfp" else 0)


def empty_valueless(v: Tensor, sequences: int = 0) -> Tensor:
    """Returns the uninitialized words of `Constants.valueless` for values [B, Hk, Nk, D].

    sequences: how many packed ones have tiles of their own; 0 where tiles are counted from the first key.
    """
    batch, heads, keys, _ = v.shape
    tiles = keys // WORD_KEYS + sequences if sequences else -(-keys // WORD_KEYS)
    return torch.empty(batch, heads, 1, tiles * (WORD_KEYS // 32), dtype=torch.int32, device=v.device)


def float_bits(x: float) -> int:
    """Returns the bits of a float64 as an integer, because Triton would round a float argument to float32."""
    return struct.unpack("<q", struct.pack("<d", x))[0]


def output_limit(dtype: torch.dtype) -> int:
    """Returns the largest code of an integer output, and 0 for float output."""
    return {torch.int8: 127, torch.int16: 32767}.get(dtype, 0)
