"""The tables of QFlash that need the GPU's counters: energy by NVML, tensor-core utilization by Nsight Compute."""

from __future__ import annotations

from collections.abc import Iterator

from intflash.bench.experiments import Experiment, Figure, Row, Setting
from intflash.bench.workloads import QFLASH

METHODS = (
    "flash fp16", "cuDNN fp16", "int_flash_full", "int_flash_half", "qattn", "qflash", "intflash_p8", "intflash",
)  # fmt: skip
ENERGY_METRIC = "uJ per call"
_ENERGY = {"flash fp16": 929.6, "int_flash_full": 840.0, "int_flash_half": 920.5, "qattn": 795.2, "qflash": 754.6}


def _energy(setting: Setting) -> Iterator[Row]:
    from intflash.bench.gpu_launches import make_kernels, uniform_inputs
    from intflash.bench.gpu_timing import joules

    for batch in (8,) if setting.quick else (8, 1024):
        case = f"A2 b{batch}"
        kernels, refused = make_kernels(METHODS, uniform_inputs(QFLASH["A2"].batched(batch).shape, setting.seed))
        for name, kernel in {} if setting.rehearse else kernels.items():
            setting.log(f"{case} {name}")
            energy, seconds = joules(kernel.launch, 1.0)
            place = dict(series=name, case=case, backend=kernel.backend)
            paper = _ENERGY.get(name) if batch == 8 else None
            yield Row(metric=ENERGY_METRIC, value=1e6 * energy, paper=paper, **place)
            yield Row(metric="W", value=energy / seconds, **place)
        for name, reason in refused.items():
            yield Row(name, case, ENERGY_METRIC, None, note=reason)


ENERGY = Experiment(
    name="qflash_table3",
    title="Energy of one attention call, A2",
    source="QFlash, Table 3 (RTX 5090, nvidia-smi)",
    measure=_energy,
    figures=(Figure(ENERGY_METRIC),),
    notes="NVML's energy counter over one second of graph replays of the attention launch: the whole board, idle "
    "power included.",
    devices=("cuda",),
)

# QFlash Table 2: (method, workload) -> IMMA and HMMA in percent of their peak.
_UTILIZATION = {
    ("flash fp16", "A2"): (None, 13.08), ("flash fp16", "A7"): (None, 4.69),
    ("qattn", "A2"): (3.75, 7.51), ("qattn", "A7"): (1.25, 2.51),
    ("int_flash_half", "A2"): (3.38, 6.75), ("int_flash_half", "A7"): (1.12, 2.25),
    ("int_flash_full", "A2"): (7.18, None), ("int_flash_full", "A7"): (2.13, None),
    ("qflash", "A2"): (8.00, None), ("qflash", "A7"): (2.55, None),
}  # fmt: skip


def _utilization(setting: Setting) -> Iterator[Row]:
    from benchmarks import tensor_pipe as profile

    if setting.rehearse:
        return
    workloads = ("A2",) if setting.quick else ("A2", "A7")
    for name, workload, reading in profile.run(METHODS, workloads, setting.seed):
        papers = _UTILIZATION.get((name, workload), (None, None))
        if isinstance(reading, str):
            yield Row(name, workload, f"{profile.UNITS[0]}, % of peak", None, note=reading)
            continue
        for unit, value, paper in zip(profile.UNITS, reading.percent, papers, strict=True):
            if value or paper is not None:
                yield Row(name, workload, f"{unit}, % of peak", value, paper=paper, backend=reading.backend)


UTILIZATION = Experiment(
    name="qflash_table2",
    title="Tensor-core utilization, batch 8",
    source="QFlash, Table 2 (RTX 5090)",
    measure=_utilization,
    figures=(Figure("IMMA, % of peak"), Figure("HMMA, % of peak")),
    notes="Cycles in which the tensor pipe works on integer (IMMA, IGMMA) or on float16 and bfloat16 products (HMMA, "
    "HGMMA) in percent of the active cycles, by Nsight Compute, of the attention launch alone. The profiler empties "
    "the caches before each kernel and leaves the clocks as they are.",
    devices=("cuda",),
)

EXPERIMENTS: tuple[Experiment, ...] = (UTILIZATION, ENERGY)
