"""The driver without Vortex: argument layout, image packer, environment, compiler, and a fake runtime library."""

import ctypes
import json
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import intflash
from intflash.backends.reference import BACKEND as REFERENCE
from intflash.backends.vortex import backend, launch
from intflash.backends.vortex.device import Counters, VortexDevice
from intflash.backends.vortex.errors import VortexError
from intflash.backends.vortex.image import pack_image
from intflash.backends.vortex.launch import KERNELS, PROGRAMS, KernelArgs
from intflash.backends.vortex.toolchain import compile_kernel, find_install, library_flags
from intflash.call import prepare
from intflash.errors import BackendError
from intflash.numerics.exp import scalar_exponent_constants
from intflash.quant import Recipe
from machines import riscv, vortex_shim


def attention_launch() -> launch.Launch:
    q, k, v = np.random.default_rng(0).normal(size=(3, 16, 8))
    return launch.float_launch("attention_f32", q, k, v, 0.3)


# --- argument block


def test_argument_layout_is_the_kernels(host_compiler, tmp_path):
    names = [name for name, _ in KernelArgs._fields_]
    source = tmp_path / "layout.cpp"
    prints = "".join(f'printf("%zu ", offsetof(kernel_args_t, {name}));' for name in names)
    source.write_text(
        '#include <stddef.h>\n#include <stdio.h>\n#include "kernel_args.h"\n'
        f'int main() {{ {prints} printf("%zu %zu %zu", sizeof(kernel_args_t), sizeof(output_multiplier_t), '
        "sizeof(row_stats_t)); }"
    )
    program = tmp_path / "layout"
    subprocess.run([host_compiler, f"-I{KERNELS}", str(source), "-o", str(program)], check=True)
    printed = [int(x) for x in subprocess.run([program], capture_output=True, text=True).stdout.split()]
    sizes = [ctypes.sizeof(KernelArgs), launch.MULTIPLIER.itemsize, launch.ROW_STATS.itemsize]
    assert printed == [getattr(KernelArgs, name).offset for name in names] + sizes


@pytest.mark.parametrize("seed", range(20))
def test_depth_constants_are_exact(seed):
    rng = np.random.default_rng(seed)
    for _ in range(200):
        C, k = scalar_exponent_constants(1.0, 1.0, float(2.0 ** rng.uniform(-34, 6)))
        M, a = launch.depth_constants(C, k)
        assert 0 <= M < 1 << 32 and 0 <= a <= 13
        for d in (0, 1, 2, 3, int(rng.integers(1, 1 << 11)), 2 * 64 * 127**2):
            if a > 11:
                d = min(d, 4)  # the kernels' WIDE form saturates there
            exact, ours = (d << k) * C >> 23, (d << a) * M >> 32
            assert d << a < 1 << 32
            assert ours == exact or (k >= 6 and min(ours, exact) >= 7373)


def test_head_dim_past_the_kernels():
    with pytest.raises(ValueError, match="head_dim 65"):
        launch.float_launch("flash_f32", *np.zeros((3, 4, 65)), 1.0)


# --- image packer


def elf32(segments: list[tuple[int, bytes, int]], machine: int = 243) -> bytes:
    """A program of (address, bytes in the file, bytes in memory) segments."""
    header = b"\x7fELF\x01\x01\x01" + bytes(9)
    header += struct.pack("<HHIIIIIHHHHHH", 2, machine, 1, 0, 52, 0, 0, 52, 32, len(segments), 0, 0, 0)
    offset = 52 + 32 * len(segments)
    table, body = b"", b""
    for address, data, memory in segments:
        table += struct.pack("<8I", 1, offset + len(body), address, address, len(data), memory, 5, 4)
        body += data
    return header + table + body


def test_image_holds_the_segments_and_their_span():
    image = pack_image(elf32([(0x80000000, b"abcd", 4), (0x80000010, b"xy", 100)]))
    assert struct.unpack_from("<QQ", image) == (0x80000000, 0x80000010 + 100)
    assert image[16:] == b"abcd" + bytes(12) + b"xy"


def test_image_of_a_wide_program():
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 2, 243, 1, 0, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    program = struct.pack("<IIQQQQQQ", 1, 5, 120, 0x180000000, 0x180000000, 3, 8, 4)
    image = pack_image(header + program + b"abc")
    assert image == struct.pack("<QQ", 0x180000000, 0x180000008) + b"abc"


