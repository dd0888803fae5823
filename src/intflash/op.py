"""`intflash::attention`, the torch custom op behind `attention` where torch traces, and the refused gradients.

The op takes the arguments of `call.ARGUMENTS` with `QTensor` and `Recipe` laid out flat, and flags and names in one
string. Since each argument and each result of an op costs every call time, it has several overloads: `general` has them
all, the default one those of most calls, `inference` and `inference_scaled` those of most compiled calls, with kernels
in C++. On a CPU and a CUDA GPU the kernel is the native call path; `run` serves what that declines, and every other
device, because the backend is chosen inside. Calls that no tracer or transform watches go to `run` directly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from numbers import Real
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, compiler, nn
from torch._C import _disabled_torch_function_impl, _is_tracing, _len_torch_dispatch_stack
from torch._C._functorch import CInterpreter, TransformType, get_interpreter_stack
from torch._C._functorch import peek_interpreter_stack as _peek_transforms
from torch.autograd import forward_ad

from intflash import call, inductor, masks, validate
from intflash.backends import cpu
from intflash.call import ARGUMENTS, Output
from intflash.errors import InputError
from intflash.masks import UNBOUNDED
from intflash.methods import get_method
from intflash.problem import empty_output
from intflash.quant import QTensor, Recipe

REASON = "IntFlash is for inference and has no gradients: call it under torch.no_grad() or torch.inference_mode()"
FORWARD_REASON = "IntFlash is for inference and has no forward-mode derivatives: give it tensors without tangents"

_NAMES = ("q", "k", "v")
_IS_WORD = ("bool", "bool?", "str", "str?")
# A string of the op always names a method, since "auto" is resolved before; one without is of "intflash".
_WORDS = {a.name: a.default for a in ARGUMENTS if a.schema in _IS_WORD} | dict(
    method="intflash", codes="", smooth_k=False, rotate=False, q_granularity="tensor", k_granularity="tensor",
    v_granularity="tensor", rule="exact", dynamic_out=False, bound_out=False,
)  # fmt: skip
_SIMPLE = (("Tensor", "q"), ("Tensor", "k"), ("Tensor", "v"), ("Tensor?", "attn_mask"), ("Tensor?", "bias"))
# The other arguments, and QTensors and a recipe: scales that are tensors; those that are numbers (0: none), block sizes
# and bits of q, k and v, then the window's two numbers. The word `codes` names those of q, k and v that are QTensors.
_OTHERS = (
    *((a.schema, a.name) for a in ARGUMENTS if (a.schema, a.name) not in _SIMPLE and a.schema.startswith("Tensor")),
    ("Tensor?", "q_scale"), ("Tensor?", "k_scale"), ("Tensor?", "v_scale"), ("float?", "scale"),
    ("ScalarType?", "out_dtype"), ("float[]", "number_scales"), ("SymInt[]", "sizes"),
)  # fmt: skip
_NAMES_OF_TENSORS = tuple(name for _, name in _SIMPLE + _OTHERS)
FLAT = (*_NAMES_OF_TENSORS, *_WORDS)

_tensors_of = itemgetter(*call.TENSORS)
_differentiable_of = itemgetter(*(a.name for a in ARGUMENTS if a.differentiable and a.name in call.TENSORS))


def attention(arguments: dict[str, Any]) -> tuple[Output, Tensor | None]:
    """Output and log-sum-exp of a call with all arguments of `attention`: by torch's dispatcher where it must see the
    call, else at once."""
    arguments = call.normalize(arguments)
    return _through_torch(arguments) if dispatches(arguments) else run(arguments)


def run(arguments: dict[str, Any]) -> tuple[Output, Tensor | None]:
    """`call.compute` outside of autocast, with a backward pass that is refused."""
    q = arguments["q"]
    if under_autocast(q):  # exact products are not for it to round
        with torch.autocast(q.device.type, enabled=False):
            return run(arguments)
    wanting = gradients_wanted(arguments)
    if not wanting:
        return call.compute(arguments)
    with torch.no_grad():
        out, lse = call.compute(arguments)
    return refuse_backward(out, wanting), refuse_backward(lse, wanting)


def under_autocast(q: object) -> bool:
    """Whether autocast is on for the device of q."""
    if not torch._C._is_any_autocast_enabled():
        return False
    device = q.device.type if isinstance(q, (Tensor, QTensor)) else "cpu"
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def gradients_wanted(arguments: dict[str, Any]) -> list[Tensor]:
    """The tensors of a call that autograd follows.

    Raises:
        RuntimeError: forward-mode differentiation follows one.
    """
    forward, backward = forward_ad._current_level >= 0, torch.is_grad_enabled()
    if not (forward or backward):
        return []
    tensors = []
    for x in _differentiable_of(arguments):  # each call asks: to be quick
        if isinstance(x, Tensor):
            tensors.append(x)
        elif isinstance(x, QTensor):
            tensors.append(x.scale)
    recipe = arguments["recipe"]
    if isinstance(recipe, Recipe):
        tensors += [x for x in recipe.scales if isinstance(x, Tensor)]
    if forward and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise RuntimeError(FORWARD_REASON)
    return [x for x in tensors if x.requires_grad] if backward else []


def _any_requires_grad(values: tuple[Any, ...]) -> bool:
    return any(isinstance(x, Tensor) and x.requires_grad for x in values)


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, *wanting: Tensor) -> Tensor:
        return out.new_empty(0).set_(out)  # of its own, not a view: the caller may change it in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise RuntimeError(REASON)


def refuse_backward(out: Tensor | QTensor | None, of: list[Tensor]) -> Tensor | QTensor | None:
    """`out`, whose backward pass raises RuntimeError."""
    return _Refused.apply(out, *of) if isinstance(out, Tensor) else out


Results = tuple[Tensor, Tensor | None, Tensor | None]  # output, its scale where it is integer, log-sum-exp


@functools.lru_cache(1024)
def _words(options: str) -> tuple[Any, ...]:
    """The values of `_WORDS`, from a string that names some: the others are the defaults."""
    constants = {"True": True, "False": False}
    given = dict(word.split("=") for word in options.split())
    return tuple({**_WORDS, **{name: constants.get(x, x) for name, x in given.items()}}.values())


@functools.lru_cache(1024)
def _simple_rest(options: str) -> tuple[Any, ...]:
    """The values of `FLAT` that the simple overload does not have as arguments: no others are given, and floats are
    quantized as the method says."""
    recipe = get_method(_words(options)[FLAT.index("method") - len(_NAMES_OF_TENSORS)]).recipe
    quantization = f" q_granularity={recipe.q} k_granularity={recipe.k} v_granularity={recipe.v} rule={recipe.rule}"
    sizes = [recipe.block_size] * 3 + [recipe.bits] * 3 + [UNBOUNDED] * 2
    return *(None,) * (len(_OTHERS) - 2), [0.0] * 3, sizes, *_words(options + quantization)


def _compute(*flat: Any) -> Results:
    out, lse = run(_gather(*flat))
    if isinstance(out, QTensor):
        return _laid_out(out.data, flat[0]), out.scale.clone(), lse
    return _laid_out(out, flat[0]), None, lse


_METHOD, _OUT_SCALE = FLAT.index("method"), FLAT.index("out_scale")


def _compute_natively(*flat: Any) -> Results:
    found = cpu.attend_flat(*flat)
    if found is None:
        return _compute(*flat)
    out, scale, t_max, l_sum = found
    if scale is not None and scale is flat[_OUT_SCALE]:
        scale = scale.clone()  # an op's result is none of its arguments
    return out, scale, call.log_sum_exp_of(flat[_METHOD], t_max, l_sum)


def _laid_out(out: Tensor, q: Tensor) -> Tensor:
    """`out` in the memory layout that the fake kernel promises, whatever the backend gave."""
    want = empty_output(q, tuple(out.shape), out.dtype)
    pairs = zip(out.shape, out.stride(), want.stride(), strict=True)
    if all(size == 1 or have == promised for size, have, promised in pairs):
        return out.as_strided(want.shape, want.stride())  # an axis of length 1 may have any stride
    return want.copy_(out)


def _compute_fake(*flat: Any) -> Results:
    arguments, q, v = _gather(*flat), flat[0], flat[2]
    arguments["window_size"] = None  # it changes no shape, and to compare symbolic sizes with it would guard them
    dynamic = call.is_dynamic(arguments["out_scale"])
    problem, _ = call.prepare_call(arguments, values=False)
    lead = q.shape[:-1]
    lse = q.new_empty(lead, dtype=torch.float32) if arguments["return_lse"] else None
    if problem.out_dtype.is_floating_point:
        return empty_output(q, (*lead, v.shape[-1]), problem.out_dtype), None, lse
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
    raise RuntimeError(REASON)


@_no_gradient.register_fake
def _no_gradient_fake(gradient: Tensor, of: Tensor) -> Tensor:
    return torch.empty_like(of)


class _Differentiable(torch.autograd.Function):
    """An op below autograd, with a backward pass that is refused where it runs."""

    @staticmethod
    def forward(ctx: Any, op: Any, keys: Any, *flat: Any) -> Any:
        ctx.save_for_backward(*(x if isinstance(x, Tensor) and x.requires_grad else None for x in flat))
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keys, *flat)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple:
        return None, None, *(None if x is None else _no_gradient(gradient, x) for x in ctx.saved_tensors)


_library = torch.library.Library("intflash", "DEF")


def _unwatched_keys() -> set[int]:
    """The keys of calls that nothing but autograd wants to see. Not every torch leaves out ADInplaceOrView, for which
    the op has no kernel."""
    keys, key_set = torch._C.DispatchKey, torch._C.DispatchKeySet
    plain = [key_set(keys.CPU) | key_set(keys.AutogradCPU), key_set(keys.CUDA) | key_set(keys.AutogradCUDA)]
    return {x.raw_repr() for x in plain} | {(x | key_set(keys.ADInplaceOrView)).raw_repr() for x in plain}


_UNWATCHED = _unwatched_keys()


def _define(schema: str, kernel_of: Callable[[Callable[..., Results]], Callable[..., Any]]) -> Any:
    """An overload of the op; `kernel_of` makes a kernel from what computes the results from the values of `FLAT`."""
    name = schema[: schema.index("(")]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    op = functools.reduce(getattr, f"intflash.{name}".split("."), torch.ops)
    op = op.default if "." not in name else op
    natively, is_grad_enabled, unwatched = kernel_of(_compute_natively), torch.is_grad_enabled, _UNWATCHED

    def autograd(keys: Any, *flat: Any) -> Any:  # to be quick: in compiled code each call passes here
        wanted = is_grad_enabled() and _any_requires_grad(flat)
        if not wanted and keys.raw_repr() in unwatched:  # redispatching takes 2 us
            return natively(*flat)
        below = keys & torch._C._after_autograd_keyset
        return _Differentiable.apply(op, below, *flat) if wanted else op.redispatch(below, *flat)

    _library.impl(name, kernel_of(_compute), "CompositeExplicitAutograd")
    _library.impl(name, natively, "CPU")
    _library.impl(name, natively, "CUDA")
    _library.impl(name, autograd, "Autograd", with_keyset=True)
    torch.library.register_fake(f"intflash::{name}", kernel_of(_compute_fake), lib=_library)
    return op


def _simple_kernel(compute: Callable[..., Results]) -> Callable[..., Tensor]:
    def kernel(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, bias: Tensor | None, options: str) -> Tensor:
        return compute(q, k, v, attn_mask, bias, *_simple_rest(options))[0]

    return kernel


def _general_kernel(compute: Callable[..., Results]) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    def kernel(*flat: Any) -> tuple[Tensor, Tensor, Tensor]:
        *values, options = flat
        found = compute(*values, *_words(options))
        return tuple(flat[0].new_empty(0, dtype=torch.float32) if x is None else x for x in found)

    return kernel


def _schema(arguments: tuple[tuple[str, str], ...]) -> str:
    return ", ".join(" ".join(x) for x in (*arguments, ("str", "options")))


_simple = _define(f"attention({_schema(_SIMPLE)}) -> Tensor", _simple_kernel)
_general = _define(f"attention.general({_schema(_SIMPLE + _OTHERS)}) -> (Tensor, Tensor, Tensor)", _general_kernel)


# --- The overloads of compiled calls ----------------------------------------------------------------------------------


# The options of these overloads and the values of each, which travel in one number by their indices. New values and
# options are appended. Any other change needs another `_LAYOUT`, because compiled code on disk holds the numbers.
# A granularity or bits of None are those of the method's own recipe.
_GRANULARITIES = (None, "tensor", "head", "token", "channel")
_OPTIONS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("is_causal", (False, True)),
    ("enable_gqa", (False, True)),
    ("causal_align", ("top_left", "bottom_right")),
    ("check_finite", (None, False, True)),
    ("backend", (None, "cpu", "cuda")),
    ("method", ("intflash", "intflash_p8", "intflash_online", "intflash_bfp")),
    ("codes", ("", "kv", "qkv")),
    ("q_granularity", _GRANULARITIES), ("k_granularity", _GRANULARITIES), ("v_granularity", _GRANULARITIES),
    ("q_bits", (None, 8, 4)), ("k_bits", (None, 8, 4)), ("v_bits", (None, 8, 4)),
    ("out_dtype", (None, torch.float32, torch.float16, torch.bfloat16)),
)  # fmt: skip
_LAYOUT = 1


@functools.lru_cache(1024)
def _options_of(number: int) -> tuple[Any, ...]:
    """The options from their number: four bits of the layout's, then four of each index.

    Raises:
        InputError: it is none that this version writes.
    """
    indices = [number >> 4 * i & 15 for i in range(1, len(_OPTIONS) + 1)]
    is_known = all(i < len(values) for i, (_, values) in zip(indices, _OPTIONS, strict=True))
    if not is_known or number & 15 != _LAYOUT or number >> 4 * len(_OPTIONS) + 4:
        raise InputError(f"options of intflash::attention.inference that this version does not know: {number}")
    return tuple(values[i] for i, (_, values) in zip(indices, _OPTIONS, strict=True))


@functools.lru_cache(1024)
def _rest_of(number: int) -> tuple[Any, ...]:
    """The output's dtype, the sizes and the words of `FLAT`, from the options' number."""
    options = dict(zip([name for name, _ in _OPTIONS], _options_of(number), strict=True))
    recipe = get_method(options["method"]).recipe
    for name in _NAMES:
        if options[f"{name}_granularity"] is None:
            options[f"{name}_granularity"] = getattr(recipe, name)
    sizes = [recipe.block_size] * 3 + [options.pop(f"{name}_bits") or recipe.bits for name in _NAMES]
    out_dtype = options.pop("out_dtype")
    words = " ".join([f"{name}={x}" for name, x in options.items() if x is not None])
    return out_dtype, sizes + [UNBOUNDED] * 2, _words(f"{words} rule={recipe.rule}")


def _scaled_kernel(compute: Callable[..., Results]) -> Callable[..., Tensor]:
    def kernel(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, bias: Tensor | None, q_scale: Tensor | None,
        k_scale: Tensor | None, v_scale: Tensor | None, scale: float, q_number: float, k_number: float,
        v_number: float, options: int,
    ) -> Tensor:  # fmt: skip
        out_dtype, sizes, words = _rest_of(options)
        scales = None, None, None, q_scale, k_scale, v_scale, scale or None
        numbers = [q_number, k_number, v_number]
        return compute(q, k, v, attn_mask, bias, *scales, out_dtype, numbers, list(sizes), *words)[0]

    return kernel


def _inference_kernel(compute: Callable[..., Results]) -> Callable[..., Tensor]:
    scaled = _scaled_kernel(compute)

    def kernel(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, bias: Tensor | None, options: int) -> Tensor:
        return scaled(q, k, v, attn_mask, bias, None, None, None, 0.0, 0.0, 0.0, 0.0, options)

    return kernel


def _compute_fake_inference(*flat: Any) -> Results:
    if torch.is_grad_enabled() and _any_requires_grad(flat):
        raise RuntimeError(REASON)
    inductor.register_lowerings()
    return _compute_fake(*flat)


def _define_inference(schema: str, kernel_of: Callable[[Callable[..., Results]], Callable[..., Tensor]]) -> Any:
    """An overload for compiled calls without gradients, whose kernels are C++ where torch lets them be.

    Autograd is passed over. So the kernels refuse gradients, and code that has this overload, as a program that torch
    has exported, is not compiled for gradients.
    """
    name, serve = schema[: schema.index("(")], kernel_of(_compute)
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    natively = kernel_of(lambda *flat: (_compute if torch.is_grad_enabled() else _compute_natively)(*flat))
    in_cpp = cpu.add_inference_kernel(name, serve, _options_of)
    for key in ("CPU", "CUDA"):
        if key not in in_cpp:
            _library.impl(name, natively, key)
    _library.impl(name, serve, "CompositeExplicitAutograd")
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"intflash::{name}", kernel_of(_compute_fake_inference), lib=_library)
    op = getattr(torch.ops.intflash.attention, name.split(".")[1])
    inductor.call_natively(op, cpu.inference_function(name) if in_cpp else op)
    return op


_inference = _define_inference(
    f"attention.inference({', '.join(map(' '.join, _SIMPLE))}, int options) -> Tensor", _inference_kernel
)
# With static scales or codes' scales, tensors or numbers (0: none), and the softmax scale (0: none).
_inference_scaled = _define_inference(
    f"attention.inference_scaled({', '.join(map(' '.join, _SIMPLE))}, Tensor? q_scale, Tensor? k_scale, "
    "Tensor? v_scale, float scale, float q_number, float k_number, float v_number, int options) -> Tensor",
    _scaled_kernel,
)


def _is_exported_or_transformed() -> bool:
    # Not `torch.compiler.is_exporting()`, which older versions of torch.compile take for true.
    if getattr(compiler, "_is_exporting_flag", False):
        return True
    return isinstance(_peek_transforms(), CInterpreter)


# torch.compile calls it once, while it traces, and guards transforms itself (as torch.compiler.assume_constant_result,
# which imports all of torch.compile).
_is_exported_or_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def compiled_inference(
    q: Any, k: Any, v: Any, attn_mask: Any, bias: Any, is_causal: Any, enable_gqa: Any, causal_align: Any,
    check_finite: Any, backend: Any, method: Any, scale: Any, recipe: Any, out_dtype: Any, *others: Any,
) -> Tensor | None:  # fmt: skip
    """A call in code that torch.compile traces by these overloads, or None where they cannot have it.

    `others` are the arguments that must be None. At every call compiled code guards each global that is read here: it
    reads few, and writes `_OPTIONS` out. What is wrong with a call, the fake kernel says.
    """
    if _is_exported_or_transformed() or forward_ad._current_level >= 0:
        return None
    for x in others:
        if x is not None:
            return None
    for x in (attn_mask, bias):
        if x is not None and (type(x) is not Tensor or (x.requires_grad and torch.is_grad_enabled())):
            return None
    options = 1
    if is_causal is True:
        options += 1 << 4
    elif is_causal is not False:
        return None
    if enable_gqa is True:
        options += 1 << 8
    elif enable_gqa is not False:
        return None
    if causal_align == "bottom_right":
        options += 1 << 12
    elif causal_align != "top_left":
        return None
    if check_finite is False:
        options += 1 << 16
    elif check_finite is True:
        options += 2 << 16
    elif check_finite is not None:
        return None
    if backend == "cpu":
        options += 1 << 20
    elif backend == "cuda":
        options += 2 << 20
    elif backend is not None:
        return None
    if method == "intflash_p8":
        options += 1 << 24
    elif method == "intflash_online":
        options += 2 << 24
    elif method == "intflash_bfp":
        options += 3 << 24
    elif method != "intflash":
        return None
    are_tensors = isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
    if not are_tensors or scale is not None or recipe is not None or out_dtype is not None:
        return _compiled_scaled(q, k, v, attn_mask, bias, scale, recipe, out_dtype, options)
    if (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled():
        return None
    return _inference(q, k, v, attn_mask, bias, options)


def _compiled_scaled(
    q: Any, k: Any, v: Any, attn_mask: Any, bias: Any, scale: Any, recipe: Any, out_dtype: Any, options: int
) -> Tensor | None:
    """The call of `compiled_inference` with a softmax scale, a recipe, codes or an output's dtype."""
    if scale is None:
        scale = 0.0
    elif not isinstance(scale, float) or not scale > 0:
        return None
    if recipe is not None:
        if type(recipe) is not Recipe or recipe.rule != "exact" or recipe.smooth_k or recipe.rotate:
            return None
    codes = [isinstance(x, QTensor) for x in (q, k, v)]
    if codes == [False, True, True]:
        options += 1 << 28
    elif codes == [True, True, True]:
        options += 2 << 28
        if out_dtype is None:
            return None  # integer output
    elif codes != [False, False, False]:
        return None
    if codes[1] and recipe is not None:
        return None
    if out_dtype is not None:
        if out_dtype is torch.float32:
            options += 1 << 56
        elif out_dtype is torch.float16:
            options += 2 << 56
        elif out_dtype is torch.bfloat16:
            options += 3 << 56
        else:
            return None
    tensors: list[Tensor] = []
    scales: list[Tensor | None] = []
    numbers: list[float] = []
    given = (None, None, None) if recipe is None else (recipe.q_scale, recipe.k_scale, recipe.v_scale)
    kinds = (None, None, None) if recipe is None else (recipe.q, recipe.k, recipe.v)
    for i, x in enumerate((q, k, v)):
        bits, kind, of = None if recipe is None else recipe.bits, kinds[i], given[i]
        if codes[i]:
            bits, kind, of, x = x.bits, x.granularity, x.scale, x.data
        if kind is not None:
            index, width = {"tensor": 1, "head": 2, "token": 3, "channel": 4}.get(kind), {8: 1, 4: 2}.get(bits)
            if index is None or width is None:
                return None
            options += (index << 32 + 4 * i) + (width << 44 + 4 * i)
        if not isinstance(x, Tensor) or not (of is None or isinstance(of, (Tensor, float))):
            return None
        if torch.is_grad_enabled() and (x.requires_grad or (isinstance(of, Tensor) and of.requires_grad)):
            return None
        tensors.append(x)
        scales.append(of if isinstance(of, Tensor) else None)
        numbers.append(of if isinstance(of, float) else 0.0)
    return _inference_scaled(*tensors, attn_mask, bias, *scales, scale, *numbers, options)


