"""Host time of a call on a GPU, without torch.compile: `python3 -m benchmarks.call_cost OUT.json [LABEL]`.

Microseconds of Python until the work is queued, the fastest of several runs of 300 calls, beside torch's SDPA. The
first call of a signature, which compiles, and the second, which records the launches, are not included.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

import intflash
from intflash.bench.measure import environment

SHAPES = {"A4": (64, 3, 49, 32), "A2": (1, 6, 197, 64), "N1024": (1, 4, 1024, 64)}
METHODS = ("intflash_p8", "intflash", "intflash_online")
STATIC = intflash.Recipe(q_scale=0.03, k_scale=0.03, v_scale=0.03)


def host_time(call: Callable[[], object], calls: int = 300, runs: int = 7) -> float:
    for _ in range(20):
        call()
    times = []
    for _ in range(runs):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls)
    return round(1e6 * min(times), 1)


def main(out: str, label: str = "") -> None:
    rows = []
    for name, shape in SHAPES.items():
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.float16) for _ in "qkv")
        codes = [intflash.quantize(x) for x in (q, k, v)]
        calls = {"torch SDPA": partial(scaled_dot_product_attention, q, k, v)}
        for method in METHODS:
            attention = partial(intflash.attention, method=method)
            calls[f"{method}, static scales"] = partial(attention, q, k, v, recipe=STATIC)
            calls[f"{method}, dynamic scales"] = partial(attention, q, k, v)
            calls[f"{method}, int8 in and out"] = partial(attention, *codes)
        rows += [{"shape": name, "series": series, "us": host_time(call)} for series, call in calls.items()]
    Path(out).write_text(json.dumps({"label": label, "environment": environment(), "rows": rows}, indent=1) + "\n")
    for row in rows:
        print(label, *row.values())


if __name__ == "__main__":
    main(*sys.argv[1:])
