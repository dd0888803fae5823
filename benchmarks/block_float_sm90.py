"""Machine instructions per score of `intflash_bfp` on sm_90a beside the softmax of long rows.

Writes benchmarks/results/machine_code/block_float_sm90.json. Needs nvcc and nvdisasm, and no GPU:

    python -m benchmarks.block_float_sm90 /usr/local/cuda/bin/nvcc NVDISASM
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
SOURCE = HERE / "block_float_sm90.cu"
OUT = HERE / "results" / "machine_code" / "block_float_sm90.json"
SCORES = 64  # of a thread
ALU = ("SHF", "PRMT", "IADD3", "VIADD", "LEA", "LEA.HI", "LOP3", "VIMNMX", "VIMNMX3")
FMA_SLOTS = {"IMAD": 1, "IMAD.HI": 2, "IMAD.WIDE": 2}


def instructions(nvcc: str, nvdisasm: str) -> dict[str, Counter[str]]:
    with tempfile.TemporaryDirectory() as folder:
        cubin = f"{folder}/kernels.cubin"
        include = HERE.parent / "csrc" / "cuda"
        subprocess.run([nvcc, "-arch=sm_90a", "-cubin", f"-I{include}", "-o", cubin, str(SOURCE)], check=True)
        text = subprocess.run([nvdisasm, "-c", cubin], check=True, capture_output=True, text=True).stdout
    found: dict[str, Counter[str]] = {}
    for line in text.splitlines():
        if section := re.match(r"\s*\.section\s+\.text\.(\w+)", line):
            name = section[1]
            found[name] = Counter()
        elif code := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+(?:\.WIDE|\.HI|\.MOV)?)", line):
            found[name][code[1]] += 1
    return found


def main(nvcc: str, nvdisasm: str) -> None:
    rows = []
    for name, counts in instructions(nvcc, nvdisasm).items():
        rows.append(
            dict(
                kernel=name,
                alu=round(sum(counts[op] for op in ALU) / SCORES, 2),
                fma_slots=round(sum(counts[op] * slots for op, slots in FMA_SLOTS.items()) / SCORES, 2),
                dp4a=round(counts["IDP"] / SCORES, 2),
                counts={op: n for op, n in sorted(counts.items()) if n > 1 and op != "NOP"},
            )
        )
        print({k: v for k, v in rows[-1].items() if k != "counts"}, rows[-1]["counts"])
    version = subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True).stdout.splitlines()[-1]
    OUT.write_text(
        json.dumps(dict(per="score", scores_of_a_thread=SCORES, compiler=version, rows=rows), indent=1) + "\n"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
