"""Arithmetic alone on a GPU: lite's int32 -> float32 conversion with its machine code, and division by a constant of
the call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from intflash.bench.experiments import Experiment, Figure, Row, Setting, untimed

TOPS = "T operations/s"


def _figure6(setting: Setting) -> Iterator[Row]:
    from benchmarks import conversion_kernels as conversion

    calls = conversion.calls(conversion.DIVISIONS, conversion.division_launch)
    count = conversion.elements(conversion.division_launch("none"))
    seconds = setting.times(calls)
    for name in conversion.DIVISIONS[1:]:
        place = dict(series=name, case="in registers", backend="triton")
        yield Row(metric="G operations/s", value=count / seconds[name] / 1e9, **place)
        yield Row(
            metric="G operations/s, loop subtracted", value=count / (seconds[name] - seconds["none"]) / 1e9, **place
        )


FIGURE6 = Experiment(
    name="qflash_figure6",
    title="Division by the call's constant, three ways",
    source="QFlash, Figure 6, which prints no numbers",
    measure=_figure6,
    figures=(Figure("G operations/s"),),
    notes="int32 by a kernel argument: instruction division (whose reciprocal the compiler takes out of the loop), "
    "(x * round(2^16 / rs)) >> 16, and IEEE float32 division. One exclusive or and one addition a round besides.",
    devices=("cuda",),
)


def _conversion(setting: Setting) -> Iterator[Row]:
    from benchmarks import conversion_kernels as conversion

    calls = conversion.calls(conversion.CONVERSIONS, conversion.conversion_launch)
    count = conversion.elements(conversion.conversion_launch("none"))
    seconds = setting.times(calls)
    for name in conversion.CONVERSIONS[1:]:
        place = dict(series=name, case="conversion and maximum alone", backend="triton")
        yield Row(metric="G scores/s", value=count / seconds[name] / 1e9, **place)
        own = {form: seconds[form] - seconds["none"] for form in conversion.CONVERSIONS[1:]}
        yield Row(metric="speedup over convert", value=seconds["convert"] / seconds[name], **place)
        paper = 2.0 if name == "dual" else None
        yield Row(
            metric="speedup over convert, loop subtracted", value=own["convert"] / own[name], paper=paper, **place
        )
    from intflash.bench.gpu_launches import make_kernel, uniform_inputs

    for d, n in ((128, 4096),) if setting.quick else ((64, 4096), (128, 4096), (128, 16384)):
        inputs = uniform_inputs((4, 32 if d == 64 else 16, n, d), setting.seed)
        times = setting.time([make_kernel(f"lite, {form}", *inputs).launch for form in conversion.CONVERSIONS[1:]])
        for name, time in zip(conversion.CONVERSIONS[1:], times, strict=True):
            place = dict(series=name, case=f"lite kernel D{d} {n // 1024}k", backend="triton")
            paper = 1.035 if name == "dual" else None
            yield Row(metric="speedup over convert", value=times[0] / time, paper=paper, **place)
            yield Row(metric=TOPS, value=4 * inputs[0].numel() * n / time / 1e12, **place)


CONVERSION = Experiment(
    name="lite_conversion",
    title="int32 to float32 in the softmax: I2F, magic addition, dual flow, integer maximum",
    source="LiteAttention v0.4, Dual-Flow Interleaving",
    measure=_conversion,
    figures=(Figure("speedup over convert"), Figure("G scores/s")),
    notes="The article: conversion plus reduction more than 2 times faster, 3 to 4 % of the run time. Alone: a score "
    "tile in registers, converted, its row maxima taken; besides one xor and one FMA a score, also subtracted.",
    devices=("cuda",),
)

_OPCODES = {
    "I2F": ("I2F", "I2FP"), "FMNMX": ("FMNMX", "FMNMX3"), "VIADD, IADD3": ("VIADD", "IADD3"),
    "VIMNMX": ("VIMNMX",), "VIMNMX3": ("VIMNMX3",), "MOV, IMAD.MOV": (), "MUFU": ("MUFU",), "FFMA": ("FFMA",),
    "FADD": ("FADD",), "F2FP": ("F2FP",), "SHFL": ("SHFL",),
}  # fmt: skip


def tile_loop(machine: Any) -> Sequence[Any]:
    """Returns the smallest loop with a tensor product, or the longest loop, which is the one over complete tiles of
    keys.
    """
    loops = list(machine.loops())
    products = [body for body in loops if any("MMA" in i.opcode for i in body)]
    return min(products, key=len) if products else max(loops, key=len)


def _sass(setting: Setting) -> Iterator[Row]:
    from benchmarks import conversion_kernels as conversion
    from benchmarks.sass import compile_launch
    from intflash.backends.gpu.float_softmax import operands
    from intflash.backends.triton import mixed_precision
    from intflash.backends.triton.tile_loop import Statistics, TileShape
    from intflash.methods import get_method
    from intflash.problem import Problem

    for form in conversion.CONVERSIONS[1:]:
        launches = {"alone": (conversion.conversion_launch(form), 64)}
        for d in (64,) if setting.quick else (64, 128):
            x = torch.zeros(1, 1, 1024, d)
            problem = Problem("lite", x, x, x, d**-0.5, recipe=get_method("lite").recipe, out_dtype=torch.bfloat16)
            problem, out = problem.quantized(), x.bfloat16()
            none, tile = Statistics(None, None), TileShape(64, 128, 4, 2)
            parts = operands(problem)
            launches[f"kernel D{d}"] = (
                mixed_precision.mixed_launch(problem, parts, out, none, tile, form),
                64,
            )
        for case, (launch, scores) in launches.items():
            setting.log(f"{form} {case}")
            body = tile_loop(compile_launch(launch, 90))
            for label, count in _count(body).items():
                yield Row(form, f"{case}: {label}", "sm_90 instructions per score", count / scores, backend="triton")
            yield Row(form, f"{case}: all", "sm_90 instructions per score", len(body) / scores, backend="triton")


def _count(body: Sequence[Any]) -> dict[str, int]:
    opcodes = Counter(i.opcode for i in body)
    found = {label: sum(opcodes[name] for name in names) for label, names in _OPCODES.items()}
    found["MOV, IMAD.MOV"] = opcodes["MOV"] + sum(i.text.startswith("IMAD.MOV") for i in body)
    return found


SASS = untimed(
    name="lite_sass",
    title="The forms of the conversion in machine code",
    source="LiteAttention v0.4, note 4 (the SASS reflects the two flows)",
    measure=_sass,
    notes="Compiled for sm_90, counted in the loop over complete tiles; no GPU is needed.",
)

EXPERIMENTS: tuple[Experiment, ...] = (CONVERSION, SASS, FIGURE6)
