"""The kernels as RISC-V code: they compile with a plain clang, the integer ones hold no float instruction, and run in
lockstep on our interpreter they have the reference's bits without a branch that splits a warp."""

import copy

import numpy as np
import pytest

from intflash.backends.vortex import launch
from intflash.backends.vortex.errors import VortexError
from intflash.backends.vortex.launch import KERNELS, PROGRAMS
from intflash.bench import vortex as bench
from machines import riscv, vortex_shim
from machines.riscv.decode import F_OPCODES
from machines.riscv.machine import executable_words, undefined_symbols

FLOAT_CSRS = (1, 2, 3)  # fflags, frm, fcsr
SDK = {"vx_spawn_threads", "vx_barrier", "vx_stub_csr_read", "blockIdx", "threadIdx", "__local_group_id"}
SDK |= {"__warps_per_group", "vx_stub_fill", "vx_stub_load", "vx_stub_store", "vx_stub_mma"}
SDK |= {"gridDim", "vx_hart_id", "vx_num_cores", "vx_num_warps", "vx_num_threads"}


def float_instructions(elf: bytes) -> int:
    words = executable_words(elf)
    assert len(words) > 50
    csr_access = [w for w in words if w & 127 == 0x73 and w >> 12 & 7 and w >> 20 in FLOAT_CSRS]
    return sum(w & 127 in F_OPCODES for w in words) + len(csr_access)


def variants(name: str) -> list[dict[str, int]]:
    defines = [{"HEAD_DIM": d, "LANES": launch.head_lanes(d)} for d in (8, 24, 64)]
    if PROGRAMS[name].integer:
        options = [dict(OUT_BITS=8), dict(OUT_BITS=16, OUT_WIDE=1, WIDE=1), dict(OUT_BITS=64)]
        p = [dict(P_BITS=8), dict(P_BITS=16), dict(P_BITS=16, LONG=1)]
        defines = [d | o | bits for d in defines for o in options for bits in p]
    return defines


@pytest.mark.parametrize("name", PROGRAMS)
def test_compiles_and_needs_nothing_but_the_sdk(riscv_compiler, name):
    for defines in variants(name)[:: 4 if PROGRAMS[name].integer else 1]:
        elf = riscv.compile_object(riscv_compiler, PROGRAMS[name].path, defines)
        assert undefined_symbols(elf) <= SDK  # no soft float, no 64-bit divide or shift helper, no memset


@pytest.mark.parametrize("name", [name for name, program in PROGRAMS.items() if program.integer])
def test_integer_kernels_hold_no_float_instruction(riscv_compiler, name):
    for defines in variants(name)[::5]:  # every head_dim, output and width of P at least once
        elf = riscv.compile_object(riscv_compiler, PROGRAMS[name].path, defines)
        assert float_instructions(elf) == 0, defines


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name, program in PROGRAMS.items() if program.integer])
def test_no_variant_holds_a_float_instruction(riscv_compiler, name):
    for defines in variants(name):
        elf = riscv.compile_object(riscv_compiler, PROGRAMS[name].path, defines)
        assert float_instructions(elf) == 0, defines


@pytest.mark.parametrize("name", ["flash_f32", "attention_f32", "flash_f16_tensor"])
def test_the_search_finds_float_instructions(riscv_compiler, name):
    elf = riscv.compile_object(riscv_compiler, PROGRAMS[name].path, {"HEAD_DIM": 8, "LANES": 1})
    assert float_instructions(elf) > 20


@pytest.mark.parametrize("name", ["intflash_simt"])
def test_integer_kernels_compile_where_there_is_no_float_unit(riscv_compiler, name):
    defines = {"HEAD_DIM": 24, "LANES": launch.head_lanes(24), "OUT_BITS": 8, "P_BITS": 16}
    elf = riscv.compile_object(riscv_compiler, PROGRAMS[name].path, defines, ("-march=rv32im", "-mabi=ilp32"))
    assert undefined_symbols(elf) <= SDK


def test_runtime_compiles(riscv_compiler):
    elf = riscv.compile_object(riscv_compiler, KERNELS / "runtime.c", {})
    assert float_instructions(elf) == 0


