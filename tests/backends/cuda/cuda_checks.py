"""What the tests of the CUDA kernels share: comparison with the reference, and compilation without a GPU."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "triton"))

import integer_cases as ic  # noqa: E402

from benchmarks import sass  # noqa: E402
from intflash.backends.cuda import BACKEND, backend, plans  # noqa: E402
from intflash.backends.cuda.plans import Plan  # noqa: E402
from intflash.backends.cuda.program import CudaLaunch, compile_program  # noqa: E402
from intflash.backends.reference import BACKEND as REFERENCE  # noqa: E402
from intflash.numerics import exp  # noqa: E402
from intflash.problem import Problem, Result  # noqa: E402
from intflash.quant import QTensor, Recipe  # noqa: E402

needs_device = pytest.mark.skipif(BACKEND.unavailable() is not None, reason=str(BACKEND.unavailable()))
HOPPER = (132, 9, 0, 227 << 10)  # see `plans.gpu_of`
BITS = {"intflash_p8": 8, "intflash": 16}
OF_HEADS = Recipe(q="head", k="head", v="head")  # dynamic scales
OF_TENSORS = Recipe(q="tensor", k="tensor", v="tensor")


def differences(cases: Iterable[tuple[str, Problem]], kernel: str) -> dict[str, str]:
    """Returns the differences from the reference, by case, of `kernel`, also where a plan would choose another."""
    wrong = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "FIXED", plans.FIXED | {"kernel": kernel})
        for name, p in cases:
            there = ic.on_device(p, "cuda")
            assert BACKEND.unsupported(there) is None and plans.find_kernel(there).kernel == kernel, name
            if found := complaint(p, BACKEND.run(there)):
                wrong[name] = found
    return wrong


def unserved(cases: Iterable[tuple[str, Problem]], kernel: str, gpu: tuple[int, int, int, int]) -> list[str]:
    """Returns the cases that `kernel` does not serve on a GPU (see `plans.gpu_of`), which need not be here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "FIXED", plans.FIXED | {"kernel": kernel})
        patch.setattr(plans, "gpu_of", lambda device: gpu)
        return [name for name, p in cases if plans.find_kernel(p).kernel != kernel]


def complaint(p: Problem, got: Result) -> str | None:
    """Returns how a result differs from the reference's, or None."""
    want = REFERENCE.run(p.quantized())
    if not torch.equal(want.out, got.out.cpu()):
        return f"{(want.out != got.out.cpu()).double().mean():.5f} of the outputs differ"
    if want.lse is not None and not torch.allclose(want.lse, got.lse.cpu(), rtol=1e-6, atol=1e-6):
        return "log-sum-exp differs"
    return None


def floats(
    method: str, batch: int, n: int, d: int, dtype: torch.dtype, recipe: Recipe, spread: float = 1.0, **more
) -> Problem:
    """Makes four query heads on two key heads, with some values far outside a static scale's range and one subnormal
    value.
    """
    q, k, v = (torch.randn(batch, h, n, d) * spread for h in (4, 2, 2))
    for x in (q, k, v):
        x[0, 1, 3, 5], x[1, 0, 7, 2], x[1, 1, 0, 0] = 60000, -60000, 2**-24
    q, k, v = (x.to(dtype) for x in (q, k, v))
    return Problem(method, q, k, v, d**-0.5, recipe=recipe, **(dict(out_dtype=dtype) | more))


