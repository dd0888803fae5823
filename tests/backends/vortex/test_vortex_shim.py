"""The shim refuses what Vortex would punish: each rule has a kernel that breaks it, and one that does not."""

import ctypes

import pytest

from intflash.backends.vortex.launch import KernelArgs
from machines import vortex_shim

pytestmark = pytest.mark.usefixtures("host_compiler")

KERNEL = """
#include <stdint.h>
#include <vx_spawn.h>
#include <vx_tensor.h>
#include "kernel_args.h"
#include "intflash.h"

static void attend(kernel_args_t* arg) {{
  const uint32_t thread = threadIdx.x;
  volatile uint32_t* out = pointer<volatile uint32_t>(arg->o_addr);
  {body}
}}
int main() {{
  kernel_args_t* arg = reinterpret_cast<kernel_args_t*>(csr_read(VX_CSR_MSCRATCH));
  return vx_spawn_threads(1, arg->grid_dim, arg->block_dim, reinterpret_cast<vx_kernel_func_cb>(attend), arg);
}}
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Compiles a kernel body, runs two groups and returns (error or None, what the threads wrote)."""
    monkeypatch.setattr(vortex_shim, "_cache_folder", lambda: tmp_path)

    def run(body: str, threads: int = 16, groups: int = 2):
        source = tmp_path / "kernel.cpp"
        source.write_text(KERNEL.format(body=body))
        vortex_shim.load.cache_clear()
        library = vortex_shim.load(source)
        out = (ctypes.c_uint32 * 16)()
        args = KernelArgs(o_addr=ctypes.addressof(out))
        args.grid_dim[:], args.block_dim[:] = (groups, 1, 1), (threads, 1, 1)
        error = library.vx_shim_run(ctypes.byref(args))
        return error and error.decode(), list(out)

    return run


def test_threads_meet_and_share_local_memory(run):
    error, out = run(
        """
  uint32_t* shared = static_cast<uint32_t*>(__local_mem((16 * 4)));
  shared[thread] = thread * thread;
  SYNC();
  out[thread] = shared[15 - thread];"""
    )
    assert error is None
    assert out == [(15 - t) ** 2 for t in range(16)]


def test_barrier_that_one_thread_skips(run):
    error, _ = run("if (thread != 3) SYNC();")
    assert "diverge" in error


def test_barrier_that_a_whole_warp_skips(run):
    error, _ = run("if (thread < 8) SYNC();")
    assert "diverge" in error


def test_different_barriers(run):
    error, _ = run("if (thread < 8)\n    SYNC();\n  else\n    SYNC();")
    assert "different barriers" in error


def test_branch_that_splits_a_warp(run):
    error, _ = run("if (thread & 1) { out[thread] = 1; out[0] = out[15] + 1; }\n  SYNC();")
    assert "different branches" in error


def test_loop_of_a_length_of_its_own(run):
    error, _ = run("for (uint32_t i = 0; i < thread; ++i) out[i] = i;")
    assert "different branches" in error


def test_warps_may_take_different_branches(run):
    error, out = run("if (thread < 8) out[thread] = 1; else out[thread] = 2;\n  SYNC();")
    assert error is None
    assert out == [1] * 8 + [2] * 8


def test_select_is_no_branch(run):
    error, out = run("out[thread] = select(thread & 1, 5, 6);")
    assert error is None
    assert out == [6, 5] * 8


def test_more_local_memory_than_a_group_has(run):
    error, _ = run("out[thread] = *static_cast<uint32_t*>(__local_mem(2049));")
    assert "2049 bytes asked for" in error


def test_two_groups_of_one_warp_share_the_core(run):
    assert run("out[thread] = 0; __local_mem(2048);", threads=8)[0] is None


def test_write_past_what_was_asked_for(run):
    error, _ = run("static_cast<volatile uint32_t*>(__local_mem((64)))[thread + 1] = 0;")
    assert "byte 64 was written, 64 were asked for" in error


def test_local_mem_without_parentheses(run):
    error, _ = run("out[thread] = *static_cast<uint32_t*>(__local_mem(32 + 32));")
    assert "parentheses" in error


def test_grid_that_the_cores_cannot_share(run):
    assert "leaves groups out: 2 of 3 cores" in run("out[thread] = 0;", groups=5)[0]
    assert run("out[thread] = 0;", groups=4)[0] is None


def test_group_that_does_not_fit_a_core(run):
    assert "17 threads" in run("", threads=17)[0]


def test_tensor_unit_call_that_part_of_a_warp_skips(run):
    error, _ = run(
        """
  using ctx = vortex::tensor::wmma_context<8, vortex::tensor::int8, vortex::tensor::int32>;
  static int8_t tile[256];
  ctx::fragment_a a;
  if (thread & 1) ctx::load_matrix_sync(a, tile, 32);"""
    )
    assert "diverge" in error


def test_reciprocal_is_exact(run):
    error, out = run(
        """
  uint32_t wrong = 0, x = 0x80000000u + thread;
  for (uint32_t i = 0; i < 200000; ++i) {
    wrong += reciprocal55(x) != static_cast<uint32_t>((1ull << 55) / x);
    x = (x * 1664525u + 1013904223u) | 0x80000000u;
  }
  const uint32_t edges[] = {1u << 31, 0x80000001u, 0x8000ffffu, 0x80010000u, 0xfffeffffu, 0xffff0000u, ~0u};
  for (uint32_t i = 0; i < 7; ++i) wrong += reciprocal55(edges[i]) != static_cast<uint32_t>((1ull << 55) / edges[i]);
  out[thread] = wrong;"""
    )
    assert error is None
    assert out == [0] * 16
