"""Print a digest of the machine code of every GPU kernel, compiled without a GPU. Renaming alone does not change them.

    python -m benchmarks.kernel_digests > before.json
    python -m benchmarks.kernel_digests --compare before.json

The digest covers the instructions with their scheduling bits, the register count and the constant data of a cubin, not
its symbols or its debug information. `--quick` compiles a part.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import pathlib
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks import sass
from intflash.backends.cuda import backend as cuda
from intflash.backends.cuda import long_rows_float
from intflash.backends.cuda.program import CudaLaunch, compile_program
from intflash.backends.gpu import float_softmax
from intflash.backends.gpu import scales as gpu_scales
from intflash.backends.gpu.constants import Constants
from intflash.backends.gpu.scales import FloatInputs, Qkv
from intflash.backends.gpu.tensors import Statistics, view
from intflash.backends.triton import mixed_precision, quantize, short_rows, specializations, unfused
from intflash.backends.triton.constants import constants_launch
from intflash.backends.triton.launch import TritonLaunch
from intflash.methods import get_method
from intflash.problem import Problem
from intflash.quant import QTensor, Recipe

ARCH = 90
_SECTIONS = (".text.", ".nv.constant", ".nv.global", ".rodata")
_FLOAT_TYPES = (torch.float16, torch.bfloat16, torch.float32)


def digest(cubin: bytes) -> str:
    """The digest of the code and constants of a cubin, an ELF file, without the names of sections and symbols."""
    table, size, count, names_at = struct.unpack_from("<Q", cubin, 40) + struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * size) for i in range(count)]
    names = headers[names_at][4]
    found = []
    for name, kind, _, _, offset, length, _, info, _, _ in headers:
        text = cubin[names + name : cubin.index(b"\0", names + name)].decode()
        section = next((s for s in _SECTIONS if text.startswith(s)), None)
        if section:
            registers = info >> 24 if section == ".text." else 0
            content = b"" if kind == 8 else cubin[offset : offset + length]  # 8: a section without bytes in the file
            found.append((section, registers, length, hashlib.sha256(content).hexdigest()))
    return hashlib.sha256(repr(sorted(found)).encode()).hexdigest()[:20]


def _ones() -> torch.Tensor:
    return torch.ones(1, 1, 1, 1)


def triton_launches(quick: bool) -> Iterator[tuple[str, TritonLaunch]]:
    """The integer kernels, the float-softmax and the unfused ones, and those that quantize."""
    for name in specializations.names(quick):
        yield name, specializations.launch(name, ARCH)
    masks = dict(
        plain={},
        causal=dict(causal=80),
        masks=dict(keep=torch.ones(3, 1, 70, 150, dtype=torch.bool), bias_float=torch.zeros(3, 1, 1, 150), causal=0),
    )
    for method, (mask, options) in itertools.product((*mixed_precision.STEPS, *unfused.METHODS), masks.items()):
        if not quick or mask == "masks":
            for i, launch in enumerate(_float_launches(method, **options)):
                yield f"{method} {mask} {i}", launch
    for method in specializations.OURS:
        yield f"constants {method}", constants_launch(_codes(method, 49, 32))[0]
    for d, dtype in itertools.product((64, 72), _FLOAT_TYPES):
        x = torch.zeros(2, 3, 50, d, dtype=dtype)
        inputs = FloatInputs(Qkv(x, x, x), Qkv(_ones(), _ones(), _ones()))
        yield f"quantize {dtype} {d}", quantize.quantize_launch(inputs)[0]
        for recipe in (Recipe("tensor", "tensor", "tensor"), Recipe()):
            found = gpu_scales.dynamic_scales(Qkv(x, x, x), recipe)
            yield f"amax {dtype} {d} {recipe.q}", quantize.amax_launch(Qkv(x, x, x), found)
        for method, bits in (("intflash", 16), ("intflash_p8", 8)):
            problem = Problem(method, x, x, x, d**-0.5, recipe=get_method(method).recipe, out_dtype=dtype)
            views = Qkv(*(view(_ones()) for _ in range(3)))
            arguments = Constants(None, None, views.v), torch.empty_like(x), Statistics(None, None), views
            yield f"floats {method} {dtype} {d}", short_rows.short_rows_launch(problem, bits, *arguments)


def _float_launches(method: str, **options: Any) -> Iterator[TritonLaunch]:
    q, k = torch.zeros(6, 2, 70, 64), torch.zeros(6, 2, 150, 64)
    problem = Problem(method, q, k, k, 0.125, recipe=get_method(method).recipe, out_dtype=torch.float16, **options)
    problem, out = problem.quantized(), torch.empty(6, 2, 70, 64, dtype=torch.float16)
    if method in unfused.METHODS:
        yield from unfused.unfused_launches(problem, out, [None] * 3)[0]
    else:
        yield mixed_precision.mixed_launch(problem, float_softmax.operands(problem), out, Statistics(None, None))


def _codes(method: str, n: int, d: int, kinds: tuple[str, str, str] = ("tensor",) * 3, **options: Any) -> Problem:
    q, k, v = (specializations.codes((2, 2, n, d), kind, "cpu") for kind in kinds)
    return Problem(method, q, k, v, d**-0.5, **dict(out_dtype=torch.int8) | options)


def cuda_launches(quick: bool) -> Iterator[tuple[str, CudaLaunch]]:
    """The kernels of csrc/cuda, with the macros of a selection of calls."""
    shapes = ((49, 32), (64, 64), (197, 64), (1024, 128)) if quick else (
        (16, 16), (49, 32), (64, 64), (100, 128), (197, 64), (224, 80), (300, 16), (577, 64), (1024, 64), (1024, 128),
    )  # fmt: skip
    for method, (n, d) in itertools.product(specializations.OURS, shapes):
        problems = {"codes": _codes(method, n, d)}
        problems["causal token int16"] = _codes(
            method, n, d, ("token", "head", "head"), causal=0, out_dtype=torch.int16, return_lse=True
        )
        if n <= 64 and method in ("intflash", "intflash_p8"):
            masks = dict(bias=torch.zeros(2, 2, n, n, dtype=torch.int32), keep=torch.ones(2, 1, n, n, dtype=torch.bool))
            problems["masked"] = _codes(method, n, d, return_lse=True, **masks)
        for dtype in _FLOAT_TYPES[: 1 if quick else 3]:
            x = torch.zeros(2, 2, n, d, dtype=dtype)
            problems[f"floats {dtype}"] = Problem(
                method, x, x, x, d**-0.5, recipe=get_method(method).recipe, out_dtype=dtype
            )
        for name, problem in problems.items():
            yield f"cuda {method} n{n} d{d} {name}", _cuda_launch(problem)
    for method, k in itertools.product(long_rows_float.METHODS, ("head", "token")):
        for d, causal in ((64, None), (128, 0)):
            problem = Problem(
                method, *(torch.zeros(1, 2, 512, d, dtype=torch.float16) for _ in "qkv"), d**-0.5,
                recipe=get_method(method).recipe, out_dtype=torch.float16, causal=causal,
            ).quantized()  # fmt: skip
            problem = _with_keys(problem, k)
            out, statistics = torch.empty(1, 2, 512, d, dtype=torch.float16), Statistics(None, None)
            yield (
                f"cuda {method} {k} d{d}",
                long_rows_float.float_launch(problem, float_softmax.operands(problem), out, statistics),
            )
    for dtype in _FLOAT_TYPES:
        x = torch.zeros(2, 3, 300, 64, dtype=dtype)
        for recipe in (Recipe("tensor", "tensor", "tensor"), Recipe()):
            problem = Problem("intflash_p8", x, x, x, 0.125, recipe=recipe, out_dtype=torch.int8, causal=0)
            maxima, _, codes, _ = cuda.planned(problem).launches
            yield f"cuda amax {dtype} {recipe.q}", maxima
        yield f"cuda quantize {dtype}", codes
    for method in specializations.OURS:
        yield f"cuda constants {method}", cuda.planned(_codes(method, 49, 32), only_constants=True).launches[0]


def _with_keys(problem: Problem, kind: str) -> Problem:
    k = problem.k
    return replace(problem, k=QTensor(k.data, specializations.codes(tuple(k.data.shape), kind, "cpu").scale, kind))


def _cuda_launch(problem: Problem) -> CudaLaunch:
    """The attention launch of a problem, for floats with static scales."""
    if isinstance(problem.q, torch.Tensor):
        problem = replace(problem, recipe=Recipe(q_scale=0.5, k_scale=0.25, v_scale=0.125))
    return cuda.planned(problem).launches[-1]


def digests(quick: bool, backends: Sequence[str]) -> dict[str, str]:
    """The digests by the names of calls. A program that several calls share is compiled once."""
    found, programs = {}, {}
    for name, launch in cuda_launches(quick) if "cuda" in backends else ():
        if launch.program not in programs:
            programs[launch.program] = digest(compile_program(launch.program).cubin)
        found[name] = programs[launch.program]
    for name, launch in triton_launches(quick) if "triton" in backends else ():
        found[name] = digest(sass.compiled(launch, ARCH).asm["cubin"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compare", type=pathlib.Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--backends", nargs="+", default=["cuda", "triton"])
    options = parser.parse_args()
    found = digests(options.quick, options.backends)
    if options.compare is None:
        print(json.dumps(found, indent=1))
        return
    before = json.loads(options.compare.read_text())
    compared = [name for name in found if name in before]
    changed = [name for name in compared if before[name] != found[name]]
    print(f"{len(compared) - len(changed)} kernels have the same machine code, {len(changed)} another")
    print(f"{len(found) - len(compared)} are not in {options.compare}")
    print("\n".join(changed))
    sys.exit(bool(changed))


if __name__ == "__main__":
    main()
