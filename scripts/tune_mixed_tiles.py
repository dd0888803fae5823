"""Sweep the mixed-precision kernels' tiles on this GPU.

tune_mixed_tiles.py [METHOD...]: T operations/s of candidate tiles at N = 4096, the best four at 16384, as JSON in $OUT
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import pathlib
import sys
import time

import torch

from intflash.backends.gpu.float_softmax import operands
from intflash.backends.triton import mixed_precision
from intflash.backends.triton.tile_loop import Statistics, TileShape
from intflash.methods import get_method
from intflash.problem import Problem

WORKERS = 14
TILES = [
    TileShape(*x)
    for x in (
        (64, 128, 4, 2), (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 3), (128, 128, 8, 2), (128, 64, 8, 3),
        (128, 64, 4, 3), (128, 128, 8, 3), (128, 64, 4, 2), (128, 32, 4, 3), (128, 64, 4, 4), (128, 128, 4, 2),
    )
]  # fmt: skip
CONVERSIONS = {  # of `online_softmax`; None is the method's own
    "int_flash_half": (None, "biased"),
    "int_flash_full": (None,),
    "lite": ("convert", "magic", "dual", "integer"),
    "fp16": (None,),
    "fp8": (None,),
}
FEW = (None, "integer", "biased")  # conversions for which every tile is tried
NO_STATISTICS = Statistics(None, None)


def prepared(method, d, n, batch=4):
    """Returns a function that makes launches of a method on uniform inputs, and the number of operations."""
    g = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.rand(batch, 32 if d == 64 else 16, n, d, generator=g, device="cuda") * 8 - 4 for _ in range(3))
    p = Problem(method, q, k, v, d**-0.5, recipe=get_method(method).recipe, out_dtype=torch.float16).quantized()
    parts, out = operands(p), torch.empty_like(q, dtype=torch.float16)
    return lambda conversion, tile: mixed_precision.mixed_launch(p, parts, out, NO_STATISTICS, tile, conversion)


def jobs(methods):
    for method in methods:
        for form in CONVERSIONS[method]:
            for d in (64, 128):
                for tile in TILES:
                    if not (tile.keys == 256 and d == 128 or form not in FEW and tile != TILES[0]):
                        yield method, form, d, dataclasses.astuple(tile)


def compile_share(worker, methods):
    failed = []
    for i, (method, form, d, tile) in enumerate(jobs(methods)):
        if i % WORKERS == worker:
            try:
                prepared(method, d, 4096, 1)(form, TileShape(*tile)).run()
                torch.cuda.synchronize()
            except Exception as error:
                failed.append(((method, form, d, tile), str(error).splitlines()[0][:80]))
    return failed


def sweep(methods):
    from intflash.bench.gpu_timing import time_calls

    start = time.time()
    with concurrent.futures.ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn")) as pool:
        failed = dict(f for share in pool.map(compile_share, range(WORKERS), [methods] * WORKERS) for f in share)
    print(f"compiled in {time.time() - start:.0f} s, {len(failed)} do not fit", flush=True)
    results, found = [], []
    for method, d, n in ((m, d, n) for m in methods for d in (64, 128) for n in (4096, 16384)):
        launch = prepared(method, d, n)
        mine = [j for j in jobs(methods) if j[0] == method and j[2] == d and j not in failed]
        if n > 4096:  # the best tiles of 4096
            mine = [job for _, job in found[:4]]
        times = time_calls([launch(form, TileShape(*tile)).run for _, form, _, tile in mine], rounds=5, sample_s=2e-3)
        operations = 4 * 4 * (32 if d == 64 else 16) * n * n * d
        found = sorted(((operations / s / 1e12, job) for s, job in zip(times, mine, strict=True)), reverse=True)
        results += [(n, *job, round(tops, 1)) for tops, job in found]
        best = "  ".join(f"{form or ''}{tile}={tops:.0f}" for tops, (_, form, _, tile) in found[:9])
        print(f"{method} D{d} N{n}: {best}", flush=True)
    path = pathlib.Path(os.environ.get("OUT", ".")) / "mixed_sweep.json"
    path.write_text(json.dumps({"tops": results, "failed": [[*job, why] for job, why in failed.items()]}))


if __name__ == "__main__":
    sweep(sys.argv[1:] or tuple(CONVERSIONS))
