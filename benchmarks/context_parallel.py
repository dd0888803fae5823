"""Context parallelism on the GPUs of one host, beside one GPU, torch's context_parallel and Ulysses in FP16.

    torchrun --nproc-per-node 2 -m benchmarks.context_parallel --out benchmarks/results/h200/context_parallel_2

writes OUT.json and, of the first workload, a profile OUT.rank0.trace.json. The faults are runs of their own, which end
with an error on every rank: `--fault mismatch`, `--fault kill`. `--device cpu --tiny` tries the script without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import intflash
from intflash.bench.measure import environment
from intflash.distributed import attention, context_parallel, counting, shard
from intflash.distributed.traffic import Sizes, control_bytes, data_bytes

METHODS = ("intflash", "intflash_p8")
BLOCKS = 5  # of the video model


@dataclass(frozen=True)
class Workload:
    """Attention of a model's layers, FP16 in and out."""

    q_heads: int
    kv_heads: int
    tokens: int
    layers: int
    head_dim: int = 128
    causal: bool = False

    @property
    def layout(self) -> str:
        return "zigzag" if self.causal else "contiguous"

    @property
    def operations(self) -> float:
        return 4 * self.q_heads * self.tokens**2 * self.head_dim / (2 if self.causal else 1)

    def inputs(self, device: torch.device) -> list[Tensor]:
        """The same on all ranks."""
        generator = torch.Generator(device).manual_seed(0)
        heads = (self.q_heads, self.kv_heads, self.kv_heads)
        shapes = [(1, h, self.tokens, self.head_dim) for h in heads]
        return [torch.randn(s, generator=generator, device=device, dtype=torch.float16) for s in shapes]


WORKLOADS = {
    "Wan 1.3B, 480p": Workload(12, 12, 32_760, layers=30),
    "Wan 1.3B, 720p": Workload(12, 12, 75_600, layers=30),
    "Llama prefill": Workload(32, 8, 32_768, layers=32, causal=True),
}
BLOCK = "Wan 1.3B block, 480p"  # of the video model
TINY = {"tiny": Workload(8, 8, 96, 2, 16), "tiny causal": Workload(8, 4, 96, 2, 16, causal=True)}


class Bench:
    """What measures calls on all ranks at once."""

    def __init__(self, device: torch.device, rounds: int) -> None:
        self.device, self.rounds = device, rounds

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def once(self, call: Callable[[], Any], alone: bool, layers: int) -> float:
        """Seconds of one of `layers` calls in a row, of the slowest rank; `alone`: on rank 0 while the others wait. In
        a row, as in a model, the host prepares a call while the GPU computes the one before."""
        self.wait()
        dist.barrier()
        start = time.perf_counter()
        if not alone or dist.get_rank() == 0:
            for _ in range(layers):
                call()
            self.wait()
        seconds = torch.tensor((time.perf_counter() - start) / layers, device=self.device, dtype=torch.float64)
        if alone:
            dist.broadcast(seconds, 0)
        else:
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return seconds.item()

    def seconds(self, calls: dict[str, tuple[Callable[[], Any], bool]], layers: int) -> dict[str, float]:
        """Medians; the contenders take turns, so that each meets the chip as warm as the others do."""
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for i in range(self.rounds + 2):
            for name, (call, alone) in calls.items():
                seconds = self.once(call, alone, layers)
                if i > 1:
                    samples[name].append(seconds)
        return {name: statistics.median(x) for name, x in samples.items()}