_PLAIN = Tensor.__torch_dispatch__
_PLAIN_FUNCTIONS = (Tensor.__torch_function__.__func__, _disabled_torch_function_impl)
_memory_kinds: dict[type, bool] = {Tensor: True, nn.Parameter: True}


def dispatches(arguments: dict[str, Any]) -> bool:
    """Whether torch's dispatcher must see the call: where it is traced or transformed, and for tensors that are not
    memory alone (wrapped, fake, meta, negated, sparse ones). Each call asks: each line is here to be quick."""
    if torch.compiler.is_compiling() or _is_tracing() or _len_torch_dispatch_stack() or _peek_transforms() is not None:
        return True
    for x in _tensors_of(arguments):
        if x is not None and not _is_memory(x):
            return True
    recipe = arguments["recipe"]
    return isinstance(recipe, Recipe) and not all(map(_is_memory, recipe.scales))


def _is_memory(x: object) -> bool:
    """Of a tensor, whether its values are what its memory holds; anything else is refused elsewhere, or a number."""
    kind = type(x)
    if kind is QTensor:
        return _is_memory(x.data) and _is_memory(x.scale)
    if kind is not Tensor:
        if not isinstance(x, Tensor):
            return True
        if kind not in _memory_kinds:
            function = kind.__torch_function__
            plain = getattr(function, "__func__", function) in _PLAIN_FUNCTIONS
            _memory_kinds[kind] = plain and kind.__torch_dispatch__ is _PLAIN
        if not _memory_kinds[kind]:
            return False
    return x.layout is torch.strided and not x.is_neg() and not x.is_meta


