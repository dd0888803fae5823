"""The report's table and the sweep: what they measure, and what they say where there is no Vortex."""

import csv
import re
from pathlib import Path

import pytest

from intflash.backends.vortex.device import Counters, VortexDevice
from intflash.backends.vortex.errors import VortexError
from intflash.backends.vortex.simulator import build_simulator
from intflash.backends.vortex.toolchain import find_install
from intflash.bench import vortex
from intflash.bench.experiments import Row, Setting


@pytest.fixture
def install(fake_install, monkeypatch):
    for name, value in fake_install.env.items():
        monkeypatch.setenv(name, value)
    return find_install()


def makefile(install, recipe: str) -> None:
    folder = install.runtime / "simx"
    folder.mkdir()
    (folder / "Makefile").write_text(f"all:\n\t{recipe}\n")


def test_simulator_is_built_once_per_memory_clock_ratio(install):
    makefile(install, "echo '$(CONFIGS)' >> $(DESTDIR)/log; touch $(DESTDIR)/libvortex-simx.so")
    slow, fast = build_simulator(install, 4), build_simulator(install, 1)
    assert slow != fast and build_simulator(install, 4) == slow
    configs = (slow / "log").read_text().splitlines()
    assert len(configs) == 1
    assert set(configs[0].split()) >= {"-DNUM_CORES=4", "-DNUM_WARPS=2", "-DNUM_THREADS=8", "-DMEM_CLOCK_RATIO=4"}


def test_simulator_that_cannot_be_built(install):
    with pytest.raises(VortexError, match="simx is missing"):
        build_simulator(install, 4)
    makefile(install, "echo broken >&2; false")
    with pytest.raises(VortexError, match="(?s)building simx failed.*broken"):
        build_simulator(install, 4)


def test_table_without_vortex_prints_only_the_reports_numbers(monkeypatch):
    monkeypatch.delenv("VORTEX_HOME", raising=False)
    rows = list(vortex._report_table(Setting()))
    assert all(row.value is None and row.paper is not None for row in rows)
    assert {row.series: row.paper for row in rows if row.case == vortex.CYCLES} == {
        "attention": 2984804,
        "flash": 3693943,
        "flash f16, TCU": 4794023,
    }
    assert [row.note for row in rows if row.note] == [rows[0].note]
    assert "VORTEX_HOME is not set" in rows[0].note


def test_table_with_vortex(monkeypatch):
    monkeypatch.setattr(vortex, "simulators", lambda: {1: "fast memory", 4: "slow memory"})
    cycles = {"attention_f32": 1000, "intflash_simt": 600}

    def measure(program, n, d, device, seed, p_bits):
        if program == "flash_f16_tensor":
            raise VortexError("no tensor unit in this build")
        return Counters(200, cycles.get(program, 2000) * (2 if device == "slow memory" else 1), 4, 40)

    monkeypatch.setattr(vortex, "measure_program", measure)
    rows = list(vortex._report_table(Setting()))
    table = {(row.metric, row.series, row.case): row for row in rows}
    assert table["memory 1:1", "intflash", vortex.CYCLES].value == 600
    assert table["memory 1:4", "attention", vortex.IPC].value == 0.1
    assert table["memory 1:4", "attention", vortex.IPC].paper == 0.507
    assert table["memory 1:1", "attention", vortex.IPC].paper is None
    assert table["memory 1:1", "attention", vortex.LATENCY].value == 10
    refused = table["memory 1:4", "flash f16, TCU", vortex.INSTRUCTIONS]
    assert refused.value is None and refused.note == "no tensor unit in this build"
    assert "intflash, memory 1:4: 0.60 times standard attention's cycles." in vortex._against_standard(rows)


@pytest.mark.parametrize("program", list(vortex.PROGRAMS))
def test_launches_are_complete(program):
    launch = vortex.make_launch(program, 20, 16)
    assert launch.arguments(0, dict.fromkeys(launch.buffers, 64)).n_k == 20


def test_winners_are_found_from_the_right_side():
    metric = f"{vortex.CYCLES}, d = 8"
    values = {"attention": (10, 20, 40), "flash": (12, 19, 30), "intflash": (9, 21, 41)}
    rows = [Row(s, f"N = {n}", metric, v, x=n) for s, vs in values.items() for n, v in zip((1, 2, 4), vs, strict=True)]
    assert vortex._winners(rows) == [
        "flash, cycles, d = 8: below standard attention from N = 2 on.",
        "intflash, cycles, d = 8: not below it up to N = 4.",
    ]


def test_measuring_goes_through_the_device(install, monkeypatch):
    seen = []
    monkeypatch.setattr(VortexDevice, "__call__", lambda self, launch: seen.append(launch) or Counters(1, 2, 3, 4))
    assert vortex.measure_program("attention_f32", 16, 8, VortexDevice(install)).cycles == 2
    assert seen[0].program.stages == 3


def test_sweep_begins_where_only_launches_cost(monkeypatch):
    monkeypatch.setattr(vortex, "simulators", lambda ratios: {4: "device"})
    monkeypatch.setattr(vortex, "measure_program", lambda program, n, *_: Counters(1, n, 1, 1))
    rows = list(vortex._sweep(Setting(quick=True)))
    assert [row.value for row in rows if row.series == "attention"] == [1, 16, 32, 64, 128]


@pytest.mark.parametrize("d", vortex.HEAD_DIMS)
def test_sweep_takes_the_programs_that_the_backend_takes(monkeypatch, d):
    monkeypatch.setattr(vortex, "simulators", lambda ratios: {4: "device"})
    monkeypatch.setattr(vortex, "measure_program", lambda *_: Counters(1, 1, 1, 1))
    rows = [row for row in vortex._sweep(Setting()) if row.metric == f"cycles, d = {d}"]
    assert {row.x for row in rows} == set(vortex.SWEEP_SIZES)
    assert {row.series for row in rows} == {
        "attention", "flash" if d == 8 else "flash, split row", "flash f16, TCU",
        "intflash", "intflash_p8", "intflash_p8, TCU", *(["intflash, TCU"] if d > 8 else []),
    }  # fmt: skip


def test_the_guides_cycles_are_the_results():
    root = Path(__file__).parents[3]
    rows = []
    for name in ("table", "sweep"):
        with (root / f"benchmarks/results/vortex/vortex_{name}.csv").open() as file:
            rows += csv.DictReader(file)
    values = {(r["series"], r["case"], r["metric"]): r["value"] for r in rows}
    series = {"standard attention, float32": "attention", "`intflash`, SIMT": "intflash"}
    series |= {"`intflash_p8`, SIMT": "intflash_p8", "`intflash`, tensor unit": "intflash, TCU"}
    series |= {"`intflash_p8`, tensor unit": "intflash_p8, TCU"}
    series |= {"FlashAttention, float16, tensor unit": "flash f16, TCU"}
    page = (root / "docs/guide/vortex.md").read_text(encoding="utf-8")
    for title, label in series.items():
        cells = re.search(rf"^\| {title} \|(.*)\|$", page, re.M)[1].replace(",", "").split("|")
        at_8 = [values[label, case, "memory 1:4"] for case in ("instructions", "cycles")]
        ratios = [float(values[label, case, "memory 1:4"]) for case in ("IPC", "latency")]
        others = [values[label, "N = 64", f"cycles, d = {d}"] for d in (16, 32, 64)]
        assert [cells[i].strip() for i in (0, 3, 5, 6, 7)] == [*at_8, *others]
        assert [cells[1].strip(), cells[2].strip()] == [f"{ratios[0]:.2f}", f"{ratios[1]:.0f}"]
