"""Compile every integer kernel without a GPU and count registers, spills and float instructions.

Writes benchmarks/results/machine_code/integer_kernels.json.

Triton kernels: all specializations for the first architecture given, the quick dozen for the others. CUDA kernels:
sm_90a. `--table` prints Markdown.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
from collections.abc import Iterator

import torch

from benchmarks import sass
from intflash.backends.cuda import backend as cuda
from intflash.backends.cuda.program import compile_program
from intflash.backends.triton import specializations
from intflash.problem import Problem

OUT = pathlib.Path(__file__).parent / "results" / "machine_code" / "integer_kernels.json"


def per_score(launch, machine) -> dict[str, float]:
    """Returns instructions per score of the shortest loop with a product and an exponential, whose number of scores
    is known.
    """
    arguments = launch.arguments
    if "BN" not in arguments:
        return {}
    scores = arguments["BM"] * arguments["BN"] / (32 * launch.warps)
    loops = [collections.Counter(i.opcode for i in loop) for loop in machine.loops()]
    loops = [c for c in loops if (c["IGMMA"] or c["IMMA"]) and c["PRMT"] >= scores / 2]
    if not loops:
        return {}
    best = min(loops, key=lambda c: sum(c.values()))
    found = {"all": sum(best.values()) / scores}
    return found | {name: round(count / scores, 2) for name, count in best.most_common(8)}


def row(name: str, arch: int) -> dict:
    launch = specializations.launch(name, arch)
    machine = sass.compile_launch(launch, arch)
    return dict(
        name=name, arch=arch, registers=machine.registers, spills=machine.spills, shared=machine.shared_bytes,
        warps=launch.warps, instructions=len(machine.instructions), floats=len(machine.float_instructions),
        loop=per_score(launch, machine),
    )  # fmt: skip


def cuda_rows() -> Iterator[dict]:
    """Yields rows of the CUDA kernels for int8 input and output on ViT's, Swin's and long shapes."""
    shapes = [
        (m, n, d) for m in specializations.OURS for n, d in ((49, 32), (64, 64), (197, 64), (1024, 64), (1024, 128))
    ]
    for method, n, d in shapes:
        q, k, v = (specializations.codes((2, 2, n, d), "tensor", "cpu") for _ in "qkv")
        problem = Problem(method, q, k, v, d**-0.5, out_dtype=torch.int8)
        launch = cuda.planned(problem).launches[-1]
        cubin = compile_program(launch.program).cubin
        machine = sass.machine(cubin, launch.program.file, 90, launch.shared_bytes, launch.threads // 32)
        yield dict(
            name=f"cuda {launch.program.file} {method} n{n} d{d}", arch=90, registers=machine.registers,
            spills=machine.spills, shared=machine.shared_bytes, warps=machine.warps,
            instructions=len(machine.instructions), floats=len(machine.float_instructions), loop={},
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", type=int, nargs="*", default=[90, 80, 89, 100, 120])
    parser.add_argument("--names", nargs="*")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        for r in json.loads(OUT.read_text()):
            loop = f"{r['loop']['all']:.1f}" if r["loop"] else ""
            print(f"| {r['name']} | sm_{r['arch']} | {r['registers']} | {r['spills']} | {r['floats']} | {loop} |")
        return
    rows = [*cuda_rows()]
    for i, arch in enumerate(options.arch):
        for name in options.names or specializations.names(quick=i > 0):
            rows.append(row(name, arch))
            if rows[-1]["spills"] or rows[-1]["floats"]:
                print({k: v for k, v in rows[-1].items() if k != "loop"}, flush=True)
            OUT.parent.mkdir(parents=True, exist_ok=True)
            OUT.write_text("[\n " + ",\n ".join(map(json.dumps, rows)) + "\n]\n")  # a line for each program


if __name__ == "__main__":
    main()
