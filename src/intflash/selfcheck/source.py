"""A case as Python code, and the arguments that this code makes: what is run and what is reported are one text."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from intflash.selfcheck.cases import Case, MaskCase

CODE_SCALE = 0.02  # around which scales of codes lie, times the amplitude


def lay_out(values: Tensor, strides: tuple[int, ...], offset: int, device: str) -> Tensor:
    """The values in memory with these strides and this storage offset; what lies between them is NaN or extreme.

    An axis of stride 0 repeats the values of its first index.
    """
    first = values[tuple(slice(0, 1) if step == 0 else slice(None) for step in strides)]
    size = offset + 1 + sum((n - 1) * step for n, step in zip(values.shape, strides, strict=True))
    gap = float("nan") if values.is_floating_point() else 1 if values.dtype == torch.bool else -128
    memory = torch.full((size,), gap, dtype=values.dtype)
    memory.as_strided(first.shape, strides, offset).copy_(first)
    return memory.to(device).as_strided(values.shape, strides, offset)


def strides(layout: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a layout's tensor: "fused" is a part of a QKV projection, "shared" repeats over leading axes."""
    axes = list(range(len(shape)))
    if layout in ("tokens_first", "fused") and len(shape) > 2:
        axes[-3], axes[-2] = axes[-2], axes[-3]
    if layout == "columns" and len(shape) > 1:
        axes[-2], axes[-1] = axes[-1], axes[-2]
    found, step = [0] * len(shape), 2 if layout == "every_second" else 1
    for place, axis in enumerate(reversed(axes)):
        found[axis] = step
        step *= shape[axis]
        if layout == "padded" and place == 0:
            step += 3
        if layout == "fused" and place == min(1, len(shape) - 2):
            step *= 3
    if layout == "shared":
        found[:-2] = [0] * len(found[:-2])
    return tuple(found)


def code(case: Case, turn: int, device: str = "cpu") -> str:
    """Python code that assigns `arguments`: those of `intflash.attention` but for the backend."""
    moved = case.moved and turn == case.turns[-1] and len(case.turns) > 1
    lines = [f'device = "{device}"', f"g = torch.Generator().manual_seed({case.values_seed + turn})"]
    shapes = case.sizes()
    for i, name in enumerate("qkv"):
        layout, offset = ("contiguous", 0) if moved else (case.layouts[i], case.offsets[i])
        values = _values(case, name)
        lines.append(f"{name} = {_laid_out(values, shapes[name], layout, offset)}")
    arguments = dict(q="q", k="k", v="v", method=repr(case.method))
    lines += [_qtensor(case, i, name) for i, name in enumerate("qkv") if case.has_codes(name)]
    if case.custom_recipe:
        recipe, made = _recipe(case, device)
        lines += made
        arguments["recipe"] = recipe
    if case.mask is not None:
        lines.append(f"attn_mask = {_mask(case, case.mask, moved)}")
        arguments["attn_mask"] = "attn_mask"
    if case.bias is not None:
        lines.append(f"bias = {_mask(case, case.bias, moved)}")
        arguments["bias"] = "bias"
    if case.packed is not None:
        lines += [_offsets(case, name) for name in "qk"]
        arguments |= dict(cu_seqlens_q="cu_seqlens_q", cu_seqlens_k="cu_seqlens_k")
    if case.causal is not None:
        arguments |= dict(is_causal="True", causal_align=repr(case.causal))
    if case.window is not None:
        arguments["window_size"] = repr(case.window)
    for name, value, usual in (
        ("scale", case.scale, None), ("return_lse", case.lse, False), ("enable_gqa", case.gqa_flag, False),
        ("check_finite", case.check_finite, None),
    ):  # fmt: skip
        if value != usual:
            arguments[name] = repr(value)
    if case.out_dtype is not None:
        arguments["out_dtype"] = f"torch.{case.out_dtype}"
    if case.out_scale is not None:
        arguments["out_scale"] = _out_scale(case)
    elif case.output == "int8":
        arguments["out_scale"] = '"bound"'
    listed = "".join(f"    {name}={value},\n" for name, value in arguments.items())
    lines.append(f"arguments = dict(\n{listed})")
    if case.fault is not None:
        lines.append(FAULTS[case.fault])
    return "\n".join(lines)


def build(case: Case, turn: int, device: str = "cpu") -> dict[str, Any]:
    """The arguments that the case's code makes."""
    import intflash

    names: dict[str, Any] = dict(torch=torch, intflash=intflash, lay_out=lay_out)
    exec(code(case, turn, device), names)  # the text is this module's own
    return names["arguments"]


