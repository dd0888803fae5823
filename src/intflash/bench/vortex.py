"""The Vortex report's table with our programs beside it, and the sweep that finds where FlashAttention begins to win.

On the user's Vortex: instructions, cycles, IPC and memory latency by its counters.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from intflash.backends.vortex import launch as launches
from intflash.backends.vortex.device import Counters, VortexDevice
from intflash.backends.vortex.errors import VortexError
from intflash.backends.vortex.launch import PROGRAMS, Launch
from intflash.backends.vortex.simulator import build_simulator
from intflash.backends.vortex.toolchain import find_install
from intflash.bench.experiments import Figure, Row, Setting, untimed
from intflash.numerics.exp import scalar_exponent_constants

INSTRUCTIONS, CYCLES, IPC, LATENCY = "instructions", "cycles", "IPC", "latency"
COLUMNS = (INSTRUCTIONS, CYCLES, IPC, LATENCY)
MEMORY_CLOCK_RATIOS = (1, 4)
HEAD_DIMS = (8, 16, 32, 64)
SWEEP_SIZES = (1, 16, 32, 64, 128)  # one query and key: what launches cost


@dataclass(frozen=True)
class Entry:
    """A line of the table: one of our programs, and the report's counters for it (N = 64, d = 8, ratio 4)."""

    label: str
    program: str
    report: tuple[int, int, float, int] | None = None  # instructions, cycles, IPC, memory latency
    p_bits: int = 16


ENTRIES = (
    Entry("attention", "attention_f32", (1513613, 2984804, 0.507, 2907)),
    Entry("flash", "flash_f32", (634145, 3693943, 0.172, 988)),
    Entry("flash, split row", "flash_f32_split"),
    Entry("flash f16, TCU", "flash_f16_tensor", (2120872, 4794023, 0.442, 767)),
    Entry("intflash", "intflash_simt"),
    Entry("intflash_p8", "intflash_simt", p_bits=8),
    Entry("intflash, TCU", "intflash_tensor"),
    Entry("intflash_p8, TCU", "intflash_tensor", p_bits=8),
)


def make_launch(program: str, n: int, d: int, seed: int = 0, p_bits: int = 16) -> Launch:
    """A program on one head of normal inputs, N = n queries and keys; integer programs on their int8 codes.

    Args:
        program: a name of `launch.PROGRAMS`.
        n: queries and keys.
        d: head_dim, 8 to 64.
        seed: of the inputs, the same for every program.
        p_bits: of an integer program: 16 for `intflash`, 8 for `intflash_p8`.
    """
    q, k, v = np.random.default_rng(seed).normal(size=(3, n, d)).astype(np.float32)
    if not PROGRAMS[program].integer:
        return launches.float_launch(program, q, k, v, 1 / math.sqrt(d))
    (q, s_q), (k, s_k), (v, _) = (_quantize(x) for x in (q, k, v))
    columns = np.zeros(d, launches.MULTIPLIER)
    columns["multiplier"], columns["exponent"] = 1 << 23, 1  # s_O = s_V
    exponent = scalar_exponent_constants(s_q, s_k, 1 / math.sqrt(d))
    return launches.integer_launch(program, q, k, v, p_bits=p_bits, exponent=exponent, multipliers=columns, out_bits=8)


def measure_program(program: str, n: int, d: int, device: VortexDevice, seed: int = 0, p_bits: int = 16) -> Counters:
    """Vortex's counters for one program, summed over its kernels.

    Raises:
        VortexError: a part of Vortex is missing, or the run failed.
    """
    return device(make_launch(program, n, d, seed, p_bits))


def simulators(ratios: Sequence[int] = MEMORY_CLOCK_RATIOS) -> dict[int, VortexDevice]:
    """The user's simx built at each memory clock ratio.

    Raises:
        VortexError: a part of Vortex is missing; the message names it.
    """
    install = find_install()
    return {ratio: VortexDevice(install, build_simulator(install, ratio)) for ratio in ratios}


def _report_table(setting: Setting) -> Iterator[Row]:
    """One table per memory clock ratio, the report's columns."""
    n, d = 64, 8
    missing = None
    try:
        devices: dict[int, VortexDevice | None] = dict(simulators())
    except VortexError as error:
        devices, missing = dict.fromkeys(MEMORY_CLOCK_RATIOS), str(error)
    for ratio, device in devices.items():
        for entry in _entries(d):
            counters, note = None, missing
            if device is not None:
                setting.log(f"{entry.label} on simx, memory clock ratio {ratio}")
                try:
                    counters = measure_program(entry.program, n, d, device, setting.seed, entry.p_bits)
                except VortexError as error:
                    note = str(error)
            report = dict(zip(COLUMNS, entry.report or (), strict=False)) if ratio == 4 else {}
            for column, value in _columns(counters).items():
                if counters is None and note is missing and column not in report:
                    continue  # no Vortex: only the report's own numbers are left to print
                metric = f"memory 1:{ratio}"
                yield Row(entry.label, column, metric, value, report.get(column), backend="vortex", note=note)
                note = missing = None  # once is enough


