"""The CUDA kernels' bits without a GPU, in the PTX emulator: some cases of each kernel, and all of them with `full`."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path += [str(Path(__file__).parents[2] / "machines" / "ptx")]

import emulate  # noqa: E402

CASES = {  # a case takes up to half a minute on one core, mostly to compile; without names, only with `full`
    ("window", "intflash"): (),
    ("window", "intflash_p8"): ("dynamic of heads 49 32",),
    ("window", "intflash_bfp"): ("sinks, torch.float16", "bias of floats"),
    ("short_rows", "intflash"): (),
    ("short_rows", "intflash_p8"): ("bias 80 32 4194304",),
    ("short_rows", "intflash_bfp"): ("no value, absent",),
    ("long_rows", "intflash"): ("sums of 520",),
    ("long_rows", "intflash_p8"): (),
    ("whole_rows", "intflash"): (),
    ("whole_rows", "intflash_p8"): ("torch.float16 heads 40", "scales"),
    ("whole_rows", "intflash_bfp"): ("sinks, floats 40",),
    ("sm80", "intflash"): ("50 77 bias, keep, causal",),
    ("sm80", "intflash_p8"): ("few, keep",),
    ("sm80", "intflash_online"): (),
    ("sm80", "intflash_bfp"): ("few, sinks of 10.0 octaves, 3 zeros",),
    ("long_rows", "intflash_bfp"): ("sinks keep 16",),
    ("long_rows", "intflash_online"): ("amax 1e-06 64",),
}
pytestmark = pytest.mark.skipif(emulate.unavailable() is not None, reason=str(emulate.unavailable()))


def wrong(kernel: str, method: str, *names: str, **fixed) -> dict[str, str]:
    """Returns the failures of a kernel's cases, run in a separate process in which the emulator replaces launches.
    fixed: choices that the plan does not make.
    """
    script = Path(__file__).parent / "emulated_cases.py"
    command = [sys.executable, "-W", "ignore", str(script), kernel, method, json.dumps(fixed), *names]
    done = subprocess.run(command, capture_output=True, text=True, cwd=script.parent)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found and set(names) <= set(found)
    return {name: complaint for name, complaint in found.items() if complaint}


@pytest.mark.parametrize("kernel, method, name", [(*key, name) for key, names in CASES.items() for name in names])
def test_bits(kernel, method, name):
    assert wrong(kernel, method, name) == {}


@pytest.mark.parametrize("name", ("dynamic of heads 197 64", "no value, floats tensor None"))
def test_bits_of_heads_some_of_which_are_divided(name):
    """Eight heads: three have a CTA each, the others three CTAs, of which the last has remainder rows too."""
    assert wrong("short_rows", "intflash_bfp", name, row_split=(1, 1, 2, 3)) == {}


@pytest.mark.full
@pytest.mark.parametrize("kernel, method", CASES)
def test_bits_of_all_cases(kernel, method):
    assert wrong(kernel, method) == {}


PTX = """
.extern .shared .align 16 .b8 memory[];
.visible .entry attention(.param .align 8 .b8 attention_param_0[16]) {{
  .reg .pred %p<2>; .reg .b32 %r<8>; .reg .b64 %rd<4>;
  ld.param.u64 %rd1, [attention_param_0];
  ld.param.u64 %rd2, [attention_param_0+8];
  mov.u32 %r1, %tid.x;
  mov.u32 %r2, memory;
  shl.b32 %r3, %r1, 4;
  add.s32 %r2, %r2, %r3;
  cvt.u64.u32 %rd3, %r3;
  add.s64 %rd1, %rd1, %rd3;
  add.s64 %rd2, %rd2, %rd3;
  setp.eq.s32 %p1, %r1, 0;
  {body}
  ret;
}}"""
LOAD = "cp.async.cg.shared.global [%r2], [%rd1], 16;"
STORE = "ld.shared.u32 %r4, [%r2]; st.global.u32 [%rd2], %r4;"


class Pointers(ctypes.Structure):
    _fields_ = [("source", ctypes.c_uint64), ("out", ctypes.c_uint64)]


def ran(body: str, shared_bytes: int = 512, overlaps: bool = False, reads_early: bool = False) -> bool:
    """Whether a warp copied 16 bytes per thread through shared memory correctly."""
    source, out = torch.arange(128, dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
    pointers = Pointers(source.data_ptr(), out.data_ptr())
    text, early = PTX.format(body=body), [source] * reads_early
    emulate.run_ptx(text, (1, 1, 1), 32, shared_bytes, [pointers], [source, out], overlaps, early=early)
    return torch.equal(source[::4], out[::4])


def test_the_emulator_finds_forbidden_accesses_and_deadlocks():
    assert ran(f"{LOAD} cp.async.wait_all; {STORE}")
    assert not ran(f"{LOAD} {STORE}")  # no wait for the copies
    assert ran(f"griddepcontrol.wait; {LOAD} cp.async.wait_all; {STORE}", overlaps=True)
    early = f"{LOAD} cp.async.wait_all;"
    assert ran(f"{early} griddepcontrol.wait; {STORE}", overlaps=True, reads_early=True)
    for body, message, options in (
        (f"{LOAD} cp.async.wait_all; {STORE}", "496 of 496 of shared memory", dict(shared_bytes=496)),
        (f"{early} {STORE}", "before griddepcontrol.wait", dict(overlaps=True)),
        (f"{early} {STORE}", "before griddepcontrol.wait", dict(overlaps=True, reads_early=True)),
        (f"{LOAD} griddepcontrol.wait;", "before griddepcontrol.wait", dict(overlaps=True)),
        ("@!%p1 bar.sync 0;", "deadlock: 31 threads", {}),
        ("st.global.u32 [%rd2+-4], %r1;", "outside of every tensor", {}),
        ("ld.global.u32 %r4, [%rd1+2];", "is no multiple of 4", {}),
    ):
        with pytest.raises(emulate.EmulationError, match=message):
            ran(body, **options)
