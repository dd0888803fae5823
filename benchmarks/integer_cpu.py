"""Integer models on a CPU beside torch in float32 and bfloat16, OpenVINO INT8 and ONNX Runtime INT8.

The two runtimes are optional packages: `pip install openvino nncf onnxruntime onnx onnxscript`.
"""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from intflash import integer
from intflash.bench.experiments import Experiment, Row, Setting, describe
from intflash.bench.measure import time_interleaved
from intflash.integer import IntegerModel
from intflash.integer.program import Linear

MODELS = ("vit_base_patch16_224", "deit_small_patch16_224", "swin_tiny_patch4_window7_224")
BATCHES = (1, 4, 16)
THREADS = (1, 2)
REST_S = 0.1  # after a turn on two threads: ONNX Runtime's threads spin for 55 ms after a call
CALIBRATION = 8  # images of random values: the speed does not depend on them
OURS = "intflash"
PEERS = ("OpenVINO INT8", "ONNX Runtime INT8")
FLOATS = {torch.float32: "torch float32", torch.bfloat16: "torch bfloat16"}
METRIC = "ms"
MEMORY, BOUND = "peak memory, MB", "bound of the peak memory, MB"
TURN_S = 0.25  # a turn repeats short calls: in the first ones the caches hold what another contender left
Run = Callable[[Tensor], Any]


@dataclass(frozen=True)
class Model:
    """A float model of random weights, its calibration images, and a folder for files."""

    name: str
    module: nn.Module
    images: Tensor
    folder: Path

    @cached_property
    def converted(self) -> IntegerModel:
        return integer.convert(self.module, integer.calibrate(self.module, [self.images]), backend="cpu")


def ours(model: Model, threads: int) -> Run:
    return model.converted


def torch_eager(model: Model, threads: int, dtype: torch.dtype) -> Run:
    if dtype is torch.float32:
        return model.module

    def run(images: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype):
            return model.module(images)

    return run


def torch_compiled(model: Model, threads: int, dtype: torch.dtype) -> Run:
    torch._dynamo.reset()
    return torch.compile(torch_eager(model, threads, dtype))


def openvino(model: Model, threads: int) -> Run:
    import nncf
    import openvino as ov

    converted = ov.convert_model(model.module, example_input=model.images[:1])
    converted.reshape([-1, *model.images.shape[1:]])
    dataset = nncf.Dataset([image[None].numpy() for image in model.images])
    quantized = nncf.quantize(
        converted, dataset, model_type=nncf.ModelType.TRANSFORMER, subset_size=len(model.images)
    )  # fmt: skip
    options = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "ENABLE_CPU_PINNING": False}
    request = ov.Core().compile_model(quantized, "CPU", options).create_infer_request()
    return lambda images: request.infer([images.numpy()])


def onnx_runtime(model: Model, threads: int) -> Run:
    import onnxruntime as ort
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Images(CalibrationDataReader):
        def __init__(self) -> None:
            self.left = [{"images": image[None].numpy()} for image in model.images]

        def get_next(self) -> dict | None:
            return self.left.pop() if self.left else None

    paths = [str(model.folder / f"{model.name}{end}.onnx") for end in ("", "_prepared", "_int8")]
    batch = {"images": {0: torch.export.Dim("batch", min=1, max=64)}}
    torch.onnx.export(
        model.module, (model.images[:2],), paths[0], input_names=["images"], dynamo=True, external_data=False,
        dynamic_shapes=tuple(batch.values()), verbose=False,
    )  # fmt: skip
    quant_pre_process(paths[0], paths[1], skip_symbolic_shape=True)
    quantize_static(
        paths[1], paths[2], Images(), quant_format=QuantFormat.QDQ, per_channel=True,
        activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
    )  # fmt: skip
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = ort.InferenceSession(paths[2], options, providers=["CPUExecutionProvider"])
    return lambda images: session.run(None, {"images": images.numpy()})


def float_types() -> dict[torch.dtype, str]:
    """float32, and bfloat16 where the processor multiplies it: elsewhere it takes torch seven times as long."""
    info = Path("/proc/cpuinfo")
    flags = set(info.read_text().split()) if info.is_file() else set()
    bfloat16 = {"avx512_bf16", "amx_bf16", "bf16"} & flags
    return {dtype: name for dtype, name in FLOATS.items() if bfloat16 or dtype != torch.bfloat16}


CONTENDERS: dict[str, Callable[[Model, int], Run]] = {
    OURS: ours,
    **{f"{name}, eager": partial(torch_eager, dtype=dtype) for dtype, name in float_types().items()},
    **{f"{name}, compiled": partial(torch_compiled, dtype=dtype) for dtype, name in float_types().items()},
    PEERS[0]: openvino,
    PEERS[1]: onnx_runtime,
}


def measure(setting: Setting) -> Iterator[Row]:
    """Times of every contender with one and with two threads, all taking turns, and the integer model's peak memory.

    With one thread the clock counts the process's own time, so that other processes on the machine do not count.
    """
    import timm

    for name in MODELS[: 1 if setting.quick else None]:
        torch.manual_seed(setting.seed)
        module = timm.create_model(name, pretrained=False).eval()
        images = torch.randn(CALIBRATION, *module.pretrained_cfg["input_size"])
        with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
            model = Model(name, module, images, Path(folder))
            for threads in THREADS[: 1 if setting.quick else None]:
                yield from _measure_model(model, threads, setting)
            yield from _memory(model, setting)


