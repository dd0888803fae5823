"""Whole integer models on a GPU beside their float model in FP16, compiled by torch, and beside torchao.

`intflash bench models --integer` measures the table: a process for each model converts it, and one for each model and
batch compiles the contenders, which takes most of the time. A few prepare themselves at once and are then timed one
after the other.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import logging
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from intflash.bench import gpu_timing, models
from intflash.bench.experiments import Experiment, Figure, Row, Setting, describe

logger = logging.getLogger("intflash")

MODELS = ("vit_base_patch16_224", "deit_small_patch16_224", "swin_tiny_patch4_window7_224", "bert_base")
BATCHES = (1, 8, 64, 256)
MOST_SEQUENCES = 64  # of BERT
TOKENS = 512
CALIBRATION = {True: 2, False: 1}  # images, or sequences, of random values: the speed does not depend on them
METHODS = ("intflash", "intflash_p8")  # of attention
OURS = METHODS[0]
FP16 = "FP16"
GRAPH = "own CUDA graph"
SPEED, RATIO, MEMORY, ENERGY, WEIGHTS = (
    "per second", "times the best FP16", "MB while running", "mJ each", "MB of weights",
)  # fmt: skip
SUSTAINED, SUSTAINED_RATIO = f"{SPEED}, in a loop of its own", f"{RATIO}, each in a loop of its own"
KERNELS = "us of kernels"
PRODUCTS = "T operations/s"
LOOP_SECONDS = 1.0  # of a contender alone, at the clock that the GPU's power allows
TURNS = 10
CATEGORIES = {  # of kernels of integer models, by parts of their names; the first match counts
    "attention": ("attention", "_short_rows_kernel", "_tile_loop_kernel", "_constants_kernel", "constants"),
    "products": ("linear",),
    "LayerNorm": ("layer_norm",),
    "input": ("patches", "embedding"),
    gpu_timing.IDLE: (gpu_timing.IDLE,),
}


def float_model(name: str) -> nn.Module:
    """The model with random weights."""
    torch.manual_seed(0)
    if name == "bert_base":
        from transformers import BertConfig, BertModel

        return BertModel(BertConfig(), add_pooling_layer=False).eval().requires_grad_(False)
    return models.import_timm().create_model(name).eval().requires_grad_(False)


def inputs(name: str, batch: int, seed: int, device: str = "cuda") -> dict[str, Tensor]:
    """Random inputs, by the names of the model's arguments; the sequences of a BERT end in padding."""
    g = torch.Generator().manual_seed(seed)
    if name == "bert_base":
        lengths = torch.randint(TOKENS // 2, TOKENS + 1, (batch, 1), generator=g)
        lengths[0] = TOKENS
        ids = torch.randint(0, 30522, (batch, TOKENS), generator=g)
        mask = (torch.arange(TOKENS)[None] < lengths).to(torch.int64)
        return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
    return {"x": torch.randn(batch, 3, 224, 224, generator=g).to(device)}


def convert(name: str, path: Path) -> None:
    """Writes a file of the integer model for each method, calibrated on random inputs, or one that says why there are
    none."""
    from intflash import integer

    try:
        model, count = float_model(name), CALIBRATION[name != "bert_base"]
        with torch.no_grad():
            calibration = integer.calibrate(model, [inputs(name, count, 1, "cpu")])
            for method in METHODS:
                integer.convert(model, calibration, method=method).save(path.with_suffix(".part"))
                path.with_suffix(".part").rename(of_method(path, method))
    except Exception as error:
        path.with_suffix(".error").write_text(describe(error))
        raise


def of_method(path: Path, method: str) -> Path:
    return path.with_suffix(f".{method}.safetensors")


def converted(path: Path, method: str) -> Path:
    """The file of a method, once it has been written.

    Raises:
        RuntimeError: the conversion failed.
    """
    file = of_method(path, method)
    while not file.exists():
        if path.with_suffix(".error").exists():
            raise RuntimeError(path.with_suffix(".error").read_text())
        time.sleep(0.1)
    return file


@dataclass
class Outcome:
    """One model and batch: seconds by contender, why one is missing, and supporting numbers by metric and series."""

    model: str
    batch: int
    seconds: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    others: dict[str, dict[str, float]] = field(default_factory=dict)


Call = Callable[[], Any]


def _compiled(model: nn.Module, given: dict[str, Tensor]) -> Call:
    compiled = torch.compile(model, dynamic=False, mode="reduce-overhead")
    return lambda: compiled(**given)


def _in_graph(model: nn.Module, given: dict[str, Tensor], mode: str | None = None) -> Call:
    """The compiled model in one captured graph, replayed without Python and without copies."""
    call = partial(torch.compile(model, dynamic=False, mode=mode), **given)
    for _ in range(2):
        call()
    return partial(_replay, gpu_timing.capture(call, 1), call)


def _replay(graph: torch.cuda.CUDAGraph, kept: Call) -> None:
    """Replays a graph; `kept` has the model and the inputs whose memory the graph reads."""
    graph.replay()


Config = Callable[[Tensor], Any]  # of torchao, from a linear's input


def _torchao(config: Config, least_rows: int, model: nn.Module, given: dict[str, Tensor]) -> Call:
    """The model in bfloat16 with quantized linears, but those whose input has fewer rows than torchao's product takes:
    the classifier's of a small batch."""
    from torch._inductor import config as inductor
    from torchao import quantization

    quantized = copy.deepcopy(model).bfloat16()
    given = {name: x.bfloat16() if x.is_floating_point() else x for name, x in given.items()}
    configs: dict[str, Any] = {}
    linears = {name: m for name, m in quantized.named_modules() if isinstance(m, nn.Linear)}

    def note(name: str, x: Tensor) -> None:
        if x.numel() >= least_rows * x.shape[-1]:
            configs[name] = config(x)

    hooks = [m.register_forward_pre_hook(lambda m, x, name=name: note(name, x[0])) for name, m in linears.items()]
    quantized(**given)
    for hook in hooks:
        hook.remove()
    with inductor.patch(coordinate_descent_tuning=False):
        for name, found in configs.items():
            quantization.quantize_(linears[name], found)
        inductor.coordinate_descent_tuning = False  # torchao chooses it, and each kernel is compiled many times
        return _in_graph(quantized, given)


def _dynamic(config: str, x: Tensor) -> Any:
    from torchao import quantization

    return getattr(quantization, config)()


def _int8_static(x: Tensor) -> Any:
    """With the scale of the largest value in one forward pass."""
    from torchao import quantization

    granularity = quantization.PerTensor(), quantization.PerRow()
    scale = x.abs().amax().view([1] * x.ndim) / 127
    return quantization.Int8StaticActivationInt8WeightConfig(scale, granularity=granularity)


# Tuning measures kernels, which other processes on the GPU disturb: one tunes at a time, after its other compilations.
TUNED = f"{FP16}, torch.compile max-autotune, {GRAPH}"
CONTENDERS: dict[str, Callable[[nn.Module, dict[str, Tensor]], Call]] = {
    f"{FP16}, torch.compile, {GRAPH}": _in_graph,
    f"{FP16}, torch.compile reduce-overhead": _compiled,
    f"torchao float8 dynamic, {GRAPH}": partial(
        _torchao, partial(_dynamic, "Float8DynamicActivationFloat8WeightConfig"), 1
    ),
    f"torchao int8 static, {GRAPH}": partial(_torchao, _int8_static, 17),
    f"torchao int8 dynamic, {GRAPH}": partial(_torchao, partial(_dynamic, "Int8DynamicActivationInt8WeightConfig"), 17),
    TUNED: partial(_in_graph, mode="max-autotune-no-cudagraphs"),
}
TUNED_BATCHES = (64, 256)


@contextlib.contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Waits until no other process holds the file."""
    import fcntl

    with file.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _built(
    tuned: bool, model: nn.Module, given: dict[str, Tensor], file: Path
) -> Iterator[tuple[str, Call | Exception]]:
    """The contenders of one model and batch, or what stopped one."""
    for label, make in CONTENDERS.items():
        if label == TUNED and not tuned:
            continue
        try:
            alone = _alone(file.with_name("tuning")) if label == TUNED else contextlib.nullcontext()
            with alone:
                call = make(model, given)
                for _ in range(3):
                    call()
                torch.cuda.synchronize()
            yield label, call
        except Exception as error:  # whatever stops a contender is a result
            logger.debug("%s was not built", label, exc_info=True)
            yield label, error


def measure(
    name: str, batch: int, file: Path, turns: int, threads: int, tuned: bool, ready: Callable[[], None]
) -> Outcome:
    """Builds and compiles the contenders, in so many threads. After `ready` returns, times them in turns."""
    from torch._inductor import config

    from intflash import integer

    config.compile_threads = threads
    torch.set_num_threads(threads)
    outcome = Outcome(name, batch)
    model = float_model(name).cuda().half()
    given = inputs(name, batch, 2)
    halves = {key: x.half() if x.is_floating_point() else x for key, x in given.items()}
    calls: dict[str, Call] = {}
    with torch.no_grad():
        for label, call in _built(tuned, model, halves, file):
            if isinstance(call, Exception):
                outcome.refused[label] = describe(call)
            else:
                calls[label] = call
        made = {method: integer.load(converted(file, method)).cuda() for method in METHODS}
        for method, integer_model in made.items():
            calls[method] = partial(integer_model, **halves)
            calls[method]()
            calls[f"{method}, {GRAPH}"] = gpu_timing.capture(calls[method], 1).replay
        ready()
        samples = models._take_turns(calls, "cuda", turns)
        outcome.seconds = {label: models.interval_of_median(seconds)[0] for label, seconds in samples.items()}
        best = min((label for label in calls if label.startswith(FP16)), key=outcome.seconds.__getitem__, default=None)
        shown = {label: calls[label] for label in (*(f"{method}, {GRAPH}" for method in METHODS), best) if label}
        with contextlib.suppress(ImportError):
            alone = {label: gpu_timing.joules_of_calls(call, LOOP_SECONDS) for label, call in shown.items()}
            outcome.others |= _alone_in_a_loop(alone, best, batch)
        outcome.others[KERNELS] = _by_category(gpu_timing.kernel_times(calls[f"{OURS}, {GRAPH}"]))
    program = made[OURS].program
    outcome.others[WEIGHTS] = {
        OURS: sum(x.numel() * x.element_size() for x in program.tensors.values()) / 1e6,
        FP16: sum(x.numel() * x.element_size() for x in (*model.parameters(), *model.buffers())) / 1e6,
    }
    outcome.others[MEMORY] = _memory(made[OURS], model, halves)
    return outcome


def _alone_in_a_loop(
    alone: Mapping[str, tuple[float, float]], best: str | None, batch: int
) -> dict[str, dict[str, float]]:
    """Energy and speed from (joules, seconds) of a batch, and speed over that of `best`."""
    found = {
        ENERGY: {label: 1e3 * joules / batch for label, (joules, _) in alone.items()},
        SUSTAINED: {label: batch / seconds for label, (_, seconds) in alone.items()},
    }
    if best:
        found[SUSTAINED_RATIO] = {label: alone[best][1] / x for label, (_, x) in alone.items() if label != best}
    return found


def _memory(made: nn.Module, model: nn.Module, given: dict[str, Tensor]) -> dict[str, float]:
    """MB of the tensors of one eager forward pass, without weights and inputs."""
    from intflash.integer.calibration import bind
    from intflash.integer.gpu import executor

    found, steps = {}, executor.Steps(made.program)
    bound = bind(made.program.inputs, given, made.device)
    for label, call in ((OURS, lambda: steps.run(bound)), (FP16, lambda: model(**given))):
        with torch.no_grad():
            call()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            call()
            torch.cuda.synchronize()
            found[label] = (torch.cuda.max_memory_allocated() - before) / 1e6
    return found


def _by_category(times: Mapping[str, float]) -> dict[str, float]:
    """Sums the microseconds of kernels over the kernels of a category."""
    found: dict[str, float] = {}
    for name, us in times.items():
        low = name.lower()
        category = next((c for c, parts in CATEGORIES.items() if any(part in low for part in parts)), "other")
        found[category] = found.get(category, 0.0) + us
    return {name: us for name, us in found.items() if us}


def product_rows() -> Iterator[Row]:
    """The products of ViT-B at batch 256 with their epilogues."""
    from intflash.integer.gpu import hopper, kernels

    m = 256 * 197
    for name, n, k, epilogue in (
        ("qkv", 2304, 768, "codes"), ("fc1", 3072, 768, "table"), ("fc2", 768, 3072, "residual"),
        ("proj", 768, 768, "residual"),
    ):  # fmt: skip
        arguments = random_product(m, n, k, epilogue)
        module = hopper if hopper.serves(arguments[2]) else kernels
        (seconds,) = gpu_timing.time_calls([module.linear_launch(*arguments).run])
        yield Row(OURS, f"{name} of ViT-B, batch 256, {epilogue}", PRODUCTS, 2e-12 * m * n * k / seconds)


def random_product(m: int, n: int, k: int, epilogue: str) -> tuple:
    """The arguments of `linear_launch` for a product of random codes whose results fill the output's range."""
    from intflash.integer.program import Buffer, Linear

    g = torch.Generator("cuda").manual_seed(0)

    def integers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int8) -> Tensor:
        return torch.randint(low, high, shape, device="cuda", generator=g).to(dtype)

    bits, reach = {"codes": (8, 40), "table": (8, 200), "residual": (16, 2000)}[epilogue]
    factor = reach / (74 * 74 * math.sqrt(k))
    shift = 30 - math.ceil(math.log2(factor))
    op = Linear("product", "x", "w", "b", ("y",), epilogue, "m", shift, symmetric=epilogue == "codes", bits=10)
    multiplier = torch.full((n,), int(factor * 2**shift), dtype=torch.int32, device="cuda")
    table = integers(-128, 128, 1024) if epilogue == "table" else None
    residual = integers(-9999, 9999, 1, m, n, dtype=torch.int16) if epilogue == "residual" else None
    out = torch.empty(1, m, n, dtype=torch.int16 if bits == 16 else torch.int8, device="cuda")
    bias = integers(-1000, 1000, n, dtype=torch.int32)
    weight = integers(-127, 128, n, k)
    return op, integers(-128, 128, m, k), weight, bias, multiplier, table, residual, None, out, Buffer((m, n), bits)


