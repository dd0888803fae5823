"""Calls of sharded attention, compared on every rank with the call of one process: bits and bytes."""

import traceback
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import intflash
from intflash import Recipe, call
from intflash.distributed import attention, counting, shard
from intflash.distributed.groups import ranks_of
from intflash.distributed.plan import Placement, plan_of
from intflash.distributed.traffic import control_bytes, data_bytes
from intflash.numerics import groups

HEADS = 8  # divisible among 1, 2, 4, 8 ranks
TOKENS = 48  # among 1, 2, 3, 4, 8 ranks, in zigzag too


@dataclass
class Case:
    """`call`: arguments of `intflash.attention`; `place`: those of the sharded one alone; `shape`: B, Hq, Hk, D, Dv."""

    call: dict[str, Any] = field(default_factory=dict)
    place: dict[str, Any] = field(default_factory=dict)
    shape: tuple[int, ...] = (1, HEADS, HEADS, 16, 16)
    queries: int = TOKENS
    keys: int = TOKENS
    dtype: torch.dtype = torch.float32
    mask: str = ""
    codes: bool = False
    mesh: bool = False  # of two axes
    worlds: tuple[int, ...] = (1, 2, 3, 4, 8)
    many_keys: int | None = None  # from which `intflash_bfp` has other fraction bits, in place of 65,536