def _under_grad() -> bool:
    """Whether `torch.func.grad`, `vjp` or what is made of them is being computed."""
    return any(x.key() == TransformType.Grad for x in get_interpreter_stack() or ())


def _through_torch(arguments: dict[str, Any]) -> tuple[Output, Tensor | None]:
    """The call through the custom op."""
    if forward_ad._current_level >= 0:
        gradients_wanted(arguments)  # refuses tangents, for which torch would give zeros
    if not torch.compiler.is_compiling() and _under_grad() and gradients_wanted(arguments):
        raise RuntimeError(REASON)  # torch's transform would end in an error about autograd.Function
    validate.check_dispatched(arguments)
    dynamic = call.is_dynamic(arguments["out_scale"])
    recipe = arguments["recipe"]
    is_codes = [isinstance(arguments[name], QTensor) for name in _NAMES]
    # Compiled code guards each global that is read from here on, at every call: most calls read few.
    words = [
        f"{name}={x}"
        for name, x in arguments.items()
        if isinstance(x, (bool, str)) and name not in ("scale", "out_scale")
    ]
    if recipe is None and not any(is_codes) and not arguments["return_lse"]:
        others = ("scale", "window_size", "out_dtype", "out_scale", "cu_seqlens_q", "cu_seqlens_k")
        if all([arguments[name] is None for name in others]):
            return _simple(*[arguments[name] for _, name in _SIMPLE], " ".join(words)), None
    bound = call.is_bound(arguments["out_scale"])
    flat = dict(arguments, out_scale=None) if dynamic or bound else dict(arguments)
    if isinstance(flat["scale"], bool):
        flat["scale"] = float(flat["scale"])
    chosen = None
    if not all(is_codes):
        chosen = recipe if recipe is not None else get_method(arguments["method"]).recipe
        words.append(f"rule={chosen.rule}")
    if not any(is_codes):
        words += [f"smooth_k={chosen.smooth_k}", f"rotate={chosen.rotate}"]
    numbers, blocks, bits = [], [], []
    for i, name in enumerate(_NAMES):
        x = arguments[name]
        if is_codes[i]:
            kind, scale, number, block, width = x.granularity, x.scale, 0.0, x.block_size or 0, x.bits
            flat[name] = x.data
        else:
            kind, scale, number, block, width = (
                chosen.granularity_of(name, x),
                None,
                0.0,
                chosen.block_size,
                chosen.bits,
            )
            given = chosen.scales[i]
            if isinstance(given, Tensor):
                scale = given
            elif given is not None:
                number = float(given)
        flat[f"{name}_scale"] = scale
        words.append(f"{name}_granularity={kind}")
        numbers.append(number), blocks.append(block), bits.append(width)
    words.append("codes=" + "".join([name for i, name in enumerate(_NAMES) if is_codes[i]]))
    words += [f"dynamic_out={dynamic}", f"bound_out={bound}"]
    window = arguments["window_size"] or (UNBOUNDED, UNBOUNDED)
    if isinstance(flat["out_scale"], Real):
        flat["out_scale"] = torch.full(
            (1, 1, 1, 1), float(flat["out_scale"]), dtype=torch.float32, device=flat["q"].device
        )
    flat.update(number_scales=numbers, sizes=[*blocks, *bits, *window])
    out, scale, lse = _general(*[flat[name] for name in _NAMES_OF_TENSORS], " ".join(words))
    if not out.dtype.is_floating_point:
        out = call.integer_output(out, scale)
    return out, lse if arguments["return_lse"] else None