@pytest.mark.parametrize(
    ("elf", "message"),
    [
        (b"not a program", "did not write an ELF"),
        (elf32([(0, b"abcd", 4)], machine=62), "machine 62"),
        (elf32([]), "no loadable segment"),
        (elf32([(0x80000000, b"abcd", 4)])[:-2], "cut short"),
    ],
)
def test_image_of_something_else(elf, message):
    with pytest.raises(VortexError, match=message):
        pack_image(elf)


@pytest.mark.usefixtures("riscv_linker")
def test_image_equals_objcopy(riscv_compiler, tmp_path):
    if shutil.which("llvm-objcopy") is None:
        pytest.skip("no llvm-objcopy (Debian: apt-get install llvm)")
    elf = riscv.link(riscv_compiler, KERNELS / "flash_f32.cpp", {"HEAD_DIM": 8})
    (tmp_path / "kernel.elf").write_bytes(elf)
    binary = tmp_path / "kernel.bin"
    subprocess.run(["llvm-objcopy", "-O", "binary", str(tmp_path / "kernel.elf"), str(binary)], check=True)
    assert pack_image(elf)[16:].rstrip(b"\0") == binary.read_bytes().rstrip(b"\0")


# --- environment


def test_complete_install(fake_install):
    install = find_install(fake_install.env)
    assert install.driver == "simx"
    assert install.kernel_library == fake_install.build / "kernel/libvortex.a"


@pytest.mark.parametrize("variable", ["VORTEX_HOME", "VORTEX_BUILD"])
def test_unset_variable(fake_install, variable):
    with pytest.raises(VortexError, match=f"{variable} is not set"):
        find_install({k: v for k, v in fake_install.env.items() if k != variable})
    with pytest.raises(VortexError, match=f"{variable}=/nowhere is not a folder"):
        find_install(fake_install.env | {variable: "/nowhere"})


@pytest.mark.parametrize(
    ("root", "part", "message"),
    [
        ("home", "kernel/include/vx_spawn.h", "VORTEX_HOME.*kernel/include/vx_spawn.h"),
        ("home", "kernel/scripts/link32.ld", "VORTEX_HOME.*link32.ld"),
        ("build", "hw/VX_config.h", "VX_config.h.*configure"),
        ("build", "kernel/libvortex.a", "libvortex.a.*make -C kernel"),
        ("build", "runtime/libvortex.so", "libvortex.so.*make -C runtime/stub"),
        ("build", "runtime/libvortex-simx.so", "libvortex-simx.so.*make -C runtime/simx"),
    ],
)
def test_missing_part(fake_install, root, part, message):
    (getattr(fake_install, root) / part).unlink()
    with pytest.raises(VortexError, match=message):
        find_install(fake_install.env)


def test_missing_driver_compiler_and_wrong_width(fake_install, tmp_path):
    with pytest.raises(VortexError, match="libvortex-xrt.so"):
        find_install(fake_install.env | {"VORTEX_DRIVER": "xrt"})
    with pytest.raises(VortexError, match="VORTEX_CXX=/no/clang"):
        find_install(fake_install.env | {"VORTEX_CXX": "/no/clang"})
    with pytest.raises(VortexError, match="no RISC-V compiler"):
        find_install(fake_install.env | {"VORTEX_CXX": "", "PATH": str(tmp_path)})
    (fake_install.build / "config.mk").write_text("XLEN ?= 64\n")
    with pytest.raises(VortexError, match="XLEN=64"):
        find_install(fake_install.env)


def test_compiler_of_the_toolchain_folder(fake_install, tmp_path):
    own = tmp_path / "tools/llvm-vortex/bin/clang++"
    own.parent.mkdir(parents=True)
    shutil.copy(fake_install.env["VORTEX_CXX"], own)
    assert find_install(fake_install.env | {"VORTEX_CXX": ""}).compiler == own


def test_newer_tree_with_its_software_under_sw(fake_install):
    for root in (fake_install.home, fake_install.build):
        (root / "sw").mkdir()
        for folder in ("kernel", "runtime"):
            (root / folder).rename(root / "sw" / folder)
    assert find_install(fake_install.env).runtime == fake_install.build / "sw/runtime"


def test_backend_says_what_is_missing(monkeypatch):
    monkeypatch.delenv("VORTEX_HOME", raising=False)
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(BackendError, match="VORTEX_HOME is not set"):
        intflash.attention(q, q, q, backend="vortex")
    assert "vortex" not in str(intflash.attention(q, q, q).dtype)  # and is never chosen by itself


