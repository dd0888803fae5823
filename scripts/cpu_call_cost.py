"""What a call costs beside its kernels on a CPU: `python scripts/cpu_call_cost.py OUT.json`.

Microseconds of one thread, medians of turns in random order: torch's SDPA, the backend's `run`, `intflash.attention`
made anew each time and by its plan, with `intflash_p8` on float32.
"""

from __future__ import annotations

import json
import random
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch.nn.functional import scaled_dot_product_attention

import intflash
from intflash import pipeline
from intflash.backends import cpu
from intflash.bench.cpu_attention import WORKLOADS, _inputs
from intflash.bench.measure import environment

TURNS = 600


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
        taken = {name: [] for name in calls}
        for _ in range(TURNS):
            for name in random.sample(list(calls), len(calls)):  # none always after the same one
                start = time.thread_time()
                calls[name]()
                taken[name].append(time.thread_time() - start)
        rows += [
            {"workload": workload.name, "series": name, "us": round(1e6 * median(times), 1)}
            for name, times in taken.items()
        ]
        print(workload.name, *(row["us"] for row in rows[-4:]))
    Path(out).write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
