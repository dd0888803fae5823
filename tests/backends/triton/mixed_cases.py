"""Small problems for the float-softmax and unfused methods, and tolerances of their Triton kernels.

`python mixed_cases.py METHOD...` runs them in Triton's interpreter and prints a report as JSON. `golden` reports the
distance from the outputs of the authors' programs.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from collections.abc import Iterator

if __name__ == "__main__":
    import interpreter  # noqa: F401  sets TRITON_INTERPRET before Triton is imported

import numpy as np
import torch

from intflash.backends.base import Backend
from intflash.backends.reference import BACKEND as REFERENCE
from intflash.backends.triton import BACKEND
from intflash.methods import get_method
from intflash.problem import Problem
from intflash.quant import QTensor, Recipe

# SQNR against the reference in dB. The differences are the order of float sums, P rounded against the tile's maximum
# (int8, e4m3), and roundings that fall the other way (bfloat16). The interpreter's e4m3 rounds some carries wrongly.
LEAST_DB = {
    "int_flash_full": 45, "int_flash_half": 70, "lite": 50, "qattn": 50, "fp16": 60, "bf16": 50, "fp32": 90,
    "fp8": 28, "fp8_head": 28,
}  # fmt: skip
UNFUSED = ("ivit", "ibert", "fqvit")  # compared bit for bit
METHODS = (*LEAST_DB, *UNFUSED)


def problem(method, batch=1, heads=2, nq=70, nk=150, d=32, dv=None, key_heads=None, recipe=None, **options) -> Problem:
    key_heads = key_heads or heads
    shapes = (batch, heads, nq, d), (batch, key_heads, nk, d), (batch, key_heads, nk, dv or d)
    q, k, v = (torch.rand(shape) * 8 - 4 for shape in shapes)
    options = dict(out_dtype=torch.float32, return_lse=True) | options
    return Problem(method, q, k, v, d**-0.5, recipe=recipe or get_method(method).recipe, **options)


def cases(method: str, large: bool = False) -> Iterator[tuple[str, Problem]]:
    """Named problems of a method; `large` adds the shapes that the interpreter is too slow for."""
    sizes = ((17, 17), (49, 32)) if method in UNFUSED else ((17, 17), (49, 32), (130, 64))
    for n, d in sizes + (((197, 64), (300, 80), (520, 128), (130, 256)) if large else ()):
        yield f"n{n} d{d}", problem(method, nq=n, nk=n, d=d)
    yield "causal", problem(method, nq=40, nk=200, causal=160)
    yield "rows without keys", problem(method, nq=70, nk=50, causal=-20)
    yield "gqa", problem(method, heads=4, key_heads=2, dv=20, nq=20)
    bias = torch.randn(2, 1, 1, 150).masked_fill(torch.rand(150) < 0.2, -torch.inf)
    yield "bias", problem(method, batch=4, heads=1, nq=20, bias_float=bias)
    yield "keep", problem(method, batch=2, heads=1, keep=torch.rand(2, 1, 70, 150) < 0.5)
    yield "keep causal", problem(method, batch=2, heads=1, keep=torch.rand(2, 1, 70, 150) < 0.5, causal=80)
    masks = dict(keep=torch.rand(3, 1, 1, 150) < 0.5, bias_float=bias)
    yield "bias, keep, causal, fewer batches", problem(method, batch=6, heads=1, nq=20, causal=140, **masks)
    yield "int8 out", problem(method, out_dtype=torch.int8)
    half = torch.bfloat16 if large or method not in UNFUSED else torch.float16  # the interpreter truncates to bfloat16
    yield f"{half} out", problem(method, out_dtype=half)
    if method in UNFUSED:
        tiny = Recipe(rule="divide", q_scale=1e-20, k_scale=0.03, v_scale=0.03)
        yield "unchecked unit below 2^-30", problem(method, nq=20, recipe=tiny)
    if method in ("int_flash_full", "int_flash_half", "lite"):
        v = "head" if method == "int_flash_full" else "none"
        for k in ("tensor", "head", "token", "block"):
            yield f"k {k}", problem(method, nk=200, recipe=Recipe(q="token", k=k, v=v, block_size=64))
    if method == "int_flash_full":
        for v in ("tensor", "channel", "block"):
            yield f"v {v}", problem(method, nk=200, recipe=Recipe(q="token", k="token", v=v, block_size=64))
    if method not in (*UNFUSED, "lite", "fp8", "fp8_head"):
        ends = [torch.tensor(x, dtype=torch.int32) for x in ((0, 20, 20, 70), (0, 33, 90, 150))]
        yield "packed", problem(method, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1])


def _moved(x: torch.Tensor, device: str) -> torch.Tensor:
    """Moves a tensor with its strides and the memory between its elements, which `to` drops."""
    whole = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return whole.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


def on_device(p: Problem, device: str) -> Problem:
    def move(x):
        if isinstance(x, QTensor):
            return dataclasses.replace(x, data=_moved(x.data, device), scale=_moved(x.scale, device))
        return _moved(x, device) if isinstance(x, torch.Tensor) else x

    return dataclasses.replace(p, **{f.name: move(getattr(p, f.name)) for f in dataclasses.fields(p)})


def complaint(p: Problem, device: str = "cpu", backend: Backend = BACKEND) -> str | None:
    """Returns how the backend's result fails, or None."""
    there = on_device(p, device)
    reason = backend.unsupported(there)
    if reason:
        return f"unsupported: {reason}"
    want, got = REFERENCE.run(p), backend.run(there)
    a, b = want.out.double(), got.out.cpu().double()
    if p.method in UNFUSED:
        if not torch.equal(a, b):
            return f"{(a != b).double().mean():.5f} of the outputs differ"
    else:
        db = 20 * torch.log10(a.norm() / (a - b).norm()).item()
        least = 30 if p.out_dtype == torch.int8 else 45 if p.out_dtype == torch.bfloat16 else LEAST_DB[p.method]
        if not db >= min(least, LEAST_DB[p.method]):
            return f"{db:.1f} dB from the reference"
    lse = got.lse.cpu()
    if not torch.allclose(want.lse, lse, rtol=1e-3, atol=0.05 if p.method.startswith("fp8") else 2e-3):
        return f"log-sum-exp off by {(want.lse - lse).abs().max():.2g}"
    return None


