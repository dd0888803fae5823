"""`intflash::attention`, the torch custom op behind `attention` under torch.compile and export.

The op takes what `attention` takes with `QTensor` and `Recipe` laid out flat, and its kernel is
`pipeline.run`: one op serves every device, because the backend is chosen inside.
"""

# Annotations here are read at run time by torch.library: no `from __future__ import annotations`.
from collections.abc import Sequence
from numbers import Real
from operator import itemgetter
from typing import Any, Optional

import torch
from torch import Tensor
from torch._C import _is_tracing, _len_torch_dispatch_stack
from torch._C._functorch import peek_interpreter_stack as _peek_transforms

from intflash import gradients, pipeline
from intflash.methods import get_method
from intflash.problem import empty_output
from intflash.quant import QTensor, Recipe

_NAMES = ("q", "k", "v")


@torch.library.custom_op("intflash::attention", mutates_args=())
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Optional[Tensor],  # noqa: UP045
    bias: Optional[Tensor],  # noqa: UP045
    q_scale: Optional[Tensor],  # noqa: UP045
    k_scale: Optional[Tensor],  # noqa: UP045
    v_scale: Optional[Tensor],  # noqa: UP045
    out_scale: Optional[Tensor],  # noqa: UP045
    cu_seqlens_q: Optional[Tensor],  # noqa: UP045
    cu_seqlens_k: Optional[Tensor],  # noqa: UP045
    number_scales: Sequence[float],
    block_sizes: Sequence[int],
    bits: Sequence[int],
    scale: Optional[float],  # noqa: UP045
    quantized: bool,
    is_causal: bool,
    enable_gqa: bool,
    smooth_k: bool,
    rotate: bool,
    dynamic_out: bool,
    return_lse: bool,
    check_finite: Optional[bool],  # noqa: UP045
    method: str,
    backend: Optional[str],  # noqa: UP045
    causal_align: str,
    granularities: str,
    rule: str,
    out_dtype: Optional[torch.dtype],  # noqa: UP045
) -> tuple[Tensor, Tensor, Tensor]:
    out, lse = pipeline.run(_gather(locals()))
    if lse is None:
        lse = q.new_empty(0, dtype=torch.float32)
    if isinstance(out, QTensor):
        return _laid_out(out.data, q), out.scale.clone(), lse
    return _laid_out(out, q), q.new_empty(0, dtype=torch.float32), lse


def _laid_out(out: Tensor, q: Tensor) -> Tensor:
    """`out` in the memory layout that the fake kernel promises, whatever the backend gave."""
    want = empty_output(q, tuple(out.shape), out.dtype)
    pairs = zip(out.shape, out.stride(), want.stride(), strict=True)
    if all(size == 1 or have == promised for size, have, promised in pairs):
        return out.as_strided(want.shape, want.stride())  # an axis of length 1 may have any stride
    return want.copy_(out)


@_attention.register_fake
def _attention_fake(q, k, v, *flat: Any) -> tuple[Tensor, Tensor, Tensor]:
    names = _attention._opoverload._schema.arguments
    arguments = _gather(dict(zip((a.name for a in names), (q, k, v, *flat), strict=True)))
    arguments.pop("backend")
    dynamic = pipeline.is_dynamic(arguments["out_scale"])
    if dynamic:
        arguments["out_scale"] = None
    problem, _ = pipeline.prepare(**(arguments | {"check_finite": False}))
    lead = q.shape[:-1]
    lse = q.new_empty(lead if arguments["return_lse"] else 0, dtype=torch.float32)
    if problem.out_dtype.is_floating_point:
        return empty_output(q, (*lead, v.shape[-1]), problem.out_dtype), q.new_empty(0, dtype=torch.float32), lse
    codes = empty_output(q, (*problem.q.shape[:-1], v.shape[-1]), problem.out_dtype)
    if dynamic:
        return codes, q.new_empty((1, 1, 1, 1), dtype=torch.float32), lse
    scale = problem.out_scale
    if scale is None:
        v = problem.quantized().v
        scale = v.scale if isinstance(v, QTensor) else q.new_empty((1, 1, 1, 1), dtype=torch.float32)
        scale = scale[:, :, :1]  # the largest of all tokens
    if scale.numel() != 1:
        scale = scale.new_empty((scale.shape[0], problem.q.shape[1], 1, scale.shape[3]))
    return codes, torch.empty_like(scale, memory_format=torch.contiguous_format), lse


@torch.library.custom_op("intflash::no_gradient", mutates_args=())
def _no_gradient(gradient: Tensor, of: Tensor) -> Tensor:
    """Where compiled code would have a gradient; takes the output's, or it would run in the forward pass."""
    raise RuntimeError(gradients.REASON)


