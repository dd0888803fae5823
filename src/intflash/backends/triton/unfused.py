"""Launches `ivit`, `ibert` and `fqvit`, one kernel per operator."""

from __future__ import annotations

import struct

import torch
import triton
from torch import Tensor

from intflash.backends.gpu.tensors import data_view, view
from intflash.backends.triton import unfused_kernels as kernels
from intflash.backends.triton.device_functions import LaunchConstants, make_masks
from intflash.backends.triton.launch import TritonLaunch
from intflash.backends.triton.tile_loop import block_dim
from intflash.backends.triton.unfused_kernels import UnfusedScales
from intflash.errors import InputError
from intflash.numerics.exp import ABSENT, makes_absent, output_multiplier
from intflash.problem import Problem, Result
from intflash.quant import QTensor
from intflash.quant.quantizers import divided

MIN_UNIT = 2.0**-30  # the least unit of a score: with a smaller one the exponentials exceed int64
MAX_KEYS = 8192  # a row of scores must fit the registers of one program
METHODS = ("ivit", "ibert", "fqvit")
_P_DTYPE = {"ivit": torch.int8, "ibert": torch.uint8, "fqvit": torch.int16}
_FRACTION = {"ivit": 7, "ibert": 8, "fqvit": 15}  # fraction bits of P
_BIAS_LIMIT = 2.0**30  # bias values are clamped to this, so that bias + score fits int32
_ROW, _KEYS = 64, 64
_ELEMENTS = 2048  # rows of a softmax program


def unsupported(problem: Problem) -> str | None:
    if problem.cu_seqlens_q is not None:
        return f"{problem.method} on Triton does not support packed sequences"
    if problem.k.shape[2] > MAX_KEYS:
        return f"{problem.method} on Triton needs at most {MAX_KEYS} keys, got {problem.k.shape[2]}"
    return None


def run(problem: Problem) -> Result:
    problem = problem.quantized()
    batch, heads, nq, _ = problem.q.shape
    out = torch.empty(batch, heads, nq, problem.v.shape[3], dtype=problem.out_dtype, device=problem.device)
    statistics = [
        torch.empty(batch, heads, nq, dtype=torch.int64, device=out.device) if problem.return_lse else None
        for _ in range(3)
    ]
    launches, amax, out_scale = unfused_launches(problem, out, statistics)
    for launch in launches:
        launch.run()
    unit = _unit(problem)[..., 0] * (1.0 if amax is None else divided(amax.double(), 127))
    if problem.check_finite and bool((unit < MIN_UNIT).any()):
        raise InputError(f"{problem.method} needs a score unit of at least 2^-30, got {unit.min():.3g}")
    lse = None
    if problem.return_lse:
        top, normalizer, first = (x.double() for x in statistics)
        lse = (top * unit.clamp(min=MIN_UNIT) + torch.log(normalizer) - torch.log(first)).float()
    return Result(out, out_scale, lse)


