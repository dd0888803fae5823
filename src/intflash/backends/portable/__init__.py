"""The portable backend, `backend="torch"`: tiled, vectorized torch arithmetic on every device that torch supports.

It has the bits of the reference for every integer method. It is written independently of the reference: the two share
constants and quantizers only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from intflash.backends.base import Backend, Partial
from intflash.backends.features import (
    ANY_GRANULARITY,
    CODES,
    FLOAT_INPUTS,
    FLOAT_OUTPUT,
    FLOAT_QUERY,
    INTEGER_OUTPUT,
    MASKS,
    QUANTIZATION,
)  # fmt: skip
from intflash.backends.portable import float_softmax, intflash, partial_sums, qflash, two_groups, unfused
from intflash.backends.portable.operands import default_out_scale
from intflash.problem import Problem, Result

_KERNELS: dict[str, Callable[[Problem], Result]] = {
    "intflash": partial(intflash.exact_maximum, bits=16),
    "intflash_p8": partial(intflash.exact_maximum, bits=8),
    "intflash_online": intflash.online,
    "intflash_bfp": two_groups.two_groups,
    "qflash": qflash.qflash,
    "iflash": qflash.iflash,
    "ivit": unfused.ivit,
    "ibert": unfused.ibert,
    "fqvit": unfused.fqvit,
    "int_flash_full": float_softmax.int_flash_full,
    "int_flash_half": float_softmax.int_flash_half,
    "lite": float_softmax.lite,
    "qattn": float_softmax.qattn,
    "fp32": partial(float_softmax.rounded, dtype=torch.float32),
    "fp16": partial(float_softmax.rounded, dtype=torch.float16),
    "bf16": partial(float_softmax.rounded, dtype=torch.bfloat16),
    "fp8": partial(float_softmax.fp8, dims=(0, 1, 2, 3)),
    "fp8_head": partial(float_softmax.fp8, dims=(2, 3)),
}

# The default output scale of these methods depends on V's scale alone, by their definition.
_FIXED_SCALE = ("intflash", "intflash_p8", "intflash_online", "intflash_bfp", "qflash", "iflash")


_SERVED = frozenset.union(
    FLOAT_INPUTS, CODES, FLOAT_QUERY, QUANTIZATION, INTEGER_OUTPUT, FLOAT_OUTPUT, MASKS, ANY_GRANULARITY,
    {"out_scale per channel", "grouped heads", "packed sequences", "log-sum-exp", "sliding window"},
)  # fmt: skip


def _run(problem: Problem) -> Result:
    kernel = _KERNELS[problem.method]
    problem = problem.quantized()
    if not problem.out_dtype.is_floating_point and problem.out_scale is None and problem.method not in _FIXED_SCALE:
        # one scale for all sequences of a packed problem
        problem = replace(problem, out_scale=default_out_scale(problem))
    sequences = problem.sequences()
    if sequences is None:
        return kernel(problem)
    results = [kernel(s) for s in sequences if s.q.shape[2]] or [kernel(sequences[0])]
    lse = torch.cat([r.lse for r in results], dim=2) if problem.return_lse else None
    return Result(torch.cat([r.out for r in results], dim=2), results[0].out_scale, lse)


BACKEND = Backend(
    name="torch",
    unavailable=lambda: None,
    serves=dict.fromkeys(_KERNELS, _SERVED),
    limits=lambda problem: None,
    run=_run,
    partial=Partial(tuple(partial_sums.BITS), partial_sums.maxima, partial_sums.sums, partial_sums.finish),
)
