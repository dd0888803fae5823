"""Linear layers and LayerNorm on the vector layers that this machine need not have: emulated, or under QEMU."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLAGS = "-std=c++17 -O2 -ffp-contract=off -Wall -Wextra -Werror -Wno-maybe-uninitialized -Wno-uninitialized".split()
AVX512 = "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mavx512cd -mavx512vbmi -mfma -mf16c".split()
ARM = ["-static", "-march=armv8.2-a+dotprod"]
LAYERS = {
    "Amx": ("g++", [*AVX512, "-mamx-tile", "-mamx-int8"], []),
    "AvxVnni": ("g++", AVX512, []),
    "Neon": ("aarch64-linux-gnu-g++", ARM, ["qemu-aarch64-static", "-cpu", "neoverse-n1"]),
    "NeonI8mm": ("aarch64-linux-gnu-g++", [ARM[0], ARM[1] + "+i8mm"], ["qemu-aarch64-static", "-cpu", "max"]),
}


def processor_flags() -> set[str]:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^flags\s*:(.*)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return set(found.group(1).split()) if found else set()


@pytest.mark.parametrize("layer", [pytest.param(x, marks=[] if x == "Amx" else pytest.mark.full) for x in LAYERS])
def test_products_and_layer_norm_are_right(layer, tmp_path):
    compiler, flags, runner = LAYERS[layer]
    if not shutil.which(compiler) or (runner and not shutil.which(runner[0])):
        pytest.skip(f"no {compiler} or {' '.join(runner[:1])}")
    if not runner and not {"avx512_vnni", "avx512vbmi"} <= processor_flags():
        pytest.skip("the emulation needs AVX-512 VNNI and VBMI")
    program = tmp_path / "check"
    source = ROOT / "tests/machines/cpu/integer_check.cpp"
    subprocess.run(
        [compiler, *FLAGS, *flags, f"-DLAYER={layer}", f"-I{ROOT}/csrc", f"-I{ROOT}/tests", source, "-o", program],
        check=True,
    )
    done = subprocess.run([*runner, program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout == "right\n", done.stdout + done.stderr