def unfused_launches(
    problem: Problem, out: Tensor, statistics: list[Tensor | None]
) -> tuple[list[TritonLaunch], Tensor | None, Tensor | None]:
    """Returns the operators' launches of a quantized problem, the scores' maximum (on the device) and the output's
    scale.
    """
    method, device = problem.method, problem.device
    (batch, heads, nq, d), (nk, dv) = problem.q.shape, problem.v.shape[2:]
    stride = triton.cdiv(nk, 16) * 16
    scores = torch.empty(batch, heads, nq, stride, dtype=torch.int32, device=device)
    weights = torch.empty(batch, heads, nq, stride, dtype=_P_DTYPE[method], device=device)
    by_codes = method != "ibert"
    amax = torch.ones(1, dtype=torch.int32, device=device) if by_codes else None
    key_tiles = triton.cdiv(nk, _KEYS)
    periods = LaunchConstants(problem.group, 1, 1)
    masks = make_masks(_bias_units(problem), problem.keep, problem.causal, batch)
    output, out_scale = _output_constants(problem)
    scales = UnfusedScales(
        view(problem.q.scale), view(problem.k.scale), view(problem.v.scale), None,
        struct.unpack("<q", struct.pack("<d", problem.sm_scale))[0],
    )  # fmt: skip
    launches = [
        TritonLaunch(
            kernels._scores_kernel,
            (batch, heads, triton.cdiv(nq, _ROW) * key_tiles),
            dict(
                q=data_view(problem.q.data), k=data_view(problem.k.data), s=data_view(scores), amax=amax, masks=masks,
                bias_units=None, nq=nq, nk=nk, D=d, BD=block_dim(d, 32), BM=_ROW, BN=_KEYS, KEY_TILES=key_tiles,
                CAUSAL=problem.causal is not None, CONSTS=periods,
            ),
        )
    ]  # fmt: skip
    source = scores
    if by_codes:
        source = torch.empty(scores.shape, dtype=torch.int8, device=device)
        launches.append(
            TritonLaunch(
                kernels._requantize_kernel,
                (triton.cdiv(scores.numel(), 1024),),
                dict(s=scores, codes=source, amax=amax, count=scores.numel(), BLOCK=1024),
            )
        )
    columns = max(16, triton.next_power_of_2(nk))
    rows = max(1, _ELEMENTS // columns)
    top, normalizer, first = statistics
    launches.append(
        TritonLaunch(
            kernels._softmax_kernel,
            (batch, heads, triton.cdiv(nq, rows)),
            dict(
                s=source, p=weights, amax=amax, scales=scales, top=top, normalizer=normalizer, first_value=first,
                nq=nq, nk=nk, stride=stride, METHOD=method, GROUP=problem.group, ROWS=rows, BK=columns,
            ),
            warps=4 if columns <= 2048 else 8,
        )
    )  # fmt: skip
    launches.append(
        TritonLaunch(
            kernels._values_kernel,
            (batch, heads, triton.cdiv(nq, _ROW)),
            dict(
                p=data_view(weights), v=data_view(problem.v.data), out=data_view(out), scales=scales, output=output,
                nq=nq, nk=nk, DIGITS=1 if method == "ivit" else 2, FRACTION=_FRACTION[method], CHANNELS=1,
                GROUP=problem.group, DV=dv, BDV=block_dim(dv, 16), BM=_ROW, BN=_KEYS,
            ),
        )
    )  # fmt: skip
    return launches, amax, out_scale


def _unit(problem: Problem) -> Tensor:
    """Returns the value of a score of 1, float64 ``[B|1, Hq|1, 1, 1]``."""
    return (problem.q.scale.double() * _spread(problem.k, problem.group).double()) * problem.sm_scale


def _spread(x: QTensor, group: int) -> Tensor:
    return x.scale if x.scale.shape[1] == 1 else x.scale.repeat_interleave(group, dim=1)


def _bias_units(problem: Problem) -> Tensor | None:
    """Returns the bias in score units, int32 in its broadcast shape, with ABSENT where it removes a key."""
    bias = problem.bias_float
    if bias is None:
        return None
    absent = makes_absent(bias)
    unit = _unit(problem)
    if unit.shape[0] > 1:
        bias = bias.repeat(problem.q.shape[0] // bias.shape[0], 1, 1, 1)
        absent = absent.repeat(problem.q.shape[0] // absent.shape[0], 1, 1, 1)
    units = torch.round(bias.double() / unit).clamp(-_BIAS_LIMIT, _BIAS_LIMIT)
    return torch.where(absent, float(ABSENT), units).to(torch.int32)


def _output_constants(problem: Problem):
    """Returns the packed fixed-point multiplier of integer output (shift << 32 | multiplier) and the output's scale."""
    if problem.out_dtype.is_floating_point:
        return None, None
    s_v, out_scale = _spread(problem.v, problem.group), problem.out_scale
    if out_scale is None:
        out_scale = divided(s_v * ((1 << (problem.v.bits - 1)) - 1), torch.iinfo(problem.out_dtype).max)
    multiplier, exponent = output_multiplier(s_v, out_scale)
    return view(((24 + _FRACTION[problem.method] - exponent) << 32) | multiplier), out_scale