def integer(name: str, n: int, d: int, p_bits: int, out_bits: int = 8, exponent=(768551, 0)) -> launch.Launch:
    rng = np.random.default_rng(n + d)
    q, k, v = rng.integers(-127, 128, (3, n, d), dtype=np.int8)
    columns = np.zeros(d, launch.MULTIPLIER)
    columns["multiplier"] = rng.integers(1 << 23, (1 << 24) + 1, d)
    columns["exponent"] = rng.integers(-1, 4, d)
    return launch.integer_launch(
        name, q, k, v, p_bits=p_bits, exponent=exponent, multipliers=columns, out_bits=out_bits
    )


@pytest.mark.usefixtures("host_compiler", "riscv_linker")
@pytest.mark.parametrize(
    ("n", "d"), [(37, 16), (20, 40), *(pytest.param(*x, marks=pytest.mark.full) for x in ((64, 8), (17, 64)))]
)
@pytest.mark.parametrize(("name", "p_bits"), [("intflash_simt", 16), ("intflash_simt", 8)])
def test_riscv_code_has_the_bits_of_the_shim(riscv_compiler, name, p_bits, n, d):
    native = integer(name, n, d, p_bits)
    compiled = copy.deepcopy(native)
    vortex_shim.run(native)
    assert riscv.Interpreter(riscv_compiler)(compiled) > 0
    assert np.array_equal(native.buffers["o_addr"], compiled.buffers["o_addr"])


@pytest.mark.usefixtures("host_compiler", "riscv_linker")
@pytest.mark.parametrize("options", [{"out_bits": 16}, {"out_bits": 64}, {"exponent": (1 << 30, 5)}])
@pytest.mark.parametrize("n", [20, pytest.param(270, marks=pytest.mark.full)])  # 270: past one flush
def test_riscv_code_of_the_variants(riscv_compiler, n, options):
    native = integer("intflash_simt", n, 16, 16, **options)
    compiled = copy.deepcopy(native)
    vortex_shim.run(native)
    riscv.Interpreter(riscv_compiler)(compiled)
    for name in native.outputs:
        assert np.array_equal(native.buffers[name], compiled.buffers[name])


@pytest.mark.usefixtures("host_compiler", "riscv_linker")
@pytest.mark.parametrize("name", ["attention_f32", "flash_f32", "flash_f32_split"])
def test_riscv_float_code_meets_the_shim(riscv_compiler, name):
    q, k, v = np.random.default_rng(3).normal(size=(3, 37, 24))
    native = launch.float_launch(name, q, k, v, 0.2)
    compiled = copy.deepcopy(native)
    vortex_shim.run(native)
    riscv.Interpreter(riscv_compiler)(compiled)
    assert np.abs(native.buffers["o_addr"] - compiled.buffers["o_addr"]).max() < 2e-6


@pytest.mark.usefixtures("riscv_linker")
@pytest.mark.parametrize("d", [8, 32, *(pytest.param(d, marks=pytest.mark.full) for d in (16, 64))])
def test_integer_flash_executes_fewer_instructions_than_standard_attention(riscv_compiler, d):
    count = riscv.Interpreter(riscv_compiler)
    attention = count(bench.make_launch("attention_f32", 64, d))
    assert count(bench.make_launch("intflash_simt", 64, d)) < attention


@pytest.mark.usefixtures("riscv_linker")
def test_interpreter_refuses_a_branch_that_splits_a_warp(riscv_compiler, tmp_path, monkeypatch):
    source = (KERNELS / "flash_f32.cpp").read_text()
    assert "  float m = LOWEST, l = 0;\n" in source
    broken = source.replace("  float m = LOWEST, l = 0;\n", "  float m = LOWEST, l = 0;\n  if (thread == 3) SYNC();\n")
    (tmp_path / "broken.cpp").write_text(broken)
    run = launch.float_launch("flash_f32", *np.zeros((3, 16, 8)), 1.0)
    run.program = launch.Program("broken", str(tmp_path / "broken.cpp"), integer=False)
    with pytest.raises(VortexError, match="splits a warp"):
        riscv.Interpreter(riscv_compiler)(run)


def test_interpreter_has_no_tensor_unit(riscv_compiler, riscv_linker):
    with pytest.raises(VortexError, match="no tensor unit"):
        riscv.Interpreter(riscv_compiler)(launch.float_launch("flash_f16_tensor", *np.zeros((3, 16, 8)), 1.0))