@_no_gradient.register_fake
def _no_gradient_fake(gradient: Tensor, of: Tensor) -> Tensor:
    return torch.empty_like(of)


def _backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple:
    return tuple(None if x is None else _no_gradient(gradient, x) for x in ctx.saved_tensors)


def _save_inputs(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*(x if isinstance(x, Tensor) and x.requires_grad else None for x in inputs))


_attention.register_autograd(_backward, setup_context=_save_inputs)


_tensors_of = itemgetter("q", "k", "v", "attn_mask", "bias", "out_scale", "cu_seqlens_q", "cu_seqlens_k")
_PLAIN = Tensor.__torch_dispatch__


def dispatches(arguments: dict[str, Any]) -> bool:
    """Whether torch's dispatcher must see the call: where it is traced or transformed, and for tensors that are not
    memory alone (wrapped, fake, negated ones). Each call asks: each line is here to be quick."""
    if torch.compiler.is_compiling() or _is_tracing() or _len_torch_dispatch_stack() or _peek_transforms() is not None:
        return True
    for x in _tensors_of(arguments):
        if x is not None and not _is_memory(x):
            return True
    recipe = arguments["recipe"]
    return isinstance(recipe, Recipe) and not all(map(_is_memory, recipe.scales))


def _is_memory(x: object) -> bool:
    """Of a tensor; what is none is refused elsewhere, or a number."""
    kind = type(x)
    if kind is Tensor:
        return not x.is_neg()
    if kind is QTensor:
        return _is_memory(x.data) and _is_memory(x.scale)
    return not isinstance(x, Tensor) or kind.__torch_dispatch__ is _PLAIN and not x.is_neg()


def attention(
    q: Tensor | QTensor,
    k: Tensor | QTensor,
    v: Tensor | QTensor,
    *,
    recipe: Recipe | None,
    out_scale: Tensor | float | str | None,
    **options: Any,
) -> tuple[Tensor | QTensor, Tensor | None]:
    """`attention` through the custom op; the same arguments, all by name."""
    quantized = isinstance(q, QTensor)
    tensors = (q, k, v)
    if quantized:
        scales, numbers = [x.scale for x in tensors], [0.0] * 3
        granularities, blocks = [x.granularity for x in tensors], [x.block_size or 0 for x in tensors]
        bits = [x.bits for x in tensors]
        tensors = tuple(x.data for x in tensors)
    else:
        chosen = recipe if recipe is not None else get_method(options["method"]).recipe
        given = [getattr(chosen, f"{name}_scale") for name in _NAMES]
        scales = [x if isinstance(x, Tensor) else None for x in given]
        numbers = [0.0 if x is None or isinstance(x, Tensor) else float(x) for x in given]
        granularities, blocks = [getattr(chosen, name) for name in _NAMES], [chosen.block_size] * 3
        bits = [chosen.bits] * 3
    dynamic = pipeline.is_dynamic(out_scale)
    if isinstance(out_scale, Real):
        out_scale = torch.full((1, 1, 1, 1), float(out_scale), device=tensors[0].device)
    out, scale, lse = _attention(
        *tensors, options["attn_mask"], options["bias"], *scales, None if dynamic else out_scale,
        options["cu_seqlens_q"], options["cu_seqlens_k"], numbers, blocks, bits, options["scale"], quantized,
        options["is_causal"], options["enable_gqa"], not quantized and chosen.smooth_k,
        not quantized and chosen.rotate, dynamic, options["return_lse"], options["check_finite"],
        options["method"], options["backend"], options["causal_align"], ",".join(granularities),
        "exact" if quantized else chosen.rule, options["out_dtype"],
    )  # fmt: skip
    if not out.dtype.is_floating_point:
        out = pipeline.integer_output(out, scale)
    return out, lse if options["return_lse"] else None


def _gather(flat: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `pipeline.run` from those of the op."""
    kinds = flat.pop("granularities").split(",")
    blocks, bits, numbers = (flat.pop(name) for name in ("block_sizes", "bits", "number_scales"))
    scales = [flat.pop(f"{name}_scale") for name in _NAMES]
    smooth_k, rotate, rule = flat.pop("smooth_k"), flat.pop("rotate"), flat.pop("rule")
    flat["recipe"] = None
    if flat.pop("quantized"):
        for i, name in enumerate(_NAMES):
            flat[name] = QTensor(flat[name], scales[i], kinds[i], blocks[i] or None, bits[i])
    else:
        given = {
            f"{name}_scale": scales[i] if scales[i] is not None else numbers[i] or None for i, name in enumerate(_NAMES)
        }
        flat["recipe"] = Recipe(
            *kinds, bits=bits[0], block_size=blocks[0], smooth_k=smooth_k, rotate=rotate, rule=rule, **given
        )
    if flat.pop("dynamic_out"):
        flat["out_scale"] = "dynamic"
    return flat
