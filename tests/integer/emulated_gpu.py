"""The GPU executor on a Hopper GPU that is emulated: Triton's kernels in its interpreter, CUDA C++ in the PTX emulator.

`python emulated_gpu.py [NAME...]` prints what differs from the reference as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path += map(str, (TESTS, TESTS / "backends" / "triton", TESTS / "machines" / "ptx"))

import emulate  # noqa: E402
import interpreter  # noqa: E402, F401  sets TRITON_INTERPRET before Triton is imported
import torch  # noqa: E402

from integer import gpu_cases  # noqa: E402
from integer.programs import seeded  # noqa: E402
from integer.small_programs import block  # noqa: E402
from intflash.backends import get_backend  # noqa: E402
from intflash.backends.cuda import backend, plans, program  # noqa: E402
from intflash.integer.gpu import executor, padding  # noqa: E402
from intflash.methods import get_method  # noqa: E402
from intflash.problem import Problem  # noqa: E402
from intflash.quant import QTensor  # noqa: E402

PADDED = {  # method, batch, heads, N, D
    "intflash 300": ("intflash", 4, 2, 300, 64),
    "intflash_p8 272": ("intflash_p8", 5, 1, 272, 64),
    "intflash 130 32": ("intflash", 3, 2, 130, 32),
    "intflash streamed 300": ("intflash", 4, 2, 300, 64),
}


def attention_complaint(name: str, method: str, batch: int, heads: int, n: int, d: int) -> str:
    g = torch.Generator().manual_seed(0)
    rows = torch.randint(-127, 128, (batch, n, 3, heads, d), generator=g).to(torch.int8)
    q, k, v = (
        QTensor(x, torch.full((1, 1, 1, 1), scale), "tensor")
        for x, scale in zip(rows.permute(2, 0, 3, 1, 4), (0.02, 0.03, 0.02), strict=True)
    )
    keep = torch.rand(batch, n, generator=g) < 0.6  # anywhere
    keep[0] = True
    keep[1] = torch.arange(n) < 5  # only a first few
    keep[2] = False
    problem = Problem(
        method,
        q,
        k,
        v,
        d**-0.5,
        keep=keep[:, None, None],
        out_dtype=torch.int8,
        out_scale=torch.full((1, 1, 1, 1), 0.02),
    )
    expected = get_method(method).reference(problem).out
    order = padding.key_order(keep)
    gathered = padding.without_masked_keys(problem, order)
    out = torch.full((batch, n, heads, d), 77, dtype=torch.int8).transpose(1, 2)
    plans.FIXED = dict(resident=0) if "streamed" in name else {}
    backend.planned(gathered, out=out, key_counts=order.counts).run()
    wrong = (out != expected).nonzero()
    if not len(wrong):
        return ""
    at = tuple(wrong[0].tolist())
    return f"{len(wrong)} of {out.numel()} differ, first {at}: {int(out[at])}, expected {int(expected[at])}"


def _padded_block() -> gpu_cases.Case:
    made, inputs = block(seeded(2), batch=3, heads=1, tokens=72, head_dim=64, mask="input")
    inputs["mask"][1], inputs["mask"][2] = False, torch.arange(72) < 9
    return made, inputs


WHOLE = {
    "two norms": lambda: gpu_cases.two_norms(seeded(1), 16, 96, True),
    "block with a padding mask": _padded_block,
    "block of windows": lambda: block(
        seeded(3), batch=1, heads=2, tokens=16, head_dim=16, windows=4, bias=True, mask="windows"
    ),
}  # fmt: skip


def complaint(name: str) -> str:
    return attention_complaint(name, *PADDED[name]) if name in PADDED else gpu_cases.complaint(*WHOLE[name]())


if __name__ == "__main__":
    program.CudaLaunch.run = emulate.run
    object.__setattr__(get_backend("cuda"), "unavailable", lambda: None)
    executor._is_for_cuda = lambda problem: True  # the tensors are on the CPU
    torch.set_num_threads(1)
    print(json.dumps({name: complaint(name) for name in sys.argv[1:] or [*PADDED, *WHOLE]}))
