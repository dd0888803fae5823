"""backend="vortex": attention on the user's Vortex GPU or simulator. Used only when it is asked for."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from intflash.backends.base import Backend
from intflash.backends.features import (
    CODES,
    FLOAT_INPUTS,
    FLOAT_OUTPUT,
    FLOAT_QUERY,
    INTEGER_OUTPUT,
    QUANTIZATION,
    per,
)
from intflash.backends.vortex import launch as launches
from intflash.backends.vortex.device import VortexDevice
from intflash.backends.vortex.errors import VortexError
from intflash.backends.vortex.launch import Executor
from intflash.backends.vortex.toolchain import find_install
from intflash.numerics.exp import P8_MAX, P16_MAX, exponent_constants, log_sum_exp, output_multiplier
from intflash.problem import Problem, Result

P_BITS = {"intflash": 16, "intflash_p8": 8}
FLOAT_METHODS = ("fp32",)


def _unavailable() -> str | None:
    try:
        find_install()
    except VortexError as error:
        return str(error)
    return None


_INTEGER = frozenset.union(
    FLOAT_INPUTS, CODES, FLOAT_QUERY, QUANTIZATION, INTEGER_OUTPUT, FLOAT_OUTPUT,
    per("tensor head", "tensor head", "tensor head channel"), {"out_scale per channel", "grouped heads", "log-sum-exp"},
)  # fmt: skip
_FLOAT = frozenset.union(FLOAT_INPUTS, FLOAT_OUTPUT, per("none", "none", "none"), {"grouped heads"})
SERVES = dict.fromkeys(P_BITS, _INTEGER) | dict.fromkeys(FLOAT_METHODS, _FLOAT)


def _limits(problem: Problem) -> str | None:
    if problem.device.type != "cpu":
        return f"tensors are copied to Vortex from host memory, got device {problem.device}"
    d = max(problem.q.shape[3], problem.v.shape[3])
    if d > launches.MAX_HEAD_DIM:
        return f"head_dim {d} is past the kernels' {launches.MAX_HEAD_DIM}"
    if min(problem.q.shape[2], problem.k.shape[2]) == 0:
        return "no queries or no keys"
    return None


def _run(problem: Problem) -> Result:
    device = VortexDevice(find_install())
    return run(problem, device, tensor_unit=problem.method in P_BITS and device.has_tensor_unit())


def run(problem: Problem, execute: Executor, *, tensor_unit: bool) -> Result:
    """Computes the problem head by head.

    Args:
        problem: one that the backend supports.
        execute: runs a launch (on Vortex, or in a test's machine).
        tensor_unit: the device has one. The bits do not depend on it.
    """
    if problem.method in FLOAT_METHODS:
        return _run_float(problem, execute)
    d = max(problem.q.shape[3], problem.v.shape[3])
    return _run_integer(problem.quantized(), execute, launches.integer_program(d, P_BITS[problem.method], tensor_unit))


def _run_integer(problem: Problem, execute: Executor, program: str) -> Result:
    q, k, v = problem.q, problem.k, problem.v
    batch, heads, n_q, _ = q.shape
    d_v = v.shape[3]
    integer_out = problem.out_dtype in (torch.int8, torch.int16)
    k_scale = _per_query_head(k.scale, heads, problem.group)
    v_scale = _per_query_head(v.scale, heads, problem.group)
    C, shift = (x.expand(batch, heads, 1, 1) for x in exponent_constants(q.scale, k_scale, problem.sm_scale))

    def attend(b: int, h: int, out_bits: int, columns: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        key_head = h // problem.group
        launch = launches.integer_launch(
            program,
            q.data[b, h].numpy(),
            k.data[b, key_head].numpy(),
            v.data[b, key_head].numpy(),
            p_bits=P_BITS[problem.method],
            exponent=(int(C[b, h]), int(shift[b, h])),
            multipliers=columns,
            out_bits=out_bits,
        )
        execute(launch)
        return launches.integer_output(launch, n_q, d_v)

    out = torch.empty(batch, heads, n_q, d_v, dtype=problem.out_dtype)
    out_scale = lse = None
    if integer_out:
        info = torch.iinfo(problem.out_dtype)
        out_scale = problem.out_scale if problem.out_scale is not None else v_scale * 127 / info.max
        multiplier, exponent = (x.expand(batch, heads, 1, d_v) for x in output_multiplier(v_scale, out_scale))
        for b, h in np.ndindex(batch, heads):
            columns = np.zeros(d_v, launches.MULTIPLIER)
            columns["multiplier"], columns["exponent"] = multiplier[b, h, 0].numpy(), exponent[b, h, 0].numpy()
            out[b, h] = torch.from_numpy(attend(b, h, info.bits, columns)[0])
    if problem.return_lse or not integer_out:  # float results need the raw sums: the device computes no float
        acc = torch.empty(batch, heads, n_q, d_v, dtype=torch.int64)
        l, s_max = (torch.empty(batch, heads, n_q, 1, dtype=torch.int64) for _ in range(2))
        for b, h in np.ndindex(batch, heads):
            sums, stats = attend(b, h, 64, None)
            acc[b, h] = torch.from_numpy(sums)
            l[b, h, :, 0] = torch.from_numpy(stats["l"].astype(np.int64))
            s_max[b, h, :, 0] = torch.from_numpy(stats["s_max"].astype(np.int64))
        if not integer_out:
            out = (acc.float() * (v_scale / l.float())).to(problem.out_dtype)
        if problem.return_lse:
            p_max = P16_MAX if problem.method == "intflash" else P8_MAX
            lse = log_sum_exp((s_max << shift) * C, l, p_max)[..., 0]
    return Result(out, out_scale, lse)


def _run_float(problem: Problem, execute: Executor) -> Result:
    q, k, v = problem.q, problem.k, problem.v
    batch, heads, n_q, _ = q.shape
    out = torch.empty(batch, heads, n_q, v.shape[3])
    name = launches.float_program(max(q.shape[3], v.shape[3]))
    for b in range(batch):
        for h in range(heads):
            key_head = h // problem.group
            head = (q[b, h], k[b, key_head], v[b, key_head])
            launch = launches.float_launch(name, *(x.float().numpy() for x in head), problem.sm_scale)
            execute(launch)
            out[b, h] = torch.from_numpy(launches.float_output(launch, n_q, v.shape[3]).copy())
    return Result(out.to(problem.out_dtype))


def _per_query_head(scale: Tensor, heads: int, group: int) -> Tensor:
    return scale if scale.shape[1] in (1, heads) else scale.repeat_interleave(group, dim=1)


BACKEND = Backend(name="vortex", unavailable=_unavailable, serves=SERVES, limits=_limits, run=_run)
