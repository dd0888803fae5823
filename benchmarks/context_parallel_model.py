"""Time and bytes of context parallelism on up to 512 GPUs, modelled from one GPU's times and the links' bandwidths.

    python -m benchmarks.context_parallel_model

prints the tables of docs/design/distributed.md, which says what the model leaves out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from intflash.distributed import bytes_sent

RESULTS = Path(__file__).parent / "results" / "h100" / "context_parallel_2_720p.json"
OURS, FP16 = "intflash_bfp, one GPU", "FP16 SDPA, one GPU"
HOST = 8  # GPUs that NVLink joins
# bytes a second of one GPU in one direction: NCCL over NVLink 4, as measured (50 MB in 0.22 ms), and InfiniBand NDR
NVLINK, NETWORK = 225e9, 50e9
CHUNKS = 1  # groups of heads, as `intflash.distributed.attention` takes
RANKS = tuple(2**i for i in range(10))


@dataclass(frozen=True)
class Rates:
    """One GPU's, as measured: operations a second of attention, quantization included."""

    ours: float
    fp16: float


def rates() -> Rates:
    """From the results of `benchmarks/context_parallel.py`."""
    tops = {row["contender"]: row.get("tops") for row in json.loads(RESULTS.read_text())["rows"]}
    return Rates(1e12 * tops[OURS], 1e12 * tops[FP16])


@dataclass(frozen=True)
class Workload:
    """Attention of one layer, FP16 in and out, head_dim 128."""

    name: str
    q_heads: int
    kv_heads: int
    tokens: int
    causal: bool

    @property
    def operations(self) -> float:
        return 4 * self.q_heads * self.tokens**2 * 128 / (2 if self.causal else 1)

    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (1, self.q_heads, self.tokens, 128), (1, self.kv_heads, self.tokens, 128)


WORKLOADS = (
    Workload("Wan 14B at 720p (40 heads, N = 75,600)", 40, 40, 75_600, False),
    Workload("causal attention with 64 query heads and 8 key heads, N = 1,048,576", 64, 8, 1 << 20, True),
)


def gathered(work: Workload, ranks: int, width: int) -> float:
    """Seconds to gather all K and V of `width` bytes: what enters a host comes over all of its GPUs' networks at once,
    and goes round inside."""
    total = 2 * width * work.kv_heads * work.tokens * 128
    inside = total * (ranks - 1) / ranks / NVLINK
    hosts = max(1, ranks // HOST)
    return max(inside, total * (hosts - 1) / hosts / HOST / NETWORK)


def pipelined(compute: float, travel: float, pieces: int) -> float:
    """Seconds of pieces that travel one after the other while the one before is computed; the first is waited for."""
    return travel / pieces + (pieces - 1) * max(compute, travel) / pieces + compute / pieces


def exchanged(work: Workload, ranks: int, width: int) -> float:
    """Seconds of Ulysses inside a host: Q, K, V of `width` bytes there, outputs of 2 bytes back."""
    columns, tokens = min(ranks, HOST), work.tokens / ranks
    there = width * 128 * (work.q_heads + 2 * work.kv_heads)
    return tokens * (there + 2 * 128 * work.q_heads) * (columns - 1) / columns / NVLINK


def ours_gather(work: Workload, ranks: int, found: Rates) -> float:
    compute = work.operations / found.ours / ranks
    return pipelined(compute, gathered(work, ranks, 1), CHUNKS)


def ours_grid(work: Workload, ranks: int, found: Rates) -> float:
    """Ulysses inside a host, K and V gathered between hosts."""
    hosts = max(1, ranks // HOST)
    between = (hosts - 1) * 2 * 128 * work.kv_heads * work.tokens / ranks / NETWORK
    compute = work.operations / found.ours / ranks
    return pipelined(compute, exchanged(work, ranks, 1) + between, CHUNKS)


def usp(work: Workload, ranks: int, found: Rates) -> float:
    """xDiT: Ulysses inside a host, which computation waits for, and a ring of FP16 K and V between hosts."""
    hosts = max(1, ranks // HOST)
    between = (hosts - 1) * 4 * 128 * work.kv_heads * work.tokens / ranks / NETWORK
    return exchanged(work, ranks, 2) + _ring(work.operations / found.fp16 / ranks, between, hosts)


def torch_ring(work: Workload, ranks: int, found: Rates) -> float:
    """torch's context_parallel, rotating: each step hands FP16 K and V of a shard to the next rank; the slowest link,
    between two hosts, sets the pace."""
    link = NVLINK if ranks <= HOST else NETWORK
    travel = (ranks - 1) * 4 * 128 * work.kv_heads * work.tokens / ranks / link
    return _ring(work.operations / found.fp16 / ranks, travel, ranks)


def _ring(compute: float, travel: float, steps: int) -> float:
    """Each step computes one shard while the next arrives."""
    if steps == 1:
        return compute
    return compute / steps + (steps - 1) * max(compute / steps, travel / (steps - 1))


def table(work: Workload) -> Iterator[str]:
    """Markdown: a row for each number of ranks."""
    found, (q, k) = rates(), work.shapes()
    yield "| GPUs | ours, gather | ours, grid | USP, FP16 | torch ring, FP16 | MB sent: gather | grid | USP | ring |"
    yield "|" + "---|" * 9
    for ranks in RANKS:
        columns, hosts = min(ranks, HOST), max(1, ranks // HOST)
        gather, grid = bytes_sent(q, k, ranks=ranks), bytes_sent(q, k, ranks=(hosts, columns))
        tokens = work.tokens / ranks
        of_usp = 4 * 128 * tokens * (work.q_heads + work.kv_heads) * (columns - 1) / columns
        of_usp += (hosts - 1) * 4 * 128 * work.kv_heads * tokens
        ms = [1e3 * f(work, ranks, found) for f in (ours_gather, ours_grid, usp, torch_ring)]
        cells = [_digits(x) for x in (*ms, gather / 1e6, grid / 1e6, of_usp / 1e6, 2 * gather / 1e6)]
        yield f"| {ranks} | " + " | ".join(cells) + " |"


def _digits(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.1f}" if x >= 1 else f"{x:.2g}"


def main() -> None:
    for work in WORKLOADS:
        print(f"{work.name}\n\n" + "\n".join(table(work)) + "\n")


if __name__ == "__main__":
    main()
