"""Float inputs of any head_dim and alignment on the short-rows kernel, which quantizes them itself.

ptxas converts a float to an integer where PTX stores the low byte of its register (`sass.narrow_float_stores`). The
kernel stores single bytes where it loads single elements: at a head_dim that is no multiple of 16, and for tensors that
are not aligned to 16 bytes.
"""

from __future__ import annotations

import subprocess

import pytest
import torch

triton = pytest.importorskip("triton")

import integer_cases as ic  # noqa: E402

from benchmarks import sass  # noqa: E402
from intflash.backends.gpu.constants import Constants  # noqa: E402
from intflash.backends.gpu.scales import FloatInputs, Qkv  # noqa: E402
from intflash.backends.gpu.tensors import Statistics, view  # noqa: E402
from intflash.backends.triton import quantize, short_rows  # noqa: E402
from intflash.backends.triton.launch import TritonLaunch  # noqa: E402
from intflash.problem import Problem  # noqa: E402
from intflash.quant import Recipe  # noqa: E402

METHODS = {"intflash": 16, "intflash_p8": 8}
ONE = torch.ones(1, 1, 1, 1)


def shifted(n: int, d: int, elements: int, dtype: torch.dtype = torch.float16, device: str = "cpu") -> torch.Tensor:
    """Returns random floats ``[2, 3, n, d]`` that begin `elements` elements after a 16-byte boundary."""
    whole = torch.randn(6 * n * d + elements).to(device, dtype)
    return whole[elements:].view(2, 3, n, d)


def floats(method: str, d: int, nk: int, elements: int = 0, **more) -> Problem:
    q, k, v = (shifted(n, d, elements) for n in (50, nk, nk))
    return Problem(method, q, k, v, d**-0.5, **(dict(recipe=Recipe(), out_dtype=torch.float16) | more))


def launches(method: str, d: int, nk: int, elements: int):
    """Yields the launches of a call on floats: the attention kernel that quantizes, and the kernel that writes
    codes.
    """
    problem = floats(method, d, nk, elements)
    scales, out = Qkv(view(ONE), view(ONE), view(ONE)), torch.empty_like(problem.q)
    constants, statistics = Constants(None, None, scales.v), Statistics(None, None)
    yield short_rows.short_rows_launch(problem, METHODS[method], constants, out, statistics, scales)
    inputs = FloatInputs(Qkv(problem.q, problem.k, problem.v), Qkv(ONE, ONE, ONE))
    yield quantize.quantize_launch(inputs)[0]


def check(launch: TritonLaunch, arch: int) -> None:
    kernel = sass.compiled(launch, arch)
    assert sass.narrow_float_stores(kernel.asm["ptx"]) == []
    conversions = [i.text for i in sass.disassemble(kernel, arch).instructions if i.opcode in ("F2I", "F2IP")]
    assert conversions == []  # codes come from a float's bits


@pytest.mark.parametrize(
    "method, d, nk, elements", [("intflash", 72, 9, 0), ("intflash_p8", 8, 77, 0), ("intflash", 64, 77, 1)]
)
def test_codes_are_stored_as_bits(method, d, nk, elements):
    for launch in launches(method, d, nk, elements):
        check(launch, 90)


@pytest.mark.full
@pytest.mark.parametrize("arch", sass.ARCHITECTURES)
@pytest.mark.parametrize("d, elements", [(1, 0), (8, 0), (17, 0), (24, 0), (72, 0), (136, 0), (64, 0), (64, 1)])
@pytest.mark.parametrize("method", METHODS)
def test_codes_are_stored_as_bits_on_every_architecture(method, d, elements, arch):
    for nk in (9, 77, 197):
        for launch in launches(method, d, nk, elements):
            check(launch, arch)


PTX = """
.version 8.7
.target sm_90a
.address_size 64
.visible .entry low_byte(.param .u64 x, .param .u64 out) {{
  .reg .b64 %rd<3>; .reg .b32 %r<4>;
  ld.param.b64 %rd1, [x];
  ld.param.b64 %rd2, [out];
  ld.global.b32 %r1, [%rd1];
  fma.rn.f32 %r2, %r1, 0f40000000, 0f4B400000;
  min.{kind} %r3, %r2, 0x4B40007F;
  st.global.b8 [%rd2], %r3;
  ret;
}}"""


@pytest.mark.parametrize("kind, stored_as_bits", (("f32", False), ("s32", True)))
def test_float_byte_stores_are_found(kind, stored_as_bits, tmp_path):
    """The negative control: ptxas converts what an instruction of a float type wrote, and both checks find it."""
    text = PTX.format(kind=kind).replace("0x4B", "0f4B" if kind == "f32" else "0x4B")
    source, cubin = tmp_path / "x.ptx", tmp_path / "x.cubin"
    source.write_text(text)
    ptxas = triton.knobs.nvidia.ptxas.path
    subprocess.run([ptxas, "-arch=sm_90a", str(source), "-o", str(cubin)], check=True)
    machine = sass.machine(cubin.read_bytes(), "low_byte", 90, 0, 1)
    assert (sass.narrow_float_stores(text) == []) == stored_as_bits
    assert (not {"F2I", "F2IP"} & set(machine.opcodes)) == stored_as_bits


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("d", (1, 2, 7, 8, 16, 17, 24, 31, 40, 56, 64, 72, 88, 104, 120, 128, 136, 160, 200, 255, 256))
@pytest.mark.parametrize("method", METHODS)
def test_bits_of_any_head_dim_and_alignment(method, d):
    torch.manual_seed(0)
    wrong = {}
    for nk, elements in ((9, 0), (9, 1), (77, 3), (197, 0), (197, 1), (256, 5)):
        found = ic.complaint(floats(method, d, nk, elements), "cuda")
        wrong |= {(nk, elements): found} if found else {}
    assert wrong == {}


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("method", (*METHODS, "intflash_online"))
def test_bits_of_other_dtypes_and_lengths(method, dtype):
    torch.manual_seed(0)
    wrong = {}
    for d, nk, elements in ((24, 49, 0), (72, 130, 0), (64, 49, 1), (72, 300, 0), (64, 300, 1)):
        q, k, v = (shifted(n, d, elements, dtype) for n in (50, nk, nk))
        p = Problem(method, q, k, v, d**-0.5, recipe=Recipe(), out_dtype=torch.int8)
        found = ic.complaint(p, "cuda")
        wrong |= {(d, nk, elements): found} if found else {}
    assert wrong == {}