def _columns(counters: Counters | None) -> dict[str, float | None]:
    if counters is None:
        return dict.fromkeys(COLUMNS)
    values = (counters.instructions, counters.cycles, counters.ipc, counters.memory_latency)
    return dict(zip(COLUMNS, values, strict=True))


def _entries(d: int) -> list[Entry]:
    """The lines for a head_dim: of float FlashAttention, the program that the backend runs."""
    flash = launches.float_program(d)
    return [e for e in ENTRIES if e.program not in launches.FLASH_PROGRAMS or e.program == flash]


def _taken(entry: Entry, d: int) -> bool:
    """Whether the backend takes an integer program on some device; standard attention and float ones are compared."""
    programs = [launches.integer_program(d, entry.p_bits, tensor_unit) for tensor_unit in (False, True)]
    return entry.program in programs or not PROGRAMS[entry.program].integer


def _sizes(setting: Setting) -> list[tuple[int, int]]:
    return [(n, d) for d in (HEAD_DIMS[:1] if setting.quick else HEAD_DIMS) for n in SWEEP_SIZES]


def _sweep(setting: Setting) -> Iterator[Row]:
    try:
        device = simulators((4,))[4]
    except VortexError as error:
        yield Row(ENTRIES[0].label, "any N", f"{CYCLES}, d = 8", None, note=str(error))
        return
    points = [(n, d, entry) for n, d in _sizes(setting) for entry in _entries(d) if _taken(entry, d)]

    def measure(point: tuple[int, int, Entry]) -> tuple[int | None, str | None]:
        n, d, entry = point
        setting.log(f"{entry.label} on simx, N = {n}, d = {d}")
        try:
            return measure_program(entry.program, n, d, device, setting.seed, entry.p_bits).cycles, None
        except VortexError as error:
            return None, str(error)

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # simx takes one core; what it counts does not depend on time
        for (n, d, entry), (cycles, note) in zip(points, pool.map(measure, points), strict=True):
            yield Row(entry.label, f"N = {n}", f"{CYCLES}, d = {d}", cycles, x=n, backend="vortex", note=note)


def _winners(rows: Sequence[Row]) -> list[str]:
    """From which N on a program stays below standard attention."""
    sentences = []
    values = {(row.metric, row.series, row.x): row.value for row in rows if row.value is not None}
    for metric, series in dict.fromkeys((metric, series) for metric, series, _ in values):
        points = sorted(x for m, s, x in values if (m, s) == (metric, series))
        standard = [values.get((metric, ENTRIES[0].label, x)) for x in points]
        if series == ENTRIES[0].label or None in standard:
            continue
        below = [values[metric, series, x] < other for x, other in zip(points, standard, strict=True)]
        first = next((x for i, x in enumerate(points) if all(below[i:])), None)
        where = f"below standard attention from N = {first:g} on" if first else f"not below it up to N = {points[-1]:g}"
        sentences.append(f"{series}, {metric}: {where}.")
    return sentences


def _against_standard(rows: Sequence[Row]) -> list[str]:
    """What the report's FlashAttention did not reach: fewer cycles than standard attention."""
    sentences = []
    values = {(row.metric, row.case, row.series): row.value for row in rows if row.value is not None}
    for (metric, column, series), value in values.items():
        standard = values.get((metric, column, ENTRIES[0].label))
        if standard and column == CYCLES and series != ENTRIES[0].label:
            sentences.append(f"{series}, {metric}: {value / standard:.2f} times standard attention's {column}.")
    return sentences


def _quantize(x: np.ndarray) -> tuple[np.ndarray, float]:
    scale = float(np.abs(x).max()) / 127
    return np.rint(x / scale).astype(np.int8), scale


_ON_SIMX = (
    "simx with 4 cores, 2 warps a core, 8 threads a warp; instructions are thread-instructions over all cores, cycles "
    "those of the slowest core, latency the mean cycles of a memory read."
)

EXPERIMENTS = (
    untimed(
        name="vortex_table",
        title="Attention on Vortex, N = 64, d = 8: the report's table and integer-only programs",
        source="Vortex report",
        measure=_report_table,
        conclude=_against_standard,
        notes=_ON_SIMX,
        devices=("cpu",),
    ),
    untimed(
        name="vortex_sweep",
        title="Attention on Vortex: from which N on FlashAttention needs fewer cycles",
        source="Vortex report, which measured one size",
        measure=_sweep,
        figures=tuple(Figure(f"{CYCLES}, d = {d}", "lines", "N") for d in HEAD_DIMS),
        conclude=_winners,
        notes=_ON_SIMX + " Memory clock ratio 4.",
        devices=("cpu",),
    ),
)