def rising(method: str, nq: int, nk: int, d: int) -> Iterator[tuple[str, Problem]]:
    """Yields problems whose scores rise from tile to tile, by hundreds of octaves, by some, or by parts of one, with
    score units from tiny ones to several octaves. In a third of the rows all score magnitudes occur.
    """
    q = torch.randint(1, 3, (1, 2, nq, d)) * torch.randint(0, 2, (1, 2, nq, d))
    q[:, :, ::3] *= 63
    q[:, :, 1::3] *= 4
    q[:, :, 2::3] = torch.arange(d) == 0
    k = (torch.arange(nk) * 127 // nk)[:, None] - (torch.rand(nk, d) < 0.3).int()
    k = torch.where(torch.rand(nk, 1) < 0.5, k, (k * torch.rand(nk, 1)).int()).expand(1, 2, nk, d)
    q, k, v = (x.to(torch.int8) for x in (q, k, torch.randint(-127, 128, (1, 2, nk, d))))
    q, k, v = (QTensor(x, torch.full((1, 1, 1, 1), s), "tensor") for x, s in ((q, 1.0), (k, 1.0), (v, 0.02)))
    for unit in (1e-7, 3e-6, 3e-5, 5e-5, 3e-4, 2.4e-3, 9e-3, 0.05, 0.08, 0.11, 0.17, 0.23, 0.3, 0.37, 2.0, 80.0):
        yield f"rising {unit} {d}", Problem(method, q, k, v, unit / exp.LOG2_E, out_dtype=torch.int8, return_lse=True)


def spans(method: str, nq: int, nk: int, d: int) -> Iterator[tuple[str, Problem]]:
    """Yields problems with keys up to 150 to 300 octaves below a row's maximum, where 32 bits stop to hold T + B and
    where they wrap.

    Some rows have the largest possible score differences, some only small scores; some queries have small codes.
    """
    q = torch.randint(0, 2, (1, 2, nq, d)) * 254 - 127
    q[:, :, 16:32] = torch.randint(-9, 10, (1, 2, min(nq, 32) - 16, d))
    k = torch.randint(-127, 128, (1, 2, nk, d))
    k[:, :, nk // 2], k[:, :, nk - 3] = q[:, :, 0], -q[:, :, 0]
    q, k, v = (x.to(torch.int8) for x in (q, k, torch.randint(-127, 128, (1, 2, nk, d))))
    one = torch.ones(1, 1, 1, 1)
    q, k, v = (QTensor(x, s, "tensor") for x, s in ((q, one), (k, one), (v, one * 0.02)))
    for octaves in (150.0, 222.5, *range(224, 246), 256.0, 270.3, 300.0):
        unit = octaves / (2 * 127 * 127 * d)
        yield f"span {octaves} {d}", Problem(method, q, k, v, unit / exp.LOG2_E, out_dtype=torch.int8, return_lse=True)


# Types for which each kernel is compiled; float16 in every test run.
COMPILED_FLOATS = (torch.float16, *(pytest.param(x, marks=pytest.mark.full) for x in (torch.bfloat16, torch.float32)))


def in_full_but(kept: tuple, values: Iterable) -> list:
    """Parameters of a test that compiles kernels; those that are not kept run with `full` only."""
    return [x if x in kept else pytest.param(x, marks=pytest.mark.full) for x in values]


def empty_problem(
    method: str, n: int, d: int, dtype=torch.int8, out=torch.int8, key_major=False, batch=2, heads=2, device="meta",
    **more,
) -> Problem:  # fmt: skip
    """Returns a problem without data, to plan its launches and compile their kernels."""
    shape, like = (batch, heads, n, d), dict(dtype=dtype, device=device)
    if dtype == torch.int8:
        q = k = v = QTensor(torch.zeros(shape, **like), torch.ones(1, 1, 1, 1, device=device), "tensor")
        if key_major:
            rows = torch.zeros(batch, heads, d, -(-n // 128) * 128, **like)
            v = QTensor(rows[..., :n].mT, v.scale, "tensor")
    else:
        q = k = v = torch.zeros(shape, **like)
    return Problem(method, q, k, v, d**-0.5, out_dtype=out, **more)


def planned(problem: Problem, gpu: tuple[int, int, int, int] | None = None, **fixed: plans.Choice) -> Plan:
    """Returns the plan of a problem. gpu: see `plans.gpu_of`; fixed: choices in place of the plan's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "FIXED", fixed)
        if gpu is not None:
            patch.setattr(plans, "gpu_of", lambda device: gpu)
        return backend.planned(problem)


def attention_launch(problem: Problem, **options) -> CudaLaunch:
    """Returns the last launch of `planned`."""
    return planned(problem, **options).launches[-1]


def macros(launch: CudaLaunch) -> dict[str, str]:
    return dict(launch.program.macros)


class View(ctypes.Structure):
    _fields_ = [("ptr", ctypes.c_void_p), *((name, ctypes.c_int64) for name in "bhnd")]


class Share(ctypes.Structure):
    """`Share` of params.cuh, as far as tests read what the tile scheduler hands out."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("whole", "rest", "rest_tiles")),
        *((name, ctypes.c_uint32) for name in ("whole_of_all", "pieces", "first")),
    ]  # fmt: skip


# Bytes before `share` in `Params` of params.cuh: views, statistics, scale, 13 numbers of 4 bytes.
_SHARE = 12 * ctypes.sizeof(View) + 3 * 8 + 13 * 4


def share_of(launch: CudaLaunch) -> Share:
    return Share.from_buffer_copy(launch.parameters[_SHARE:])


def tiles_of_cta(launch: CudaLaunch) -> int:
    """`tiles` of `Params`, the eighth of the numbers before `share`."""
    return ctypes.c_int32.from_buffer_copy(launch.parameters[_SHARE - 6 * 4 :]).value


def view_of(launch: CudaLaunch, index: int) -> View:
    """The view of that number in the launch's parameters, which begin with an array of them."""
    return View.from_buffer_copy(launch.parameters[index * ctypes.sizeof(View) :])


def machine(launch: CudaLaunch, architecture: str = "sm_90a") -> sass.Machine:
    """Returns the launch's machine code. The test is skipped where there is no NVRTC."""
    pytest.importorskip("cuda.bindings.nvrtc")
    pytest.importorskip("triton", reason="cuobjdump comes with Triton")
    code = compile_program(launch.program, architecture).cubin
    number = int(architecture[3:].rstrip("a"))
    return sass.machine(code, launch.program.file, number, launch.shared_bytes, launch.threads // 32)
