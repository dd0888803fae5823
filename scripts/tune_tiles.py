"""Time tiles of the Triton kernels on this GPU and print the best of each workload.

Kernel time from CUDA-graph replays, the candidates of a workload interleaved, medians. `--write` stores the table that
`intflash.backends.triton.tile_sizes` reads. Compilation runs first, in parallel processes.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import statistics
import sys
import time

import torch

from intflash.backends.gpu.tensors import view
from intflash.backends.triton import intflash_steps, short_rows, tile_sizes
from intflash.backends.triton import tile_loop as stream
from intflash.backends.triton.constants import constants_launch
from intflash.backends.triton.quantize import Qkv
from intflash.problem import Problem
from intflash.quant import QTensor, quantize

STEPS = {"intflash": intflash_steps.P16, "intflash_p8": intflash_steps.P8, "intflash_online": intflash_steps.ONLINE}
BITS = {"intflash": 16, "intflash_p8": 8}


def k_major(x: QTensor) -> QTensor:
    """Returns the same codes, stored with contiguous tokens (rows padded to 16 bytes)."""
    b, h, n, d = x.shape
    store = torch.zeros(b, h, d, (n + 127) // 128 * 128, dtype=torch.int8, device=x.device)[..., :n]
    store.copy_(x.data.transpose(2, 3))
    return dataclasses.replace(x, data=store.transpose(2, 3))


def build(shape, method, kind, tile):
    """Builds a launch: kind "row" or "stream" on int8 codes with K-major V, "fused" on float16 with static scales."""
    generator = torch.Generator("cuda").manual_seed(0)
    floats = [torch.rand(shape, generator=generator, device="cuda") * 8 - 4 for _ in range(3)]
    q, k, v = (quantize(x) for x in floats)
    out_dtype = torch.float16 if kind == "fused" else torch.int8
    problem = Problem(method, q, k, k_major(v), shape[3] ** -0.5, out_dtype=out_dtype)
    launch, constants, _ = constants_launch(problem)
    launch.run()
    out = torch.empty(shape, dtype=out_dtype, device="cuda")
    none = stream.Statistics(None, None)
    if kind == "stream":
        return stream.tile_loop_launch(problem, STEPS[method], constants, out, none, stream.TileShape(*tile))
    scales = short_rows.NO_SCALES
    if kind == "fused":
        scales = Qkv(*(view(x.scale) for x in (q, k, v)))
        problem = dataclasses.replace(problem, **dict(zip("qkv", (x.half() for x in floats), strict=True)))
    return short_rows.short_rows_launch(problem, BITS[method], constants, out, none, scales, short_rows.RowTile(*tile))


def compile_one(job):
    small = (1, *job[0][1:]) if job[0][0] > 1 and job[2] != "stream" else job[0]
    try:
        build((min(2, small[0]), *small[1:]), *job[1:]).run()
        torch.cuda.synchronize()
        return None
    except Exception as error:  # a tile that does not fit is a result too
        return f"{type(error).__name__}: {str(error)[:200]}"


def graph_of(run, repeats):
    stream_ = torch.cuda.Stream()
    with torch.cuda.stream(stream_):
        run()
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream_):
        for _ in range(repeats):
            run()
    return graph


def time_graphs(calls: dict, rounds=15) -> dict:
    """Returns the median microseconds of each call. The calls take turns."""
    graphs = {}
    for name, run in calls.items():
        try:
            run()
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            torch.cuda.synchronize()
            repeats = max(1, min(50, int(1e-3 / max(time.perf_counter() - start, 2e-5))))
            graphs[name] = (graph_of(run, repeats), repeats)
        except Exception as error:
            print("failed", name, str(error)[:150], flush=True)
    samples = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, (graph, repeats) in graphs.items():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            samples[name].append(start.elapsed_time(stop) * 1000 / repeats)
    return {name: statistics.median(x) for name, x in samples.items()}


def sdpa(shape, backend):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (torch.rand(shape, device="cuda", dtype=torch.float16) * 8 - 4 for _ in range(3))

    def run():
        with sdpa_kernel(getattr(SDPBackend, backend)):
            torch.nn.functional.scaled_dot_product_attention(q, k, v)

    return run


ROW_N197 = [(16, 1, 2), (16, 1, 4), (32, 1, 4), (64, 1, 4), (64, 2, 4), (64, 4, 4), (64, 3, 4, 16), (64, 1, 8),
            (128, 1, 8), (128, 2, 8), (16, 13, 1), (32, 6, 2, 16), (16, 7, 1), (32, 7, 2)]  # fmt: skip
ROW_N49 = [(64, 1, 1), (64, 1, 2), (64, 1, 4), (16, 1, 1), (16, 4, 1), (32, 1, 2), (32, 2, 1), (32, 2, 2)]
STREAM = [(64, 64, 4, 3), (64, 64, 4, 4), (64, 64, 4, 2), (64, 128, 4, 2), (64, 128, 4, 3), (128, 128, 8, 2),
          (128, 128, 8, 3), (128, 64, 4, 3), (128, 64, 8, 3), (64, 128, 8, 2)]  # fmt: skip


def workloads(name, only=()):
    return (w for w in _workloads(name) if not only or w[0] in only)


def _workloads(name):
    row = {
        "A2b1": (1, 6, 197, 64), "A2b8": (8, 6, 197, 64), "A2b1024": (1024, 6, 197, 64),
        "A3b8": (8, 12, 197, 64), "A2b64": (64, 6, 197, 64),
        "A4b1": (64, 3, 49, 32), "A4b8": (512, 3, 49, 32), "A4b128": (8192, 3, 49, 32), "A7b1": (1, 24, 49, 32),
    }  # fmt: skip
    long = {
        "D64N4k": (4, 32, 4096, 64), "D128N4k": (4, 16, 4096, 128), "D64N16k": (1, 32, 16384, 64),
        "D128N16k": (1, 16, 16384, 128),
    }  # fmt: skip
    if name in ("all", "row", "fused"):
        for w, shape in row.items():
            tiles = ROW_N197 if shape[2] == 197 else ROW_N49
            for method in ("intflash_p8", "intflash") if name != "fused" else ():
                yield w, shape, method, "row", tiles
            yield w, shape, "intflash_p8", "fused", [t for t in tiles if t[0] % 64 or t[2] % 4]
    if name in ("all", "stream"):
        for w, shape in long.items():
            if name == "all" and "16k" in w:
                continue
            for method in STEPS:
                yield w, shape, method, "stream", STREAM


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="?", default="all", help="all, row, stream or fused")
    parser.add_argument("--only", nargs="*", default=())
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    options = parser.parse_args()
    jobs = {}
    for w, shape, method, kind, tiles in workloads(options.what, options.only):
        tiles = [t for t in tiles if STEPS[method].keys in (None, t[1])] if kind == "stream" else tiles
        for tile in tiles:
            jobs[w, method, kind, tile] = (shape, method, kind, tile)
    distinct = {((2, *j[0][1:]), *j[1:]): j for j in jobs.values()}
    began = time.time()
    errors = {}
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(15, mp_context=context) as pool:
        for key, error in zip(distinct, pool.map(compile_one, distinct.values()), strict=True):
            if error:
                errors[key] = error
                print("compile", key, error, flush=True)
    print(f"compiled {len(distinct)} in {time.time() - began:.0f} s", flush=True)
    rows, table = [], {}
    for w, shape, method, kind, tiles in workloads(options.what, options.only):
        calls = {}
        tiles = [t for t in tiles if STEPS[method].keys in (None, t[1])] if kind == "stream" else tiles
        for tile in tiles:
            if ((2, *shape[1:]), method, kind, tile) not in errors:
                calls[tile] = build(shape, method, kind, tile).run
        calls["CUDNN_ATTENTION"] = sdpa(shape, "CUDNN_ATTENTION")
        calls["FLASH_ATTENTION"] = sdpa(shape, "FLASH_ATTENTION")
        times = time_graphs(calls, 9 if shape[0] > 500 or shape[2] > 1000 else 15)
        base = min(times.get("CUDNN_ATTENTION", 1e9), times.get("FLASH_ATTENTION", 1e9))
        best = sorted((t, str(x)) for x, t in times.items() if isinstance(x, tuple))
        b, h, n, d = shape
        top, tops = best[0], 4 * b * h * n * n * d / best[0][0] / 1e6
        others = " ".join(f"{x}:{t:.1f}" for t, x in best[:6])
        ratio = f"ratio {base / top[0]:.2f} {tops:.0f} TOPS"
        print(f"{w} {method} {kind}: sdpa {base:.2f} us; best {top[0]:.2f} us {top[1]} {ratio} | {others}", flush=True)
        by_name = {str(x): t for x, t in times.items()}
        rows.append(dict(workload=w, shape=shape, method=method, kind=kind, times=by_name))
        del calls
        torch.cuda.empty_cache()
        if shape[2] <= 256:
            key = tile_sizes.short_rows_class(b * h, n, n, d, BITS[method], kind == "fused")
        else:
            key = tile_sizes.tile_loop_class(STEPS[method].keys, d, BITS.get(method, 8))
        table[key] = list(min((x for x in times if isinstance(x, tuple)), key=times.get))
    with open(os.path.join(options.out, f"tiles_{options.what}.json"), "w") as file:
        json.dump(table, file, indent=1)
    with open(os.path.join(options.out, f"sweep_{options.what}.json"), "w") as file:
        json.dump(rows, file, indent=1)


if __name__ == "__main__":
    sys.exit(main())
