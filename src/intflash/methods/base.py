"""What a method is: a frozen value that names its semantics, its inputs and its source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from intflash.problem import Problem, Result
from intflash.quant import Recipe
from intflash.quant.quantizers import FLOAT_DTYPES

INTEGER_DTYPES = (torch.int8, torch.int16)


@dataclass(frozen=True)
class Method:
    """One attention method.

    Attributes:
        name: the value of ``method=``.
        summary: one line for tables.
        source: paper and equation or algorithm.
        reference: the golden computation of one quantized, unpacked problem (int64 or float64 arrays).
        integer_only: no floating-point operation between quantized inputs and integer output.
        recipe: how float inputs are quantized when the caller gives no recipe.
        granularities: what each of q, k, v may be.
        out_dtypes: what may come out.
        bias_fraction_bits: a float mask is quantized to octaves of so many fraction bits, and arrives as `Problem.bias`
            rather than as `bias_float`; None: as that.
        writes_v_scale: integer output has the scale of V's codes, whatever the caller chooses.
        check: raises InputError for a bound of the method's own.
    """

    name: str
    summary: str
    source: str
    reference: Callable[[Problem], Result]
    integer_only: bool
    recipe: Recipe = field(default_factory=Recipe)
    granularities: dict[str, tuple[str, ...]] = field(default_factory=dict)
    out_dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES + INTEGER_DTYPES
    bias_fraction_bits: int | None = None
    writes_v_scale: bool = False
    check: Callable[[Problem], None] | None = None

    @property
    def integer_bias(self) -> bool:
        return self.bias_fraction_bits is not None
