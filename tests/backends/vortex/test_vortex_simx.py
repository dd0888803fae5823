"""On the user's own Vortex (VORTEX_HOME and VORTEX_BUILD set): the shim's bits, and counters that count."""

import copy
import os

import numpy as np
import pytest
import torch

import intflash
from intflash.backends.vortex import launch
from intflash.backends.vortex.device import VortexDevice
from intflash.backends.vortex.toolchain import find_install
from intflash.bench import vortex as bench
from machines import vortex_shim

pytestmark = [
    pytest.mark.skipif(not os.environ.get("VORTEX_HOME"), reason="VORTEX_HOME is not set: no Vortex here"),
    pytest.mark.usefixtures("host_compiler"),
]

SHAPES = [(16, 8), (64, 8), (20, 24), (64, 64), (300, 16)]
tensor_unit = pytest.mark.skipif(not os.environ.get("VORTEX_TCU"), reason="VORTEX_TCU is not set: built without TCU")
INTEGER = [
    ("intflash_simt", 16),
    ("intflash_simt", 8),
    pytest.param("intflash_tensor", 16, marks=tensor_unit),
    pytest.param("intflash_tensor", 8, marks=tensor_unit),
]
FLOAT = [
    ("attention_f32", 2e-6),
    ("flash_f32", 2e-6),
    ("flash_f32_split", 2e-6),
    pytest.param("flash_f16_tensor", 3e-3, marks=tensor_unit),
]


@pytest.fixture(scope="module")
def vortex() -> VortexDevice:
    return VortexDevice(find_install())


@pytest.mark.parametrize(("n", "d"), SHAPES)
@pytest.mark.parametrize(("name", "p_bits"), INTEGER)
def test_integer_kernels_have_the_bits_of_the_shim(vortex, name, p_bits, n, d):
    q, k, v = np.random.default_rng(n + d).integers(-127, 128, (3, n, d), dtype=np.int8)
    columns = np.zeros(d, launch.MULTIPLIER)
    columns["multiplier"], columns["exponent"] = 1 << 23, 1
    native = launch.integer_launch(name, q, k, v, p_bits=p_bits, exponent=(768551, 0), multipliers=columns, out_bits=8)
    simulated = copy.deepcopy(native)
    vortex_shim.run(native)
    counters = vortex(simulated)
    assert np.array_equal(native.buffers["o_addr"], simulated.buffers["o_addr"])
    assert counters.cycles > 0 and counters.instructions > n * n * d


@pytest.mark.parametrize(("n", "d"), SHAPES)
@pytest.mark.parametrize(("name", "tolerance"), FLOAT)
def test_float_kernels_meet_the_shim(vortex, name, tolerance, n, d):
    native = launch.float_launch(name, *np.random.default_rng(n + d).normal(size=(3, n, d)), d**-0.5)
    simulated = copy.deepcopy(native)
    vortex_shim.run(native)
    vortex(simulated)
    assert np.abs(native.buffers["o_addr"] - simulated.buffers["o_addr"]).max() < tolerance


@pytest.mark.parametrize("d", [8, 16, 32, 64])
@pytest.mark.parametrize("name", ["intflash_simt", pytest.param("intflash_tensor", marks=tensor_unit)])
def test_integer_kernels_need_fewer_cycles_than_standard_attention(vortex, name, d):
    """What the report's FlashAttention did not reach at N = 64, d = 8."""
    attention = bench.measure_program("attention_f32", 64, d, vortex)
    assert bench.measure_program(name, 64, d, vortex).cycles < attention.cycles


@tensor_unit
def test_the_tensor_unit_is_found(vortex):
    assert vortex.has_tensor_unit()


def test_a_run_leaves_nothing_in_the_working_folder(vortex, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bench.measure_program("intflash_simt", 16, 8, vortex)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("d", [8, 24])
@pytest.mark.parametrize("method", ["intflash", "intflash_p8"])
def test_attention_has_the_bits_of_the_reference(method, d):
    """Through the public function, with the program that the backend takes on this device."""
    torch.manual_seed(d)
    q, k, v = torch.randn(1, 2, 20, d), torch.randn(1, 1, 33, d), torch.randn(1, 1, 33, d)
    for out_dtype in (torch.int8, torch.float32):
        options = {"method": method, "out_dtype": out_dtype, "return_lse": True, "enable_gqa": True}
        (out, lse), (expected, expected_lse) = (
            intflash.attention(q, k, v, backend=backend, **options) for backend in ("vortex", "reference")
        )
        if out_dtype == torch.int8:
            assert torch.equal(out.scale, expected.scale)
            out, expected = out.data, expected.data
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