# --- compiler


@pytest.fixture
def install(fake_install, monkeypatch):
    for name, value in fake_install.env.items():
        monkeypatch.setenv(name, value)
    return find_install()


def test_kernel_is_compiled_once(install, fake_install):
    run = attention_launch()
    image = compile_kernel(install, run.program, run.defines)
    log = install.compiler.parent / "compiler.log"
    commands = log.read_text()
    assert "-DHEAD_DIM=8" in commands and "-mabi=ilp32f" in commands and "_zicond" in commands
    assert f"-I{fake_install.home}/kernel/include" in commands and "libvortex.a" in commands
    assert image.read_bytes()[:16] == struct.pack("<QQ", 0x80000000, 0x80000040)
    assert compile_kernel(install, run.program, run.defines) == image
    assert log.read_text() == commands


def test_compiler_that_fails(install):
    install.compiler.write_text("#!/bin/sh\ncase \"$*\" in */dev/null*) exit 0;; esac\necho 'bad code' >&2; exit 1\n")
    run = attention_launch()
    with pytest.raises(VortexError, match="(?s)building the kernel failed.*bad code"):
        compile_kernel(install, run.program, run.defines)


def test_compiler_without_riscv(install):
    install.compiler.write_text("#!/bin/sh\necho 'no such target' >&2; exit 1\n")
    run = attention_launch()
    with pytest.raises(VortexError, match="does not compile for riscv32.*no such target"):
        compile_kernel(install, run.program, {"HEAD_DIM": 8})