_COMMAND = (sys.executable, "-m", __name__)


def start_conversions(files: Mapping[str, Path]) -> list[subprocess.Popen]:
    """Processes that write each model's file."""
    return [subprocess.Popen([*_COMMAND, "--model", name, "--file", str(file)]) for name, file in files.items()]


def measure_all(
    names: Sequence[str], batches: Sequence[int], turns: int, max_autotune: bool, setting: Setting
) -> Iterator[Row]:
    """The rows of the table: each model and batch in its own process."""
    cases = [(name, batch) for name in names for batch in batches if name != "bert_base" or batch <= MOST_SEQUENCES]
    cores = os.cpu_count() or 1
    together = min(max(1, cores // 4), len(cases))  # so that rows come as the run proceeds
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / f"{name}.safetensors" for name in names}
        conversions = start_conversions(files)
        commands = {
            (name, batch): [
                *_COMMAND, "--model", name, "--file", str(files[name]), "--batch", str(batch), "--turns", str(turns),
                "--threads", str(cores // together),
                *(["--tuned"] if max_autotune and batch in TUNED_BATCHES else []),
            ]
            for name, batch in cases
        }  # fmt: skip
        for (name, batch), content, code in models.in_workers(commands, together):
            case = f"{name.partition('_patch')[0]}, batch {batch}"
            if content is None:
                yield Row(OURS, case, SPEED, None, note=f"its process ended with {code}")
            else:
                yield from _rows(case, Outcome(**content))
        for process in conversions:
            process.wait()
    yield from product_rows()


def _rows(case: str, outcome: Outcome) -> Iterator[Row]:
    batch = outcome.batch
    for label, seconds in outcome.seconds.items():
        yield Row(label, case, SPEED, batch / seconds, x=batch)
    for label, reason in outcome.refused.items():
        yield Row(label, case, SPEED, None, x=batch, note=reason)
    floats = [seconds for label, seconds in outcome.seconds.items() if label.startswith(FP16)]
    if floats:
        for label, seconds in outcome.seconds.items():
            if not label.startswith(FP16):
                yield Row(label, case, RATIO, min(floats) / seconds, x=batch)
    for metric, values in outcome.others.items():
        for label, value in values.items():
            yield Row(label, case, metric, value, x=batch)


def experiment(
    names: Iterable[str] | None = None, batches: Iterable[int] | None = None, turns: int = TURNS,
    max_autotune: bool = True,
) -> Experiment:  # fmt: skip
    """The experiment of these models and batches."""
    chosen = tuple(names or MODELS), tuple(batches or BATCHES)
    return Experiment(
        "integer_gpu",
        "Integer models on a GPU: images or sequences per second",
        "docs/design/integer.md",
        partial(measure_all, *chosen, turns, max_autotune),
        figures=(Figure(RATIO), Figure(SPEED)),
        notes=(
            "Random weights, calibrated on random inputs. Contenders take turns, medians of wall-clock time. BERT: "
            f"{TOKENS} tokens with a padding mask. FP16 is compiled by torch: reduce-overhead; its default mode in one "
            f"captured CUDA graph; max-autotune likewise, at batch {' and '.join(map(str, TUNED_BATCHES))}. torchao "
            "quantizes bfloat16 models, compiled in the default mode in one captured CUDA graph, without tuning each "
            "kernel by coordinate descent. In turns a GPU cools between contenders; energy, and speed in a loop of its "
            f"own, are of {LOOP_SECONDS:g} s of the same contender."
        ),
        devices=("cuda",),
        limit_s=1800.0,
    )


def main() -> None:
    """Converts a model, or, with a batch, is the worker for it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--threads", type=int, default=1, help="of the compiler")
    parser.add_argument("--tuned", action="store_true", help="by max-autotune too")
    given = parser.parse_args()
    if given.batch is None:
        convert(given.model, given.file)
    else:
        options = given.batch, given.file, given.turns, given.threads, given.tuned
        models.answer(lambda ready: measure(given.model, *options, ready))


if __name__ == "__main__":
    main()
