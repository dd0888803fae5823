"""One attention call after validation: the single value that travels from the API to a backend."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from intflash.numerics.exp import BIAS_FRACTION_BITS
from intflash.quant import QTensor, Recipe


@dataclass(slots=True, eq=False)  # frozen, making one would take four times as long, 4 us of every call
class Problem:
    """A validated call; nobody changes one. Query (b, h) attends to key head ``h // (Hq / Hk)`` of batch b.

    Attributes:
        method: a name in `intflash.methods.METHODS`.
        q, k, v: all `QTensor`, all float tensors that `recipe` says how to quantize, or a float q beside `QTensor`s;
            ``[B, Hq, Nq, D]``, ``[B, Hk, Nk, D]``, ``[B, Hk, Nk, Dv]``, any strides.
        recipe: granularities, static scales and rule for float tensors.
        sm_scale: the softmax scale.
        bias: int32, in octaves of `bias_fraction_bits` fraction bits, `ABSENT` where a key takes no part;
            ``[Bm, H|1, Nq|1, Nk|1]``, Bm divides B and batch b uses row ``b % Bm`` (Swin windows).
        bias_fraction_bits: 20 for codes of `quantize_bias`, and for a float bias those of the method.
        bias_float: the bias as it was given, for the methods with a unit of their own; a problem has
            the one or the other, as its method's `integer_bias` says.
        keep: bool of such a shape; False makes a key absent.
        causal: key j is present for query i iff ``j <= i + causal``; None: all are. Of packed sequences of
            "bottom_right" each adds its number of keys less its number of queries, here and in `window_start`.
        causal_align: "top_left" or "bottom_right".
        window_start: key j is present for query i iff also ``j >= i + window_start``; given only with `causal`.
        cu_seqlens_q, cu_seqlens_k: int32 ``[sequences + 1]``: the batch of one is a packed one.
        out_dtype: int8, int16, float16, bfloat16 or float32.
        out_scale: float32 ``[B|1, H|1, 1, Dv|1]`` for integer output; None: s_V * 127 / qmax.
        return_lse: also return log-sum-exp, float32 ``[B, Hq, Nq]``.
        check_finite: the caller lets values be read: float q, k, v have not been searched for NaN and infinity yet, and
            a backend refuses scales that its method cannot compute with.
    """

    method: str
    q: QTensor | Tensor
    k: QTensor | Tensor
    v: QTensor | Tensor
    sm_scale: float
    recipe: Recipe = field(default_factory=Recipe)
    bias: Tensor | None = None
    bias_fraction_bits: int = BIAS_FRACTION_BITS
    bias_float: Tensor | None = None
    keep: Tensor | None = None
    causal: int | None = None
    causal_align: str = "top_left"
    window_start: int | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    out_dtype: torch.dtype = torch.float32
    out_scale: Tensor | None = None
    return_lse: bool = False
    check_finite: bool = False

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.q.shape[1] // self.k.shape[1]

    def quantized(self) -> Problem:
        """This problem with codes for floats, by the library's one definition of quantization."""
        if isinstance(self.q, QTensor):
            return self
        floats = {name: x for name, x in (("q", self.q), ("k", self.k), ("v", self.v)) if isinstance(x, Tensor)}
        return replace(self, **{name: self.recipe.quantize(name, x) for name, x in floats.items()})

    def sequences(self) -> list[Problem] | None:
        """The sequences of a packed (varlen) problem as problems of their own; None if it is not packed."""
        if self.cu_seqlens_q is None:
            return None
        q_ends, k_ends = self.cu_seqlens_q.tolist(), self.cu_seqlens_k.tolist()
        return [
            self._sequence(slice(q_ends[i], q_ends[i + 1]), slice(k_ends[i], k_ends[i + 1]))
            for i in range(len(q_ends) - 1)
        ]

    def _sequence(self, rows: slice, keys: slice) -> Problem:
        causal, window_start = self.causal, self.window_start
        if self.causal_align == "bottom_right":
            own = (keys.stop - keys.start) - (rows.stop - rows.start)
            causal, window_start = (None if x is None else x + own for x in (causal, window_start))
        return replace(
            self,
            q=_tokens(self.q, rows),
            k=_tokens(self.k, keys),
            v=_tokens(self.v, keys),
            bias=_window(self.bias, rows, keys),
            bias_float=_window(self.bias_float, rows, keys),
            keep=_window(self.keep, rows, keys),
            causal=causal,
            window_start=window_start,
            cu_seqlens_q=None,
            cu_seqlens_k=None,
        )


@dataclass(slots=True, eq=False)
class Result:
    """What a backend returns: codes with their scale or floats, and log-sum-exp when asked for."""

    out: Tensor
    out_scale: Tensor | None = None
    lse: Tensor | None = None


def empty_output(q: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialized output ``[B, H, N, Dv]``, tokens before heads in memory where 4-D q has them so.

    A model's q is such a view of its QKV projection, and wants ``[B, N, H * Dv]`` next: no copy then.
    """
    if q.ndim == 4 and q.stride(1) < q.stride(2):
        b, h, n, d = shape
        return torch.empty((b, n, h, d), dtype=dtype, device=q.device).transpose(1, 2)
    return torch.empty(shape, dtype=dtype, device=q.device)


def _tokens(x: QTensor | Tensor, tokens: slice) -> QTensor | Tensor:
    if isinstance(x, Tensor):
        return x[:, :, tokens]
    scale = x.scale[:, :, tokens] if x.granularity == "token" else x.scale
    return replace(x, data=x.data[:, :, tokens], scale=scale)


def _window(mask: Tensor | None, rows: slice, keys: slice) -> Tensor | None:
    if mask is None:
        return None
    mask = mask if mask.shape[2] == 1 else mask[:, :, rows]
    return mask if mask.shape[3] == 1 else mask[..., keys]
