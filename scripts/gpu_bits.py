"""Quick bits check on this GPU against the reference on the CPU (the tests under tests/backends/triton go deeper)."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import multiprocessing
import sys

import torch

from intflash.backends.reference import BACKEND as REFERENCE
from intflash.backends.triton import BACKEND
from intflash.problem import Problem
from intflash.quant import QTensor, quantize


def to(x, device):
    if isinstance(x, QTensor):
        return dataclasses.replace(x, data=x.data.to(device), scale=x.scale.to(device))
    return x.to(device) if isinstance(x, torch.Tensor) else x


def problem(method, B=1, H=2, Nq=70, Nk=150, D=32, Dv=None, hk=None, amax=4.0, kinds=("tensor",) * 3, **options):
    hk = hk or H
    floats = torch.rand(B, H, Nq, D), torch.rand(B, hk, Nk, D), torch.rand(B, hk, Nk, Dv or D)
    q, k, v = (quantize((x * 2 - 1) * amax, g, block_size=32) for x, g in zip(floats, kinds))
    return Problem(method, q, k, v, D**-0.5, **options)


def cases(method):
    i8, i16, f32, f16 = torch.int8, torch.int16, torch.float32, torch.float16
    for n, d in itertools.product((17, 49, 64, 197, 256, 300, 1024), (17, 32, 64, 80, 128, 256)):
        yield f"n{n} d{d}", problem(method, Nq=n, Nk=n, D=d, out_dtype=i8, return_lse=True)
    for dtype in (i16, f32, f16, torch.bfloat16):
        yield f"{dtype}", problem(method, out_dtype=dtype)
        yield f"{dtype} long", problem(method, Nq=300, Nk=600, D=64, out_dtype=dtype)
    for o, (nq, nk) in itertools.product((0, 80, -30), ((70, 150), (300, 520))):
        yield f"causal {o} {nq}", problem(method, Nq=nq, Nk=nk, causal=o, out_dtype=i8, return_lse=True)
    for nq, nk in ((70, 150), (300, 520)):
        shape = dict(Nq=nq, Nk=nk, out_dtype=i8)
        yield "gqa", problem(method, H=4, hk=2, D=17, Dv=20, **shape)
        bias = torch.randint(-(2**22), 2**22, (2, 1, 1, nk), dtype=torch.int32)
        bias[torch.rand(bias.shape) < 0.3] = -(2**31)
        yield "bias", problem(method, B=4, bias=bias, **shape)
        yield "bias full", problem(method, B=2, bias=torch.randint(-(2**22), 2**22, (1, 2, nq, nk), dtype=torch.int32), **shape)
        yield "keep", problem(method, B=2, keep=torch.rand(2, 1, nq, nk) < 0.5, **shape)
        yield "token", problem(method, kinds=("token", "head", "channel"), **shape)
        yield "block", problem(method, kinds=("token", "block", "tensor"), causal=5, **shape)
        for amax in (1e-6, 500.0, 50000.0):
            yield f"amax {amax}", problem(method, amax=amax, **shape)
    cu_q, cu_k = torch.tensor([0, 20, 20, 300], dtype=torch.int32), torch.tensor([0, 33, 300, 520], dtype=torch.int32)
    yield "packed", problem(method, Nq=300, Nk=520, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=0,
                            causal_align="bottom_right", out_dtype=i8, return_lse=True)  # fmt: skip


METHODS = ("intflash", "intflash_p8", "intflash_online")
WORKERS = 15


def check(worker: int) -> tuple[int, list[str]]:
    """This worker's share of the cases: how many, and what differs."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    reports, total = [], 0
    for i, (method, (name, cpu)) in enumerate((m, c) for m in METHODS for c in cases(m)):
        if i % WORKERS != worker:
            continue
        total += 1
        try:
            gpu = dataclasses.replace(cpu, **{f.name: to(getattr(cpu, f.name), "cuda") for f in dataclasses.fields(cpu)})
            want, got = REFERENCE.run(cpu), BACKEND.run(gpu)
            out = got.out.cpu()
            if not torch.equal(want.out, out):
                reports.append(f"DIFFERS {method} {name} {(want.out != out).float().mean().item():.4f}")
            if want.lse is not None and not torch.allclose(want.lse, got.lse.cpu(), rtol=1e-6, atol=1e-6):
                reports.append(f"LSE {method} {name}")
            if want.out_scale is not None and not torch.equal(want.out_scale, got.out_scale.cpu().expand_as(want.out_scale)):
                reports.append(f"SCALE {method} {name}")
        except Exception as error:
            reports.append(f"FAILED {method} {name} {type(error).__name__} {str(error)[:200]}")
    return total, reports


def main() -> int:
    context = multiprocessing.get_context("spawn")
    total, reports = 0, []
    with concurrent.futures.ProcessPoolExecutor(WORKERS, mp_context=context) as pool:
        for count, found in pool.map(check, range(WORKERS)):
            total += count
            reports += found
    print("\n".join(sorted(reports)[:60]))
    print(f"bits: {total} cases, {len(reports)} reports", flush=True)
    return len(reports)


if __name__ == "__main__":
    sys.exit(main())
