"""What ranks do when one of them is wrong or gone; each function runs on every rank and gives what it saw."""

import os
import signal
import time

import torch
import torch.distributed as dist

import intflash
from intflash.distributed import DistributedError, attention, groups


def tensors(tokens: int = 8, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 4, tokens, 16).to(dtype) for _ in range(3)]


def refused(call, *args, **kwargs) -> str:
    """The error of a call that must fail."""
    try:
        call(*args, **kwargs)
    except (intflash.InputError, DistributedError, intflash.BackendError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def disagreements(rank: int) -> dict[str, str]:
    """Calls that are wrong on the last rank only; after each, one that is right."""
    odd = rank == dist.get_world_size() - 1
    q, k, v = tensors()
    nan = q.clone()
    nan[0, 0, 0, 0] = float("nan")
    short, half = tensors(6 if odd else 8), tensors(dtype=torch.float16 if odd else torch.float32)
    mask = torch.ones(1, 1, 1, 16 if odd else 24, dtype=torch.bool)
    codes = [intflash.QTensor(x.to(torch.int8), 0.1 if odd else 0.2) for x in (q, k, v)]
    calls = {
        "shape": (short, {}),
        "dtype": (half, {}),
        "method": ((q, k, v), {"method": "intflash_p8" if odd else "intflash"}),
        "scale": ((q, k, v), {"scale": 0.5 if odd else 0.25}),
        "causal": ((q, k, v), {"is_causal": odd}),
        "layout": ((q, k, v), {"layout": "zigzag" if odd else "contiguous"}),
        "scheme": ((q, k, v), {"scheme": "gather" if odd else None}),
        "recipe": ((q, k, v), {"recipe": intflash.Recipe(k_scale=0.1 if odd else 0.2)}),
        "codes": (codes, {"out_scale": 0.01}),
        "nan": ((nan if odd else q, k, v), {}),
        "option": ((q, k, v), {"colour": 1} if odd else {}),
        "kind": ((None if odd else q, k, v), {}),
        "mask": ((q, k, v), {"attn_mask": mask}),
        "bias": ((q, k, v), {"bias": torch.full((1, 1, 1, 24), float("nan") if odd else 0.0)}),
    }
    seen = {}
    for name, (args, kwargs) in calls.items():
        seen[name] = refused(attention, *args, **kwargs)
        attention(q, k, v)  # the ranks are still in step
    return seen


def killed(rank: int) -> tuple[str, str, float]:
    """The last rank is killed between two calls."""
    q, k, v = tensors()
    attention(q, k, v)
    if rank == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    groups._GRACE_S = 1.0
    start = time.monotonic()
    first = refused(attention, q, k, v)
    return first, refused(attention, q, k, v), time.monotonic() - start


def stuck(rank: int) -> tuple[str, float]:
    """The last rank does not call for longer than the group's timeout."""
    q, k, v = tensors()
    if rank == dist.get_world_size() - 1:
        time.sleep(6)
        return "", 0.0
    groups._GRACE_S = 1.0
    start = time.monotonic()
    return refused(attention, q, k, v), time.monotonic() - start


def not_served(rank: int) -> dict[str, str]:
    """Calls that every rank makes and that are refused."""
    q, k, v = tensors()
    cu = torch.tensor([0, 8], dtype=torch.int32)
    recipe = intflash.Recipe(k="block", block_size=5)
    rows = torch.ones(8, 8 * dist.get_world_size(), dtype=torch.bool)
    return {
        "packed": refused(attention, q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu),
        "dynamic": refused(attention, q, k, v, out_dtype=torch.int8, out_scale="dynamic"),
        "method": refused(attention, q, k, v, method="fp16"),
        "codes of keys": refused(attention, q, intflash.quantize(k), intflash.quantize(v)),
        "axes": refused(attention, q[0], k[0], v[0]),
        "layout": refused(attention, q, k, v, layout="striped"),
        "queries": refused(attention, q, k, v, queries="some"),
        "scheme": refused(attention, q, k, v, scheme="ring"),
        "chunks": refused(attention, q, k, v, chunks=0),
        "length": refused(attention, q, k, v, key_length=40),
        "heads": refused(attention, q[:, :1], k[:, :1], v[:, :1], scheme="ulysses"),
        "rows": refused(attention, q, k, v, rows, scheme="ulysses"),
        "merge": refused(attention, q, k, v, scheme="merge"),
        "merge online": refused(attention, q, k, v, queries="replicated", scheme="merge", method="intflash_online"),
        "merge cpu": refused(attention, q, k, v, queries="replicated", scheme="merge", backend="cpu"),
        "local": refused(attention, q, k, v, keys="replicated", scheme="gather"),
        "causal": refused(attention, q, k[:, :, :4], v[:, :, :4], is_causal=True),
        "blocks": refused(attention, q, k, v, recipe=recipe),
        "replicated length": refused(attention, q, k, v, keys="replicated", key_length=9),
        "group": refused(attention, q, k, v, group="world"),
        "backend": refused(attention, q, k, v, backend="cuda"),
    }