ULYSSES = (1, 2, 4, 8)
ODD = 53  # tokens, so that shards are not even
INT8 = {"out_dtype": torch.int8, "out_scale": "bound"}
BLOCKS = Recipe("block", "block", "head", block_size=2)
CASES = {
    "plain": Case(),
    "float16": Case({"method": "intflash"}, dtype=torch.float16),
    "bfloat16, p8": Case({"method": "intflash_p8"}, dtype=torch.bfloat16),
    "online": Case({"method": "intflash_online"}),
    "bfp": Case({"method": "intflash_bfp", "return_lse": True}, mask="bias of rows", queries=160, keys=656),
    "bfp causal zigzag": Case(
        {"method": "intflash_bfp", "is_causal": True}, {"layout": "zigzag", "chunks": 2}, queries=160, keys=160
    ),
    "bfp causal zigzag, dithered": Case(
        {"method": "intflash_bfp", "is_causal": True}, {"scheme": "gather", "layout": "zigzag"}, queries=816, keys=816
    ),
    "batch and Dv": Case(shape=(2, HEADS, HEADS, 16, 24)),
    "chunks": Case(place={"scheme": "gather", "chunks": 3}, shape=(2, HEADS, HEADS, 16, 24)),
    "uneven": Case(place={"scheme": "gather"}, queries=ODD, keys=ODD),
    "one head": Case(shape=(1, 1, 1, 16, 16)),
    "one head, a scale for each": Case({"recipe": Recipe("head", "head", "head")}, shape=(1, 1, 1, 16, 16)),
    "bfp, many keys": Case(
        {"method": "intflash_bfp", "is_causal": True, "backend": "torch"}, {"scheme": "gather", "layout": "zigzag"},
        queries=1024, keys=1024, many_keys=900,
    ),
    "grouped heads": Case({"enable_gqa": True}, shape=(1, HEADS, 2, 16, 16)),
    "cross": Case(place={"scheme": "gather"}, keys=2 * TOKENS),
    "causal": Case({"method": "intflash", "is_causal": True}, {"scheme": "gather"}),
    "causal zigzag": Case(
        {"method": "intflash", "is_causal": True, "return_lse": True},
        {"scheme": "gather", "layout": "zigzag", "chunks": 2},
    ),
    "causal zigzag uneven": Case({"is_causal": True}, {"scheme": "gather", "layout": "zigzag"}, queries=ODD, keys=ODD),
    "causal zigzag p8 int8": Case(
        {"is_causal": True, "method": "intflash_p8", **INT8}, {"scheme": "gather", "layout": "zigzag"}
    ),
    "causal grouped": Case({"is_causal": True, "enable_gqa": True}, {"layout": "zigzag"}, shape=(2, HEADS, 2, 16, 16)),
    "ulysses": Case({"method": "intflash", "return_lse": True}, {"scheme": "ulysses"}, worlds=ULYSSES),
    "ulysses chunks": Case(
        {"method": "intflash_p8", "enable_gqa": True}, {"scheme": "ulysses", "chunks": 2}, shape=(2, 16, 8, 16, 24),
        worlds=ULYSSES,
    ),
    "ulysses uneven zigzag": Case(
        {"is_causal": True}, {"scheme": "ulysses", "layout": "zigzag"}, queries=ODD, keys=ODD, worlds=ULYSSES
    ),
    "ulysses online int16": Case(
        {"method": "intflash_online", "out_dtype": torch.int16, "recipe": Recipe("token", "head", "head")},
        {"scheme": "ulysses"}, worlds=ULYSSES,
    ),
    "ulysses bias of heads": Case(place={"scheme": "ulysses"}, mask="bias of heads", worlds=ULYSSES),
    "grid": Case({"method": "intflash", "return_lse": True}, {"chunks": 2}, mesh=True, worlds=(4, 8)),
    "grid zigzag": Case({"is_causal": True}, {"layout": "zigzag"}, mesh=True, worlds=(4, 8), queries=ODD, keys=ODD),
    "grid tokens": Case(
        {"recipe": Recipe("token", "head", "channel", smooth_k=True)}, mesh=True, shape=(2, HEADS, HEADS, 16, 24),
        worlds=(4, 8),
    ),
    "keep": Case({"method": "intflash"}, mask="keep"),
    "keep zigzag, causal": Case({"is_causal": True}, {"layout": "zigzag"}, mask="keep of rows"),
    "bias of rows": Case({"method": "intflash_p8"}, mask="bias of rows"),
    "granularities": Case({"recipe": Recipe("head", "head", "channel")}, shape=(2, HEADS, HEADS, 16, 16)),
    "tokens": Case({"recipe": Recipe("token", "tensor", "tensor", bits=4)}, {"scheme": "gather"}),
    "blocks": Case(
        {"method": "intflash", "recipe": BLOCKS}, {"scheme": "ulysses"}, shape=(2, HEADS, HEADS, 16, 16), worlds=ULYSSES
    ),
    "blocks, causal zigzag": Case(
        {"recipe": BLOCKS, "is_causal": True}, {"layout": "zigzag", "scheme": "gather"}, worlds=(1, 2, 3, 4)
    ),
    "static": Case({"recipe": Recipe(q_scale=0.02, k_scale=0.03, v_scale=0.01), **INT8}),
    "smooth": Case({"recipe": Recipe(smooth_k=True), "return_lse": True}, queries=ODD, keys=ODD),
    "smooth, rotated, float16": Case(
        {"recipe": Recipe(smooth_k=True, rotate=True), "method": "intflash_p8", "enable_gqa": True},
        {"layout": "zigzag"},
        shape=(2, HEADS, 1, 16, 16), dtype=torch.float16,
    ),
    "divide": Case({"recipe": Recipe(rule="divide", v_scale=0.5)}),
    "codes": Case({"method": "intflash", "return_lse": True, "out_scale": "bound"}, codes=True),
    "out_scale": Case({"out_dtype": torch.int8, "out_scale": 0.01}, {"scheme": "gather"}),
    "text": Case({}, {"keys": "replicated"}, keys=7),
    "decode": Case({}, {"queries": "replicated"}, queries=1),
    "decode merged": Case(
        {"method": "intflash", "return_lse": True, "enable_gqa": True}, {"queries": "replicated", "scheme": "merge"},
        queries=3, shape=(2, HEADS, 2, 16, 24),
    ),
    "decode merged p8": Case(
        {"method": "intflash_p8", **INT8, "is_causal": True, "causal_align": "bottom_right"},
        {"queries": "replicated", "scheme": "merge", "layout": "zigzag"}, queries=5, keys=ODD,
    ),
    "decode merged keep": Case(
        {"method": "intflash", "backend": "reference"}, {"queries": "replicated", "scheme": "merge"}, queries=2,
        mask="keep",
    ),
    "decode merged bias": Case(
        {"method": "intflash", "recipe": Recipe(smooth_k=True)}, {"queries": "replicated", "scheme": "merge"},
        queries=2, mask="bias of rows",
    ),
    "decode merged on a grid": Case(
        {"method": "intflash_p8"}, {"queries": "replicated", "scheme": "merge"}, queries=2, mesh=True, worlds=(4, 8)
    ),
    "decode gathered": Case(
        {"is_causal": True, "causal_align": "bottom_right", "method": "intflash_online"}, {"queries": "replicated"},
        queries=4,
    ),
    "no keys for some rows": Case(mask="nothing in row 0"),
}  # fmt: skip


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def _mask(case: Case, nq: int, nk: int) -> dict[str, torch.Tensor]:
    b, hq = case.shape[:2]
    keep = torch.rand(b, 1, nq, nk) > 0.3
    bias = torch.randn(1, hq, nq, nk)
    return {
        "": {}, "keep": {"attn_mask": keep[:, :, :1]}, "keep of rows": {"attn_mask": keep},
        "bias of rows": {"bias": bias}, "bias of heads": {"bias": bias[:, :, :1]},
        "nothing in row 0": {"attn_mask": keep & (torch.arange(nq)[:, None] > 0)},
    }[case.mask]  # fmt: skip


