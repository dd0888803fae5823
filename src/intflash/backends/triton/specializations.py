"""The specializations of the integer kernels that calls use, as launches on small tensors without data. Tests compile
them and check that they are integer-only.

A kernel's machine code depends on the dtypes, alignments and constexprs of its launch, not on batch sizes.
`backend.run` chooses from the grid of methods, widths, masks and granularities below.
"""

from __future__ import annotations

import functools

import torch

from intflash.backends.gpu.integer import row_statistics
from intflash.backends.triton import backend, qflash, tile_sizes
from intflash.backends.triton.constants import constants_launch
from intflash.backends.triton.launch import TritonLaunch
from intflash.backends.triton.two_groups import valueless_launch
from intflash.problem import Problem
from intflash.quant import QTensor

OURS = ("intflash", "intflash_p8", "intflash_online", "intflash_bfp")
QFLASH_METHODS = ("qflash", "iflash")


def attention_launch(
    method: str, nq: int, nk: int, d: int, *, batch: int = 2, heads: int = 2, group: int = 1, key_major: bool = False,
    kinds: tuple[str, str, str] = ("tensor",) * 3, out_dtype: torch.dtype = torch.int8, lse: bool = False,
    device: str = "cpu", **options: object,
) -> TritonLaunch:  # fmt: skip
    """Returns the attention launch that `backend.run` would make for such codes, without the launch of its
    constants.
    """
    q = codes((batch, heads, nq, d), kinds[0], device)
    k, v = (codes((batch, heads // group, nk, d), kind, device) for kind in kinds[1:])
    if key_major:
        rows = torch.zeros(batch, heads // group, d, -(-nk // 128) * 128, dtype=torch.int8, device=device)
        v = QTensor(rows[..., :nk].mT, v.scale, v.granularity)
    problem = Problem(method, q, k, v, d**-0.5, out_dtype=out_dtype, return_lse=lse, **options)
    out = torch.empty(batch, heads, nq, d, dtype=out_dtype, device=device)
    statistics = row_statistics(problem)
    if method in QFLASH_METHODS:
        return qflash.qflash_launch(problem, qflash.constants(problem)[0], out, statistics)
    _, constants, _ = constants_launch(problem)
    if method == "intflash_bfp":
        constants = constants._replace(valueless=valueless_launch(problem)[1])
    return backend.attention_launch(problem, constants, out, statistics)


def codes(shape: tuple[int, ...], kind: str, device: str) -> QTensor:
    """Returns codes without data, with scales of a granularity."""
    b, h, n, d = shape
    scales = {"tensor": (1, 1, 1, 1), "head": (b, h, 1, 1), "token": (b, h, n, 1), "channel": (b, h, 1, d)}
    block = 128 if kind == "block" else None
    scale = torch.ones(scales.get(kind, (b, h, -(-n // 128), 1)), device=device)
    return QTensor(torch.zeros(shape, dtype=torch.int8, device=device), scale, kind, block)


def _variants() -> dict[str, dict]:
    bias = torch.zeros(2, 2, 49, 49, dtype=torch.int32)
    keep = torch.ones(2, 1, 49, 49, dtype=torch.bool)
    ends = torch.tensor([0, 1024, 2048], dtype=torch.int32)
    row = {
        f"n{n} d{d}{name}": dict(nq=n, nk=n, d=d, **more)
        for n, d in ((49, 32), (64, 64), (197, 64), (197, 80), (256, 128))
        for name, more in (("", {}), (" key-major", dict(key_major=True)), (" int16", dict(out_dtype=torch.int16)))
    }
    row |= {
        "n49 bias": dict(nq=49, nk=49, d=32, bias=bias),
        "n49 keep": dict(nq=49, nk=49, d=32, keep=keep),
        "n49 bias keep": dict(nq=49, nk=49, d=32, bias=bias, keep=keep),
        "n49 keep causal": dict(nq=49, nk=49, d=32, keep=keep, causal=0),
        "n49 bias keep of fewer batches": dict(nq=49, nk=49, d=32, batch=6, bias=bias, keep=keep),
        "n197 causal lse": dict(nq=197, nk=197, d=64, causal=0, lse=True),
        "n197 token head channel": dict(nq=197, nk=197, d=64, kinds=("token", "head", "channel")),
        "n197 gqa": dict(nq=197, nk=197, d=64, heads=4, group=2),
    }
    stream = {
        f"n{n} d{d}{name}": dict(nq=n, nk=n, d=d, **more)
        for n, d in ((4096, 64), (4096, 80), (4096, 128), (1000, 64))
        for name, more in ((" natural", {}), ("", dict(key_major=True)), (" int16", dict(out_dtype=torch.int16)))
    }
    stream |= {
        "n4096 d256": dict(nq=4096, nk=4096, d=256, batch=1, heads=1),
        "n4096 causal lse": dict(nq=4096, nk=4096, d=64, causal=0, lse=True),
        "n1000 bias keep": dict(nq=49, nk=1000, d=64, bias=torch.zeros(1, 1, 1, 1000, dtype=torch.int32),
                                keep=torch.ones(1, 1, 1, 1000, dtype=torch.bool)),
        "n1000 keep causal": dict(nq=49, nk=1000, d=64, keep=torch.ones(2, 1, 49, 1000, dtype=torch.bool), causal=951),
        "n1000 bias keep of fewer batches": dict(nq=49, nk=1000, d=64, batch=6,
                                                 bias=torch.zeros(2, 1, 1, 1000, dtype=torch.int32),
                                                 keep=torch.ones(3, 1, 1, 1000, dtype=torch.bool)),
        "n4096 token head channel": dict(nq=4096, nk=4096, d=64, kinds=("token", "head", "channel")),
        "n4096 token block": dict(nq=4096, nk=4096, d=64, kinds=("token", "block", "tensor")),
        "n1000 window": dict(nq=1000, nk=1000, d=64, causal=0, window_start=-255),
        "packed causal": dict(nq=2048, nk=2048, d=64, batch=1, causal=0, causal_align="bottom_right",
                              cu_seqlens_q=ends, cu_seqlens_k=ends),
    }  # fmt: skip
    found = {}
    for method in OURS:
        for schedule, options in (("row", row), ("stream", stream)):
            if schedule == "row" and method in ("intflash_online", "intflash_bfp"):
                continue  # they have no short-rows kernel
            found |= {f"{method} {schedule} {name}": dict(method=method, **more) for name, more in options.items()}
    for d in (64, 128):  # sums of 64 bits
        found[f"intflash_bfp stream n70000 d{d}"] = dict(method="intflash_bfp", nq=64, nk=70_000, d=d)
    for method in QFLASH_METHODS:
        found[f"{method} n197 d64"] = dict(method=method, nq=197, nk=197, d=64)
        found[f"{method} n4096 d128"] = dict(method=method, nq=4096, nk=4096, d=128)
        found[f"{method} n1000 causal"] = dict(method=method, nq=1000, nk=1000, d=64, causal=0)
        keep = torch.ones(2, 1, 49, 1000, dtype=torch.bool)
        found[f"{method} n1000 keep causal"] = dict(method=method, nq=49, nk=1000, d=64, batch=6, keep=keep, causal=951)
    return found


QUICK = (
    "intflash row n197 d64", "intflash row n49 bias", "intflash stream n4096 d64", "intflash stream n4096 causal lse",
    "intflash_p8 row n197 d64", "intflash_p8 row n49 d32 key-major", "intflash_p8 stream n4096 d128",
    "intflash_p8 stream n4096 token block", "intflash_online stream n4096 d64",
    "intflash_online stream n1000 d64 natural", "intflash_online stream packed causal",
    "qflash n197 d64", "iflash n197 d64", "intflash_p8 row n49 keep causal",
    "intflash row n49 bias keep of fewer batches",
    "intflash_online stream n1000 keep causal", "intflash_p8 stream n1000 bias keep of fewer batches",
    "qflash n1000 keep causal", "intflash_bfp stream n4096 d64", "intflash_bfp stream n1000 bias keep",
    "intflash_bfp stream n4096 token head channel", "intflash_bfp stream n70000 d64",
)  # fmt: skip


@functools.cache
def _found() -> dict[str, dict]:
    return _variants()


def names(quick: bool = False) -> tuple[str, ...]:
    """Names of the specializations; `quick` for the dozen that differ most."""
    return QUICK if quick else tuple(_found())


def launch(name: str, arch: int = 90) -> TritonLaunch:
    """Returns the launch of a name, with the tiles of an architecture."""
    with tile_sizes.compiling_for(arch):
        return attention_launch(**_found()[name])