def all_to_all_heads(x: Tensor, back: bool = False) -> Tensor:
    """Ulysses in the tensor's own dtype: tokens for heads ``[1, H, n, D]`` to ``[1, H / R, R n, D]``, or back."""
    ranks = dist.get_world_size()
    _, h, n, d = x.shape
    if back:
        parts = x.view(h, ranks, n // ranks, d).transpose(0, 1).contiguous()
    else:
        parts = x.reshape(ranks, h // ranks, n, d).contiguous()
    out = torch.empty_like(parts)
    dist.all_to_all_single(out, parts)
    return out.view(1, h * ranks, n // ranks, d) if back else out.transpose(0, 1).reshape(1, h // ranks, ranks * n, d)


def ulysses_fp16(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Of contiguous shards; all ranks have as much work, causal or not."""
    q, k, v = map(all_to_all_heads, (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    return all_to_all_heads(out, back=True)


def torch_context_parallel(work: Workload, inputs: list[Tensor], stack: ExitStack, mesh: Any) -> Callable[[], Tensor]:
    """torch's own ring attention, whose context stays entered. Balancing by zigzag is for causal masks only."""
    from torch.distributed.tensor.experimental import context_parallel as torch_cp
    from torch.distributed.tensor.experimental._context_parallel._attention import _cp_options
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (x.clone() for x in inputs)
    if work.q_heads != work.kv_heads:
        k, v = (x.repeat_interleave(work.q_heads // work.kv_heads, dim=1) for x in (k, v))
    _cp_options.enable_load_balance = work.causal
    stack.enter_context(torch_cp(mesh, buffers=(q, k, v), buffer_seq_dims=(2, 2, 2)))
    stack.enter_context(sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]))
    return partial(F.scaled_dot_product_attention, q, k, v, is_causal=work.causal)


def measure(
    name: str, work: Workload, methods: Sequence[str], chunks: int | None, bench: Bench, mesh: Any
) -> list[dict[str, Any]]:
    """Rows of one workload. chunks: groups of heads, see `attention`."""
    ranks, inputs = dist.get_world_size(), work.inputs(bench.device)
    base = dict(workload=name, shape=f"{work.q_heads}/{work.kv_heads} heads, N {work.tokens}, D {work.head_dim}",
                causal=work.causal, ranks=ranks, chunks=chunks, layers=work.layers)  # fmt: skip
    gqa = work.q_heads != work.kv_heads
    whole = dict(is_causal=work.causal, enable_gqa=gqa, check_finite=False)
    sharded = whole | dict(layout=work.layout, chunks=chunks)
    rows, calls = [], {}
    parts = [shard(x, layout=work.layout) for x in inputs]
    even = [shard(x) for x in inputs]
    for method in methods:
        try:
            expected = shard(intflash.attention(*inputs, method=method, **whole), layout=work.layout)
        except intflash.InputError as error:  # a bound on the keys
            rows.append(base | dict(contender=method, note=str(error)))
            continue
        calls[f"{method}, one GPU"] = partial(intflash.attention, *inputs, method=method, **whole), True
        schemes = ["gather", *(["ulysses"] if work.kv_heads % ranks == 0 else [])]
        for scheme in schemes:
            call = partial(attention, *parts, method=method, scheme=scheme, **sharded)
            with counting() as traffic:
                out = call()
            across, along = (1, ranks) if scheme == "ulysses" else (ranks, 1)
            sizes = Sizes(*(tuple(x.shape) for x in inputs), across, along, layout=work.layout)
            want = data_bytes(sizes, scheme) + control_bytes(sizes)
            calls[f"{method}, {scheme}"] = call, False
            rows.append(base | dict(
                contender=f"{method}, {scheme}", equal_bits=torch.equal(out, expected), bytes_counted=traffic.total,
                bytes_formula=want, collectives=sum(traffic.calls.values()),
            ))  # fmt: skip
    sdpa = partial(F.scaled_dot_product_attention, *inputs, is_causal=work.causal, enable_gqa=gqa)
    calls["FP16 SDPA, one GPU"] = sdpa, True
    if work.kv_heads % ranks == 0:
        calls["FP16 SDPA, ulysses"] = partial(ulysses_fp16, *even, work.causal), False
    seconds, single = bench.seconds(calls, work.layers), bench.seconds(calls, 1)
    known = {row["contender"]: row for row in rows}
    for contender, s in seconds.items():
        row = known.get(contender) or base | dict(contender=contender)
        one = seconds[f"{contender.partition(',')[0]}, one GPU"] if "," in contender else seconds["FP16 SDPA, one GPU"]
        row |= dict(ms=1e3 * s, speedup=one / s, tops=work.operations / s / 1e12, ms_from_idle=1e3 * single[contender])
        if contender not in known:
            rows.append(row)
    return rows


def measure_torch(name: str, work: Workload, bench: Bench, mesh: Any) -> dict[str, Any]:
    """The row of torch's own ring. It comes last: an error inside leaves torch's attention replaced."""
    inputs, row = work.inputs(bench.device), dict(workload=name, contender="torch context_parallel")
    with ExitStack() as stack:
        try:
            ring = torch_context_parallel(work, inputs, stack, mesh), False
            seconds = bench.seconds({"ring": ring}, work.layers)["ring"]
        except (RuntimeError, NotImplementedError) as error:
            return row | dict(note=str(error).splitlines()[0])
    return row | dict(ms=1e3 * seconds, tops=work.operations / seconds / 1e12)


def video_block(methods: Sequence[str], bench: Bench, mesh: Any, tiny: bool) -> list[dict[str, Any]]:
    """A block of Wan 1.3B at 480p with its projections and cross attention, patched, on one GPU and on all: its part of
    a model of a few blocks."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    dtype = torch.float32 if bench.device.type == "cpu" else torch.bfloat16
    size = dict(num_attention_heads=2, attention_head_dim=16, ffn_dim=32) if tiny else {}
    blocks = 1 if tiny else BLOCKS
    sizes = dict(num_attention_heads=12, attention_head_dim=128, ffn_dim=8960, num_layers=blocks) | size
    model = WanTransformer3DModel(**sizes).eval().to(bench.device, dtype)
    frames, height, width = (2, 8, 8) if tiny else (21, 60, 104)
    inputs = dict(
        hidden_states=torch.randn(1, 16, frames, height, width, device=bench.device, dtype=dtype),
        timestep=torch.tensor([500], device=bench.device),
        encoder_hidden_states=torch.randn(1, 512, 4096, device=bench.device, dtype=dtype),
        return_dict=False,  # diffusers' hooks gather tuples
    )  # fmt: skip
    base = dict(workload=BLOCK, ranks=dist.get_world_size())
    rows, forwards = [], 2 if tiny else WORKLOADS["Wan 1.3B, 480p"].layers // blocks
    for method in methods:
        with torch.no_grad(), intflash.patch(model, method):
            want = model(**inputs)[0]
            alone = bench.seconds({"one": (partial(model, **inputs), True)}, forwards)["one"]
            with context_parallel(model, mesh):
                out = model(**inputs)[0]
                seconds = bench.seconds({"all": (partial(model, **inputs), False)}, forwards)["all"]
        difference = float((out - want).float().abs().max() / want.float().abs().max())
        rows.append(base | dict(
            contender=method, ms_one_gpu=1e3 * alone / blocks, ms=1e3 * seconds / blocks, speedup=alone / seconds,
            largest_difference=difference,
        ))  # fmt: skip
    return rows


def overlap(events: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Of a chrome trace's kernels: microseconds of NCCL's, of all others, and of NCCL's that others cover."""
    kernels = [e for e in events if e.get("cat") == "kernel"]
    spans = [(e["ts"], e["ts"] + e["dur"], "nccl" in e["name"].lower()) for e in kernels]
    others = _joined((a, b) for a, b, nccl in spans if not nccl)
    nccl = _joined((a, b) for a, b, nccl in spans if nccl)
    hidden = sum(max(0.0, min(b, d) - max(a, c)) for a, b in nccl for c, d in others)
    return dict(nccl_us=sum(b - a for a, b in nccl), others_us=sum(b - a for a, b in others), hidden_us=hidden)


def _joined(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for a, b in sorted(spans):
        if found and a <= found[-1][1]:
            found[-1] = found[-1][0], max(b, found[-1][1])
        else:
            found.append((a, b))
    return found


def profile(work: Workload, method: str, bench: Bench, out: Path) -> dict[str, float]:
    """The overlap of communication and computation in one call, whose trace is written beside the results."""
    parts = [shard(x, layout=work.layout) for x in work.inputs(bench.device)]
    call = partial(attention, *parts, method=method, is_causal=work.causal, layout=work.layout, enable_gqa=True,
                   scheme="gather", check_finite=False)  # fmt: skip
    for _ in range(3):
        call()
    bench.wait()
    with torch.profiler.profile() as prof:
        call()
        bench.wait()
    trace = out.with_suffix(f".rank{dist.get_rank()}.trace.json")
    prof.export_chrome_trace(str(trace))
    found = overlap(json.loads(trace.read_text())["traceEvents"])
    if dist.get_rank() > 0:
        trace.unlink()
    return found


def fault(kind: str, device: torch.device) -> None:
    """Ends every rank with an error: the last one makes another call, or is killed."""
    q, k, v = TINY["tiny"].inputs(device)
    attention(q, k, v, check_finite=False)
    last = dist.get_rank() == dist.get_world_size() - 1
    if kind == "kill" and last:
        os.kill(os.getpid(), signal.SIGKILL)
    attention(q, k, v, scale=0.5 if kind == "mismatch" and last else None, check_finite=False)
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/context_parallel"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--workloads", nargs="+", choices=[*WORKLOADS, BLOCK], default=[*WORKLOADS, BLOCK],
                        help=f"'{BLOCK}' needs diffusers")  # fmt: skip
    parser.add_argument("--chunks", type=int, help="groups of heads that are exchanged one after the other")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tiny", action="store_true", help="small tensors instead of the workloads' own")
    parser.add_argument("--fault", choices=("mismatch", "kill"))
    parser.add_argument("--timeout", type=float, default=120.0, help="of the process group, in seconds")
    options = parser.parse_args()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast, which a shared host may not have
    device = torch.device(options.device)
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    backend = "nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=options.timeout))
    if options.fault:
        fault(options.fault, device)
        raise SystemExit("the fault was not seen")
    mesh = init_device_mesh(options.device, (dist.get_world_size(),))
    bench = Bench(device, 2 if options.tiny else options.rounds)
    names = [name for name in options.workloads if name != BLOCK]
    workloads = TINY if options.tiny and names else {name: WORKLOADS[name] for name in names}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    found = dict(environment=environment(), nccl_nvls=os.environ["NCCL_NVLS_ENABLE"], rows=[])

    def add(rows: list[dict[str, Any]]) -> None:
        """Write what is known so far, for a run that is cut off."""
        found["rows"] += rows
        if dist.get_rank() == 0:
            options.out.with_suffix(".json").write_text(json.dumps(found, indent=1, default=str))
            for row in rows:
                print({key: round(x, 3) if isinstance(x, float) else x for key, x in row.items()})

    if workloads:
        found["overlap"] = profile(next(iter(workloads.values())), options.methods[0], bench, options.out)
    for name, work in workloads.items():
        add(measure(name, work, options.methods, options.chunks, bench, mesh))
    if BLOCK in options.workloads:
        add(video_block(options.methods, bench, mesh, options.tiny))
    for name, work in workloads.items():
        add([measure_torch(name, work, bench, mesh)])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