@pytest.mark.usefixtures("riscv_linker")
@pytest.mark.parametrize("name", PROGRAMS)
def test_real_compiler_and_linker(fake_install, riscv_compiler, tmp_path, monkeypatch, name):
    """Against a libvortex.a that only has the names: what a real install would be given to link."""
    archiver = shutil.which("ar") or shutil.which("llvm-ar")
    if archiver is None:
        pytest.skip("no ar")
    names = ["vx_hart_id", "vx_num_cores", "vx_num_warps", "vx_num_threads"]
    names += ["vx_spawn_threads", "vx_barrier", "vx_stub_csr_read", "vx_stub_fill", "vx_stub_load", "vx_stub_mma"]
    source = "".join(f"void {name}(void) {{}}\n" for name in [*names, "vx_stub_store", "_Exit"])
    source += "__thread int blockIdx[3], threadIdx[3], __local_group_id; int __warps_per_group;\n"
    source += "int main(void); void exit(int); void _start(void) { exit(main()); }\n"
    (tmp_path / "stub.c").write_text(source)
    target = [str(riscv_compiler).replace("clang++", "clang"), "--target=riscv32-unknown-elf", "-march=rv32imaf"]
    target += ["-mabi=ilp32f", "-w", "-ffreestanding", "-c", str(tmp_path / "stub.c"), "-o", str(tmp_path / "stub.o")]
    subprocess.run(target, check=True)
    library = fake_install.build / "kernel/libvortex.a"
    library.unlink()
    subprocess.run([archiver, "rc", str(library), str(tmp_path / "stub.o")], check=True)
    (fake_install.home / "kernel/scripts/link32.ld").write_text(
        "ENTRY(_start) SECTIONS { . = STARTUP_ADDR; .text : { *(.text .text.*) } .data : { *(.data .data.*) } }\n"
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    install = find_install(fake_install.env | {"VORTEX_CXX": str(riscv_compiler)})
    if PROGRAMS[name].tensor_unit:
        try:
            library_flags(install)
        except VortexError:
            pytest.skip("this clang++ has no C++ library's headers for RISC-V")
    image = compile_kernel(install, PROGRAMS[name], {"HEAD_DIM": 8, "LANES": 1}).read_bytes()
    start, end = struct.unpack_from("<QQ", image)
    assert start == 0x80000000 and end - start >= len(image) - 16 > 200


# --- runtime library


@pytest.fixture
def native(monkeypatch):
    """Tells the fake runtime which native kernel stands for the uploaded image."""

    def native(run: launch.Launch) -> launch.Launch:
        defines = tuple(f"-D{name}={value}" for name, value in sorted(run.defines.items()))
        monkeypatch.setenv("FAKE_VORTEX_KERNEL", vortex_shim.load(run.program.path, defines)._name)
        return run

    return native


def test_job_runs_and_counts(install, native, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_VORTEX_LOG", str(tmp_path / "calls"))
    expected = attention_launch()
    vortex_shim.run(expected)
    run = native(attention_launch())
    counters = VortexDevice(install)(run)
    assert np.array_equal(run.buffers["o_addr"], expected.buffers["o_addr"])
    # three stages on four cores, by the fake's formula: sums of instructions, slowest core's cycles
    assert counters.instructions == 3 * sum(0xB02 * 1000 + core for core in range(4))
    assert counters.cycles == 3 * (0xB00 * 1000 + 3)
    assert counters.memory_latency == 0xB1A / 0xB18
    calls = (tmp_path / "calls").read_text().split()
    assert calls[0] == "vx_dev_open" and calls[-1] == "vx_dev_close"
    assert calls.count("vx_start") == calls.count("vx_ready_wait") == calls.count("vx_upload_bytes") == 3
    assert calls.count("vx_upload_kernel_bytes") == 1


CALLS = [
    "vx_dev_open", "vx_dev_caps", "vx_mem_alloc", "vx_mem_address", "vx_copy_to_dev", "vx_upload_kernel_bytes",
    "vx_upload_bytes", "vx_start", "vx_ready_wait", "vx_mpm_query", "vx_copy_from_dev", "vx_dev_close",
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_every_failing_call_is_named(install, native, monkeypatch, call):
    monkeypatch.setenv("FAKE_VORTEX_FAIL", call)
    with pytest.raises(VortexError, match=f"attention_f32 on simx: .*{call} failed with code 7"):
        VortexDevice(install)(native(attention_launch()))


def test_simulator_that_aborts(install, native, monkeypatch):
    monkeypatch.setenv("FAKE_VORTEX_ABORT", "1")
    with pytest.raises(VortexError, match="(?s)simx died of signal 6.*splits a warp.*divergent branch!"):
        VortexDevice(install)(native(attention_launch()))


def test_program_that_ends_before_its_counters_are_written(install, native, monkeypatch):
    monkeypatch.setenv("FAKE_VORTEX_UNWRITTEN", "1")
    with pytest.raises(VortexError, match="ended before it wrote its counters.*GCC"):
        VortexDevice(install)(native(attention_launch()))


def test_device_of_another_shape(install, native, monkeypatch):
    monkeypatch.setenv("FAKE_VORTEX_THREADS", "4")
    with pytest.raises(VortexError, match="2 warps of 4 threads a core; the kernels need 16 threads a core"):
        VortexDevice(install)(native(attention_launch()))
    tensor = launch.float_launch("flash_f16_tensor", *np.zeros((3, 16, 8)), 1.0)
    monkeypatch.setenv("FAKE_VORTEX_THREADS", "16")
    with pytest.raises(VortexError, match="2 warps of 16 threads a core; tensor-unit kernels need warps of exactly 8"):
        VortexDevice(install)(native(tensor))
    monkeypatch.setenv("FAKE_VORTEX_WARPS", "3")
    with pytest.raises(VortexError, match="3 warps of 16 threads a core.*at most 2 warps"):
        VortexDevice(install)(native(attention_launch()))
    monkeypatch.setenv("FAKE_VORTEX_WARPS", "2")
    VortexDevice(install)(native(attention_launch()))  # wider warps are nothing to a SIMT kernel


def test_a_job_runs_in_a_folder_of_its_own(install, native, fake_install, tmp_path, monkeypatch):
    """simx writes trace/ and ramulator.stats.log into its working folder; relative variables are resolved first."""
    monkeypatch.chdir(tmp_path)
    env = fake_install.env | {"VORTEX_HOME": "home", "VORTEX_BUILD": "build"}
    monkeypatch.setenv("FAKE_VORTEX_WRITES", "ramulator.stats.log")
    VortexDevice(find_install(env))(native(attention_launch()))
    assert not (tmp_path / "ramulator.stats.log").exists()


def test_flags_of_older_and_newer_trees(install, fake_install):
    assert install.defines == ("-DXLEN_32",)
    (fake_install.home / "sw").mkdir()
    assert set(find_install(fake_install.env).defines) >= {"-DVX_CFG_XLEN_32", "-D__VORTEX__"}


def test_tensor_unit_programs_say_what_headers_they_need(install):
    install.compiler.write_text("#!/bin/sh\ncase \"$*\" in *-fsyntax-only*) echo 'no array' >&2; exit 1;; esac\n")
    with pytest.raises(VortexError, match="(?s)libc.*picolibc.*no array"):
        compile_kernel(install, PROGRAMS["intflash_tensor"], {"HEAD_DIM": 8})


def test_library_that_does_not_load_or_lacks_a_call(install, native, fake_install, host_compiler, tmp_path):
    library = install.runtime / "libvortex.so"
    run = native(attention_launch())
    source = str(Path(__file__).with_name("fake_vortex.c"))
    old = [host_compiler, "-x", "c", "-w", "-shared", "-fPIC", "-DWITHOUT_COUNTERS", source, "-o", str(library)]
    subprocess.run(old, check=True)
    with pytest.raises(VortexError, match="has no vx_mpm_query"):
        VortexDevice(install)(run)
    library.write_bytes(b"no library")
    with pytest.raises(VortexError, match="cannot load"):
        VortexDevice(install)(run)


def test_counter_addresses_come_from_the_tree(install, fake_install, tmp_path):
    from intflash.backends.vortex.device import _read_headers

    assert _read_headers(install).counters["memory_latency"] == (2, 0xB1A)
    (fake_install.build / "hw/VX_types.h").write_text(
        "#define VX_CSR_MPM_MEM_LT 0xB33\n#define VX_DCR_MPM_CLASS_MEM 7\n"
    )
    (fake_install.home / "runtime/include/vortex.h").write_text(
        "int vx_mpm_query(vx_device_h d, uint32_t mpm_class, uint32_t addr, uint32_t core_id, uint64_t* value);"
    )
    headers = _read_headers(install)
    assert headers.counters["memory_latency"] == (7, 0xB33) and headers.memory_class == 7 and headers.classed


def test_counters_add_up():
    total = Counters(10, 100, 4, 40) + Counters(30, 60, 0, 0)
    assert (total.instructions, total.ipc, total.memory_latency) == (40, 0.25, 10)
    assert Counters(0, 0, 0, 0).ipc == Counters(0, 0, 0, 0).memory_latency == 0


@pytest.mark.parametrize("tensor_unit", [False, True])
@pytest.mark.parametrize("method", ["intflash", "intflash_p8"])
def test_attention_through_the_whole_driver(install, monkeypatch, method, tensor_unit):
    """intflash.attention(backend="vortex") with only the device itself made up."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 20, 16, generator=generator) for _ in range(3))
    program, option = ("intflash_tensor", "1") if tensor_unit else ("intflash_simt", "0")
    monkeypatch.setenv("FAKE_VORTEX_TENSOR_UNIT", option)
    p_bits = 16 if method == "intflash" else 8
    defines = {"HEAD_DIM": 16, "LONG": 0, "OUT_BITS": 8, "OUT_WIDE": 0, "P_BITS": p_bits, "WIDE": 0}
    flags = tuple(f"-D{name}={value}" for name, value in defines.items())
    library = vortex_shim.load(PROGRAMS[program].path, flags)
    monkeypatch.setenv("FAKE_VORTEX_KERNEL", library._name)
    ours = intflash.attention(q, k, v, method=method, backend="vortex", out_dtype=torch.int8, out_scale=0.01)
    expected = intflash.attention(q, k, v, method=method, backend="reference", out_dtype=torch.int8, out_scale=0.01)
    assert torch.equal(ours.data, expected.data)


# --- what the backend takes


def test_unsupported_problems_are_named():
    x = torch.randn(1, 1, 8, 16)

    def reason(**options):
        options = {"method": "intflash"} | options
        inputs = options.pop("inputs", (x, x, x))
        return backend.BACKEND.unsupported(prepare(*inputs, **options)[0])

    assert reason() is None
    assert "it has those of intflash, intflash_p8, fp32" in reason(method="qflash")
    assert "no causal mask" in reason(is_causal=True)
    assert "no bool mask" in reason(attn_mask=torch.ones(8, 8, dtype=torch.bool))
    assert "no integer bias" in reason(attn_mask=torch.zeros(8, 8))
    assert "head_dim 80" in reason(inputs=(torch.randn(1, 1, 8, 80),) * 3)
    assert "no q per token" in reason(recipe=Recipe(q="token"))
    assert "no log-sum-exp" in reason(method="fp32", return_lse=True)
    problem, *_ = prepare(x, x, x, method="fp32")
    assert backend.BACKEND.unsupported(problem) is None
    assert json.dumps(backend.BACKEND.unavailable() or "")  # a sentence, or none
    assert REFERENCE.unsupported(problem) is None