def golden_db(
    device: str = "cpu", backend: Backend = BACKEND, kinds: tuple[str, ...] = ("half", "full")
) -> dict[str, float]:
    """Returns the SQNR of the int_flash kernels against outputs of the authors' kernels on an H200 (tests/golden),
    in dB.
    """
    found = {}
    z = np.load(pathlib.Path(__file__).parents[2] / "golden" / "intflash_published.npz")
    for case, causal in (("n256", None), ("u256", None), ("c128", 0)):
        q, k, v, vf, qs, ks, vs = (torch.from_numpy(z[f"{case}.{x}"]) for x in ("q", "k", "v", "vf", "qs", "ks", "vs"))
        q, k = (QTensor(x, s.float()[..., None], "token") for x, s in ((q, qs), (k, ks)))
        values = {"half": vf, "full": QTensor(v, vs.float(), "head")}
        for kind in kinds:
            value = values[kind]
            if kind == "half" or causal is None:  # the authors' full kernel is wrong under causal masking
                p = Problem(
                    f"int_flash_{kind}", q, k, value, q.shape[3] ** -0.5, causal=causal, out_dtype=torch.float16
                )
                out = backend.run(on_device(p, device)).out.cpu().double()
                want = torch.from_numpy(z[f"{case}.{kind}"]).double()
                found[f"{case} {kind}"] = 20 * torch.log10(want.norm() / (out - want).norm()).item()
    return found


def raised_report() -> dict[str, str | None]:
    """Reports `int_flash_half` with the integer maximum, which the benchmark times."""
    from intflash.backends.triton import mixed_precision

    mixed_precision.CONVERSION["int_flash_half"] = "biased"
    return report(["int_flash_half"])


def report(methods: list[str]) -> dict[str, str | None]:
    torch.manual_seed(0)
    return {f"{method}, {name}": complaint(p) for method in methods for name, p in cases(method)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    special = {"golden": golden_db, "int_flash_half, integer maximum": raised_report}
    print(json.dumps(special[sys.argv[1]]() if sys.argv[1] in special else report(sys.argv[1:])))
