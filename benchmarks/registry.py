"""Lists every experiment: those of this folder, and those that the `intflash` command also runs."""

from __future__ import annotations

from benchmarks import (
    call_cost,
    conversion,
    energy,
    every_gpu,
    generation,
    gpu_kernels,
    host_cost,
    integer_cpu,
    latency,
    output_scales,
    p_precision,
    specification,
    variant_accuracy,
)
from intflash.bench import accuracy, vortex
from intflash.bench.experiments import Experiment, collect

EXPERIMENTS: tuple[Experiment, ...] = collect(
    (
        accuracy,
        variant_accuracy,
        output_scales,
        p_precision,
        specification,
        latency,
        call_cost,
        host_cost,
        generation,
        gpu_kernels,
        conversion,
        energy,
        every_gpu,
        integer_cpu,
        vortex,
    )
)
