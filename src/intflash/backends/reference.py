"""The golden reference: int64 arithmetic that asserts every declared width. It defines correctness."""

from __future__ import annotations

from dataclasses import replace

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
from intflash.methods import METHODS, arrays, get_method, intflash
from intflash.problem import Problem, Result

_SERVED = frozenset.union(
    FLOAT_INPUTS, CODES, FLOAT_QUERY, QUANTIZATION, INTEGER_OUTPUT, FLOAT_OUTPUT, MASKS, ANY_GRANULARITY,
    {"out_scale per channel", "grouped heads", "packed sequences", "log-sum-exp", "sliding window"},
)  # fmt: skip


def _run(problem: Problem) -> Result:
    method = get_method(problem.method)
    problem = problem.quantized()
    sequences = problem.sequences()
    if sequences is None:
        return method.reference(problem)
    by_tokens = isinstance(problem.v, torch.Tensor) or problem.v.granularity == "token"
    if by_tokens and problem.out_scale is None and not problem.out_dtype.is_floating_point:
        problem = replace(problem, out_scale=arrays.output_scale(problem))  # one scale for all sequences
        sequences = problem.sequences()
    results = [method.reference(s) for s in sequences if s.q.shape[2] > 0]
    lse = torch.cat([r.lse for r in results], dim=2) if problem.return_lse else None
    return Result(torch.cat([r.out for r in results], dim=2), results[0].out_scale, lse)


BACKEND = Backend(
    name="reference",
    unavailable=lambda: None,
    serves=dict.fromkeys(METHODS, _SERVED),
    limits=lambda problem: None,
    run=_run,
    partial=Partial(("intflash", "intflash_p8"), intflash.partial_maxima, intflash.partial_sums, intflash.finish_sums),
)
