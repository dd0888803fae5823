"""What a call costs beside its kernels on a CPU: `python scripts/cpu_call_cost.py OUT.json`.

Microseconds of one thread, medians of turns: torch's SDPA, the backend's `run`, `intflash.attention` made anew each
time and by its plan, with `intflash_p8` on float32.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

import intflash
from intflash import pipeline
from intflash.backends import cpu
from intflash.bench.cpu_attention import WORKLOADS, _inputs
from intflash.bench.measure import environment, time_interleaved


def anew(*tensors: torch.Tensor) -> torch.Tensor:
    plan_or_call, pipeline.plans.run = pipeline.plans.run, lambda call, arguments: call(**arguments)
    try:
        return intflash.attention(*tensors, method="intflash_p8")
    finally:
        pipeline.plans.run = plan_or_call


def main(out: str) -> None:
    torch.set_num_threads(1)
    rows = []
    for workload in WORKLOADS[:7]:
        q, k, v = _inputs(workload)
        problem = pipeline.prepare(q, k, v, method="intflash_p8")[0]
        calls = {
            "torch SDPA": partial(scaled_dot_product_attention, q, k, v),
            "the backend's run": partial(cpu.run, problem),
            "attention, anew": partial(anew, q, k, v),
            "attention, by plan": partial(intflash.attention, q, k, v, method="intflash_p8"),
        }
        times = time_interleaved(list(calls.values()), 4.0, clock=time.thread_time)
        rows += [
            {"workload": workload.name, "series": name, "us": round(1e6 * t, 1)}
            for name, t in zip(calls, times, strict=True)
        ]
        print(workload.name, *(row["us"] for row in rows[-4:]))
    Path(out).write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