def parts(x: torch.Tensor | intflash.QTensor) -> tuple[torch.Tensor, ...]:
    return (x.data, x.scale) if isinstance(x, intflash.QTensor) else (x,)


def check(case: Case, mesh: object) -> None:
    """Compare one case on this rank; raises AssertionError."""
    torch.manual_seed(7)
    (b, hq, hk, d, dv), nq, nk = case.shape, case.queries, case.keys
    groups._MANY_KEYS = case.many_keys or 1 << 16
    shapes = (b, hq, nq, d), (b, hk, nk, d), (b, hk, nk, dv)
    whole = [torch.randn(s).to(case.dtype) for s in shapes]
    whole[1] += 2  # a mean for K smoothing
    if (
        case.many_keys
    ):  # later keys lie far above the first 128 and cancel in pairs, so that the sums' last bits are seen
        whole[0], whole[1][:, :, :128] = whole[0].abs(), 0.4
        whole[1][:, :, 128:], whole[2][:, :, 129::2] = 5.0, -whole[2][:, :, 128::2]
    whole = [x.to(device()) for x in whole]
    masks = {name: mask.to(device()) for name, mask in _mask(case, nq, nk).items()}
    where = {"group": mesh if case.mesh else None, "layout": case.place.get("layout", "contiguous")}
    sharded = case.place.get("queries") != "replicated", case.place.get("keys") != "replicated"
    if case.codes:
        whole = [intflash.quantize(x) for x in whole]
    expected = intflash.attention(*whole, **masks, **case.call)

    def mine(x, dim=-2):
        if isinstance(x, intflash.QTensor):
            return intflash.QTensor(mine(x.data), x.scale)
        return shard(x, dim, **where)

    q = mine(whole[0]) if sharded[0] else whole[0]
    k, v = (mine(x) if sharded[1] else x for x in whole[1:])
    masks = {name: mine(m) if m.shape[-2] > 1 and sharded[0] else m for name, m in masks.items()}
    lengths = {"query_length": nq if sharded[0] else None, "key_length": nk if sharded[1] else None}
    given = {**masks, **case.call}
    with counting() as traffic:
        found = attention(q, k, v, **given, **{**where, **case.place}, **lengths)
    if device().type == "cuda" or case.place.get("chunks"):  # a second call, of which a GPU's host reads nothing
        again = attention(q, k, v, **given, **{**where, **case.place}, **lengths)
        for x, y in zip(*(z if isinstance(z, tuple) else (z,) for z in (found, again)), strict=True):
            assert all(map(torch.equal, parts(x), parts(y))), "the second call differs"
    pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    for i, (x, y) in enumerate(pairs):
        if isinstance(y, intflash.QTensor):
            assert x.granularity == y.granularity and torch.equal(x.scale, y.scale)
            x, y = x.data, y.data
        y = shard(y, 2, **where) if sharded[0] else y
        assert x.dtype == y.dtype and torch.equal(x, y), f"part {i} differs in {int((x != y).sum())} of {x.numel()}"
    placement = Placement(
        where["layout"], *(case.place.get(n, "sharded") for n in ("queries", "keys")), *lengths.values(),
        case.place.get("scheme"), case.place.get("chunks"),
    )  # fmt: skip
    arguments = call.normalize(call.complete((), {"q": q, "k": k, "v": v, **given}))
    _, plan = plan_of(arguments, placement, ranks_of(where["group"]))
    want = data_bytes(plan.sizes, plan.scheme) + control_bytes(plan.sizes)
    assert abs(traffic.total - want) < 1e-6, f"{plan.scheme}: sent {traffic}, the formula says {want}"


def run_cases(rank: int) -> dict[str, str]:
    """What went wrong, by case."""
    world, wrong = dist.get_world_size(), {}
    mesh = (
        init_device_mesh(device().type, (world // 2, 2), mesh_dim_names=("gather", "ulysses"))
        if world in (4, 8)
        else None
    )
    for name, case in CASES.items():
        if world not in case.worlds:
            continue
        try:
            check(case, mesh)
        except AssertionError as error:
            wrong[name] = str(error)
        except Exception:  # the ranks may be at different places after it
            wrong[name] = traceback.format_exc()
            break
    return wrong