def _values(case: Case, name: str) -> str:
    shape = case.sizes()[name]
    if case.has_codes(name):
        most = 7 if case.bits == 4 else 127
        usual = f"torch.randint(-{most}, {most + 1}, {shape}, generator=g)"
        integers = {
            "zeros": f"torch.zeros({shape})",
            "constant": f"torch.full({shape}, {most})",
            "ties": f"torch.randint(-1, 2, {shape}, generator=g)",
            "sparse": f"{usual} * (torch.rand({shape}, generator=g) < 0.1)",
        }
        return f"({integers.get(case.values, usual)}).to(torch.int8)"
    floats = {
        "normal": f"torch.randn({shape}, generator=g)",
        "outlier": f"torch.randn({shape}, generator=g) * torch.tensor([20.0] + [1.0] * {shape[-1] - 1})",
        "ties": f"torch.randint(-2, 3, {shape}, generator=g) / 2",
        "zeros": f"torch.zeros({shape})",
        "constant": f"torch.full({shape}, 0.75)",
        "sparse": f"torch.randn({shape}, generator=g) * (torch.rand({shape}, generator=g) < 0.1)",
    }
    return f"({floats[case.values]} * {case.amplitude}).to(torch.{case.inputs})"


def _laid_out(values: str, shape: tuple[int, ...], layout: str, offset: int) -> str:
    if layout == "contiguous" and offset == 0:
        return f"{values}.to(device)"
    return f"lay_out({values}, {strides(layout, shape)}, {offset}, device)"