def _gather(*values: Any) -> dict[str, Any]:
    """The arguments of `attention` from the values of `FLAT`."""
    flat = dict(zip(FLAT, values, strict=True))
    kinds = [flat.pop(f"{name}_granularity") for name in _NAMES]
    sizes, numbers = flat.pop("sizes"), flat.pop("number_scales")
    blocks, bits = sizes[:3], sizes[3:6]
    flat["window_size"] = masks.window(tuple(sizes[6:]))
    scales = [flat.pop(f"{name}_scale") for name in _NAMES]
    smooth_k, rotate, rule = flat.pop("smooth_k"), flat.pop("rotate"), flat.pop("rule")
    codes, given = flat.pop("codes"), {}
    for i, name in enumerate(_NAMES):
        if name in codes:
            flat[name] = QTensor(flat[name], scales[i], kinds[i], blocks[i] if kinds[i] == "block" else None, bits[i])
        else:
            given[f"{name}_scale"] = scales[i] if scales[i] is not None else numbers[i] or None
    flat["recipe"] = None
    if given:
        flat["recipe"] = Recipe(
            *kinds, bits=bits[0], block_size=blocks[0], smooth_k=smooth_k, rotate=rotate, rule=rule, **given
        )
    for name, word in (("dynamic_out", "dynamic"), ("bound_out", "bound")):
        if flat.pop(name):
            flat["out_scale"] = word
    return flat