def _measure_model(model: Model, threads: int, setting: Setting) -> Iterator[Row]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    runs, plural = {}, "threads" if threads > 1 else "thread"
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, before)
        for label, make in CONTENDERS.items():
            setting.log(f"{model.name}, {threads} {plural}: {label}")
            try:
                runs[label] = make(model, threads)
                runs[label](model.images[:1])
            except Exception as error:  # whatever stops a contender is a result
                runs.pop(label, None)
                yield Row(label, f"{model.name}, {threads} {plural}", METRIC, None, note=describe(error))
        for batch in BATCHES[: 1 if setting.quick else None]:
            case = f"{model.name}, batch {batch}, {threads} {plural}"
            setting.log(case)
            x = torch.randn(batch, *model.images.shape[1:])
            clock, rest_s = (time.process_time, 0.0) if threads == 1 else (time.perf_counter, REST_S)
            calls = [partial(run, x) for run in runs.values()]
            if setting.rehearse:
                continue
            times = time_interleaved(calls, setting.budget_s, clock=clock, turn_s=TURN_S, rest_s=rest_s)
            seconds = dict(zip(runs, times, strict=True))
            for label, value in seconds.items():
                yield Row(label, case, METRIC, 1e3 * value, x=batch)
            yield from _ratios(case, batch, seconds)
            if threads > 1 and OURS in runs:
                counts = [partial(_on_threads, n, partial(runs[OURS], x)) for n in (1, threads)]
                one, several = time_interleaved(counts, setting.budget_s, turn_s=TURN_S)
                yield Row(OURS, case, "speedup over one thread", one / several, x=batch)


def _on_threads(count: int, run: Callable[[], Any]) -> None:
    torch.set_num_threads(count)
    run()


def _memory(model: Model, setting: Setting) -> Iterator[Row]:
    """Peak memory of a process that loads the integer model from its file and runs it, above what its imports take.

    The bound is the int8 weights, the two largest activations and 50 MB.
    """
    program, file = model.converted.program, model.folder / "integer.safetensors"
    model.converted.save(file)
    weights = sum(program.tensors[op.weight].numel() for op in program.operations if isinstance(op, Linear))
    activations = sorted(math.prod(x.shape) * x.dtype.itemsize for x in program.buffers.values())
    for batch in BATCHES[: 1 if setting.quick else None]:
        case = f"{model.name}, batch {batch}"
        setting.log(f"{case}: memory")
        shape = (batch, *model.images.shape[1:])
        command = [sys.executable, "-c", _PEAK, json.dumps([*sys.path]), str(file), json.dumps(shape)]
        peak = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        yield Row(OURS, case, MEMORY, peak, x=batch)
        yield Row(OURS, case, BOUND, (weights + batch * sum(activations[-2:])) / 1e6 + 50, x=batch)


_PEAK = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import torch
from intflash import integer
from intflash.integer import cpu

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

images = torch.zeros(json.loads(sys.argv[3]))
before = status("VmRSS")
model = integer.load(sys.argv[2], backend="cpu")
for _ in range(2):
    model(images)
print((status("VmHWM") - before) / 1e6)
"""


def _ratios(case: str, batch: int, seconds: dict[str, float]) -> Iterator[Row]:
    """How many times as long the better form of each rival takes."""
    if OURS not in seconds:
        return
    rivals = {name: [label for label in seconds if label.startswith(name)] for name in FLOATS.values()}
    rivals["the better INT8 runtime"] = [label for label in PEERS if label in seconds]
    for rival, labels in rivals.items():
        if labels:
            best = min(seconds[label] for label in labels)
            yield Row(OURS, case, f"speedup over {rival}", best / seconds[OURS], x=batch)


def conclude(rows: Sequence[Row]) -> list[str]:
    """The least and the largest speedup over each rival."""
    lines = []
    for metric in dict.fromkeys(row.metric for row in rows if row.metric.startswith("speedup")):
        values = [row.value for row in rows if row.metric == metric]
        lines.append(f"{metric}: {min(values):.2f} to {max(values):.2f}")
    return lines


EXPERIMENTS = (
    Experiment(
        "integer_cpu",
        "Integer models on a CPU: time of a forward pass",
        "docs/design/cpu.md",
        measure,
        conclude=conclude,
        notes=(
            "Random weights and images. Contenders take turns, medians. One thread: the process's own time "
            "(other processes on the machine do not count); two: wall clock, and 0.1 s of rest after each turn, since "
            "ONNX Runtime's threads spin for 55 ms after a call. bfloat16 is autocast, and only timed where the "
            "processor multiplies it. Every contender takes normalized float32 images from memory, the integer model "
            "too. Memory: of a process that loads the integer model from its file and calls it twice, above what its "
            "imports take."
        ),
        devices=("cpu",),
        limit_s=1800.0,
    ),
)