def _scale_shape(case: Case, name: str, granularity: str, batch: int) -> tuple[int, ...]:
    shape = case.sizes()[name]
    heads, tokens, channels = (shape[-3] if len(shape) > 2 else 1), shape[-2], shape[-1]
    tail = {
        "tensor": (1, 1), "head": (1, 1), "token": (tokens, 1), "block": (-(-tokens // case.block_size), 1),
        "channel": (1, channels),
    }[granularity]  # fmt: skip
    return (1, 1, *tail) if granularity == "tensor" else (batch, heads, *tail)


def _qtensor(case: Case, i: int, name: str) -> str:
    granularity = case.granularity[i]
    shape = _scale_shape(case, name, granularity, case.flat_batch if (case.values_seed + i) % 2 else 1)
    scale = f"(torch.rand({shape}, generator=g) + 0.5) * {CODE_SCALE * case.amplitude}"
    block = case.block_size if granularity == "block" else None
    return f"{name} = intflash.QTensor({name}, ({scale}).to(device), {granularity!r}, {block}, {case.bits})"


def _recipe(case: Case, device: str) -> tuple[str, list[str]]:
    of_floats = [i for i, name in enumerate("qkv") if not case.has_codes(name)]
    given, lines = [repr(case.granularity[i]) for i in of_floats], []
    for i, name in enumerate("qkv"):
        kind, granularity = case.static[i], case.granularity[i]
        if kind is None or granularity == "none":
            continue
        around = CODE_SCALE * case.amplitude
        if kind == "number":
            given.append(f"{name}_scale={around * (0.7 + 0.3 * i)}")
            continue
        shape = _scale_shape(case, name, granularity, case.flat_batch if (case.values_seed + i) % 2 else 1)
        lines.append(f"{name}_scale = ((torch.rand({shape}, generator=g) + 0.5) * {around}).to(device)")
        given.append(f"{name}_scale={name}_scale")
    if any(case.granularity[i] == "block" for i in of_floats):
        given.append(f"block_size={case.block_size}")
    for name, value, usual in (
        ("bits", case.bits, 8), ("smooth_k", case.smooth_k, False), ("rotate", case.rotate, False),
        ("rule", case.rule, "exact"),
    ):  # fmt: skip
        if value != usual:
            given.append(f"{name}={value!r}")
    return f"intflash.Recipe({', '.join(given)})", lines


def mask_shape(case: Case, mask: MaskCase) -> tuple[int, ...]:
    """The shape of a mask or bias of the case."""
    heads = () if case.headless else (case.hq,)
    full = (*case.lead, *heads, case.nq, case.nk)
    shape = []
    for n, kind in zip(reversed(full), mask.axes, strict=False):
        part = next((p for p in range(2, n) if n % p == 0), n)
        shape.append({"full": n, "one": 1, "part": part}[kind])
    return tuple(reversed(shape))


def _mask(case: Case, mask: MaskCase, moved: bool) -> str:
    shape = mask_shape(case, mask)
    absent = f"torch.rand({shape}, generator=g) < {mask.absent}"
    if mask.dead_rows:
        rows = shape[-2] if len(shape) > 1 else 1
        absent = f"({absent}) | (torch.arange({rows})[:, None] % 3 == 0)"
        absent = f"({absent}).reshape({shape})" if len(shape) == 1 else absent
    if mask.kind == "bool":
        values = f"~({absent})"
    else:
        dtype = "float32" if mask.kind == "int32" else mask.kind
        values = f"(torch.randn({shape}, generator=g) * {mask.amplitude}).to(torch.{dtype})"
        lowest = f"torch.finfo(torch.{dtype}).min" if mask.lowest else 'float("-inf")'
        values = f"{values}.masked_fill({absent}, {lowest})"
        if mask.kind == "int32":
            values = f"intflash.quantize_bias({values})"
    layout, offset = ("contiguous", 0) if moved else (mask.layout, mask.offset)
    return _laid_out(f"({values})", shape, layout, offset)


def _offsets(case: Case, name: str) -> str:
    tokens = case.nq if name == "q" else case.nk
    cuts = f"torch.randint(0, {tokens + 1}, ({case.packed - 1},), generator=g).sort().values.tolist()"
    return f"cu_seqlens_{name} = torch.tensor([0, *{cuts}, {tokens}], dtype=torch.int32, device=device)"


def _out_scale(case: Case) -> str:
    b, h, dv = case.flat_batch, case.hq, case.dv
    around = 0.01 * case.amplitude / (1 if (case.out_dtype or "int8") == "int8" else 200)
    if case.out_scale == "number":
        return repr(around)
    if case.out_scale == "dynamic":
        return '"dynamic"'
    shape = {"tensor": (1,), "head": (1, h, 1, 1), "batch_head": (b, h, 1, 1), "channel": (1, h, 1, dv)}[case.out_scale]
    return f"((torch.rand({shape}, generator=g) + 0.5) * {around}).to(device)"


# Each ends a case's code and makes its arguments wrong. Values are looked at only where `check_finite` says so.
FAULTS = {
    "nan": """if isinstance(q, torch.Tensor):
    arguments |= dict(q=q * float("nan"), check_finite=True)""",
    "infinity": """if isinstance(v, torch.Tensor):
    arguments |= dict(v=v + float("inf"), check_finite=True)""",
    "mask_shape": """wrong = q.shape[-2] + 1, k.shape[-2] + 2
arguments["attn_mask"] = torch.ones(wrong, dtype=torch.bool, device=device)""",
    "heads": """arguments["k"] = torch.ones(1, 2, 3, q.shape[-1], device=device)""",
    "no_gqa": """arguments["enable_gqa"] = False""",
    "zero_scale": """arguments["scale"] = 0.0""",
    "negative_scale": """arguments["scale"] = -0.5""",
    "out_scale_of_float": """arguments |= dict(out_dtype=torch.float32, out_scale=0.1)""",
    "zero_out_scale": """zero = torch.zeros(1, device=device)
arguments |= dict(out_dtype=torch.int8, out_scale=zero, check_finite=True)""",
    "offsets": """ends = torch.tensor([0, 2, 1], dtype=torch.int32, device=device)
arguments |= dict(cu_seqlens_q=ends, cu_seqlens_k=ends, check_finite=True)""",
    "granularity": """arguments["recipe"] = intflash.Recipe(q="channel", k="channel")""",
    "bias_nan": """wrong = torch.full((1, k.shape[-2]), float("nan"), device=device)
arguments |= dict(bias=wrong, attn_mask=None, check_finite=True)""",
    "mixed_dtypes": """arguments["k"] = torch.ones(k.shape, dtype=torch.float64, device=device)""",
    "two_biases": """both = torch.zeros(1, k.shape[-2], device=device)
arguments |= dict(bias=both, attn_mask=both)""",
    "empty": """arguments["q"] = torch.ones(0, q.shape[-1], device=device)""",
    "causal_align": "arguments['causal_align'] = 'middle'",
}


@dataclass(frozen=True)
class Place:
    """Where a case runs: a backend by name, on tensors of a device."""

    backend: str
    device: str

    def __str__(self) -> str:
        return self.backend if (self.backend, self.device) in _USUAL else f"{self.backend} on {self.device}"


_USUAL = {("cpu", "cpu"), ("triton", "cuda"), ("torch", "cpu"), ("cuda", "cuda"), ("vortex", "cpu")}


_CALLS = {
    "call": "got = call(arguments, {backend!r})",
    "compiled": """def attend():
    return intflash.attention(**arguments, backend={backend!r})


got = torch.compile(attend, fullgraph=True, backend="aot_eager")()""",
    "graph": """call(arguments, {backend!r})
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    got = call(arguments, {backend!r})
graph.replay()""",
}


def snippet(case: Case, place: Place, stage: str, said: str) -> str:
    """A program that shows a failure with `torch` and `intflash` alone.

    Args:
        stage: what failed: "call", "compiled" or "graph".
        said: what was found, for the comment above.
    """
    made = [(code(case, turn), code(case, turn, place.device)) for turn in case.turns]
    imports = ["import torch", "from torch import Tensor", "", "import intflash"]
    parts = [*(f"# {line}" for line in said.splitlines()), *imports]
    if any("lay_out(" in there for _, there in made):
        parts += ["", "", inspect.getsource(lay_out).rstrip()]
    parts += ["", "", inspect.getsource(call).rstrip(), "", ""]
    for here, there in made:
        parts += [here, 'expected = call(arguments, "reference")']
        if there != here:
            parts.append(there)
        parts += [_CALLS[stage].format(backend=place.backend), 'print(expected, got, sep="\\n")', ""]
    return "\n".join(parts)


def call(arguments: dict, backend: str) -> object:
    """The result of `intflash.attention`, or its error in words."""
    import intflash

    try:
        return intflash.attention(**arguments, backend=backend)
    except Exception as error:  # noqa: BLE001  whatever it is, it is shown
        return f"{type(error).__name__}: {error}"
