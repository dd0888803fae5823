"""What follows from a call's shapes and options alone: its checks, the scheme, what all ranks must agree on."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from intflash import call, masks, validate
from intflash.backends import backends
from intflash.distributed.groups import ALONE, Ranks
from intflash.distributed.shards import LAYOUTS, Shards
from intflash.distributed.traffic import SCHEMES, Sizes, data_bytes
from intflash.errors import InputError
from intflash.problem import Problem
from intflash.quant import QTensor, Recipe

METHODS = ("intflash", "intflash_p8", "intflash_online", "intflash_bfp")
PLACES = ("sharded", "replicated")


@dataclass(frozen=True)
class Placement:
    """Where tokens lie and how they are exchanged: the arguments of `attention` that one process does not have."""

    layout: str
    queries: str
    keys: str
    query_length: int | None
    key_length: int | None
    scheme: str | None
    chunks: int | None


@dataclass(frozen=True)
class Plan:
    """A call that was found right.

    Attributes:
        facts: what all ranks must agree on, by name.
        ranks: the grid of the scheme.
        scheme: "gather", "ulysses", "grid" (both), "merge", or "local" where every rank has all keys.
        q_shards, k_shards: how tokens lie; None where every rank has all.
        sizes: what the call's bytes depend on.
        problem: the whole call without values, on device meta.
        chunks: the key heads of each group of heads that is exchanged and computed at a time, of a rank's share.
    """

    facts: dict[str, str]
    ranks: Ranks
    scheme: str
    q_shards: Shards | None
    k_shards: Shards | None
    sizes: Sizes
    problem: Problem
    chunks: tuple[slice, ...]


_plans: dict[tuple, Plan] = {}
_MOST = 4096


def plan_of(a: dict[str, Any], placement: Placement, ranks: Ranks) -> tuple[tuple, Plan]:
    """The plan of a call with these arguments, and the key that it is kept by.

    Raises:
        InputError: an argument is wrong on this rank.
    """
    key = (*(group.name for group in (ranks.across, ranks.along)), placement, *(_key(x) for x in a.values()))
    plan = _plans.get(key)
    if plan is None:
        plan = _make(a, placement, ranks)
        if len(_plans) >= _MOST:
            _plans.clear()
        _plans[key] = plan
    return key, plan


def _key(x: Any) -> Any:
    """All of an argument that a plan depends on; of scales in CPU memory, which cost nothing to read, their values."""
    if isinstance(x, Tensor):
        return x.dtype, x.shape, x.device
    if isinstance(x, QTensor):
        return _key(x.data), _scale_key(x.scale), x.granularity, x.block_size, x.bits
    if isinstance(x, Recipe):
        values = (getattr(x, f.name) for f in fields(x))
        return tuple(_scale_key(v) if isinstance(v, Tensor) else v for v in values)
    return x


def _scale_key(scale: Tensor) -> tuple:
    return scale.shape, scale.device.type, tuple(scale.flatten().tolist()) if scale.is_cpu else None


def _make(a: dict[str, Any], placement: Placement, ranks: Ranks) -> Plan:
    q, k, v = a["q"], a["k"], a["v"]
    validate.check_inputs(q, k, v, a["enable_gqa"])
    if isinstance(q, Tensor) and isinstance(k, QTensor):
        raise InputError(
            "sharded attention takes q, k and v all floats or all QTensors, got a float q beside QTensors k and v: "
            "quantize q by a scale that all ranks share"
        )
    if len(q.shape) != 4:
        raise InputError(f"q, k, v must be [B, H, n, D], got {list(q.shape)}")
    _check_options(a, placement)
    q_shards, nq = _shards("query", q.shape[2], placement.queries, placement.query_length, placement.layout, ranks)
    k_shards, nk = _shards("key", k.shape[2], placement.keys, placement.key_length, placement.layout, ranks)
    if a["is_causal"] and q_shards is not None and nq != nk:
        raise InputError(f"causal attention of sharded queries needs as many keys as queries, got {nq} and {nk}")
    problem = _whole_problem(a, nq, nk)
    _check_blocks(problem, q_shards, k_shards)
    ranks, scheme, sizes = _choose(a, placement, ranks, problem, q_shards, k_shards)
    facts = _facts(a, placement, problem, scheme, sizes)
    return Plan(facts, ranks, scheme, q_shards, k_shards, sizes, problem, _chunks(problem, placement, scheme, sizes))


def _check_options(a: dict[str, Any], placement: Placement) -> None:
    if a["method"] not in METHODS:
        raise InputError(f"sharded attention has the methods {', '.join(METHODS)}, got {a['method']!r}")
    if a["cu_seqlens_q"] is not None or a["cu_seqlens_k"] is not None:
        raise InputError(
            "packed sequences (cu_seqlens) are not sharded: no sequence attends to another, so give each rank whole "
            "sequences and call intflash.attention"
        )
    if a["window_size"] is not None:
        raise InputError(f"a sliding window is not sharded: window_size must be None, got {a['window_size']!r}")
    if call.is_dynamic(a["out_scale"]):
        raise InputError("out_scale='dynamic' needs all outputs before any of them: give a calibrated scale")
    choices = (("layout", LAYOUTS), ("queries", PLACES), ("keys", PLACES), ("scheme", (*SCHEMES, None)))
    for name, known in choices:
        if getattr(placement, name) not in known:
            raise InputError(f"{name} must be one of {known}, got {getattr(placement, name)!r}")
    if placement.chunks is not None and not (isinstance(placement.chunks, int) and placement.chunks > 0):
        raise InputError(f"chunks must be an integer of at least 1, got {placement.chunks!r}")


def whole_keys(k: object, placement: Placement, ranks: Ranks) -> int:
    """The number of keys of all ranks, by which "auto" is resolved. What is refused later counts as none."""
    if not isinstance(k, Tensor | QTensor) or len(k.shape) != 4:
        return 0
    if placement.keys == "sharded":
        return k.shape[2] * ranks.size if placement.key_length is None else placement.key_length
    return k.shape[2]


def _shards(
    what: str, held: int, place: str, length: int | None, layout: str, ranks: Ranks
) -> tuple[Shards | None, int]:
    """How queries or keys lie, and how many there are of them in all."""
    if place == "replicated":
        if length not in (None, held):
            raise InputError(f"{what}_length is {length}, but every rank has all {what} tokens, {held}")
        return None, held
    shards = Shards(held * ranks.size if length is None else length, ranks.size, layout)
    if shards.size(ranks.rank) != held:
        raise InputError(
            f"rank {ranks.rank} of {ranks.size} must hold {shards.size(ranks.rank)} of {shards.tokens} {what} tokens "
            f"({layout}), got {held}: shard() cuts so, and {what}_length says how many there are in all"
        )
    return shards, shards.tokens


def _whole_problem(a: dict[str, Any], nq: int, nk: int) -> Problem:
    """The validated call of one process, without values."""
    q = a["q"]
    changes: dict[str, Any] = {"q": _whole(q, nq), "k": _whole(a["k"], nk), "v": _whole(a["v"], nk)}
    for name in ("attn_mask", "bias"):
        mask = a[name]
        if mask is None:
            continue
        validate.check_tensor(mask, name, q.device)
        masks.normalize_mask(mask, (q.shape[0],), q.shape[1], q.shape[2], nk, name)  # refuses what does not fit
        rows = (nq,) if mask.ndim > 1 and mask.shape[-2] != 1 else mask.shape[-2:-1]
        changes[name] = mask.new_empty((*mask.shape[:-2], *rows, mask.shape[-1]), device="meta")
    return call.prepare_call(a | changes, values=False)[0]


def _whole(x: Tensor | QTensor, tokens: int) -> Tensor | QTensor:
    if isinstance(x, Tensor):
        return x.new_empty((*x.shape[:2], tokens, x.shape[3]), device="meta")
    scale = x.scale
    if x.granularity in ("token", "block"):
        of = tokens if x.granularity == "token" else -(-tokens // x.block_size)
        scale = scale.new_empty((*scale.shape[:2], of, 1))
    return replace(x, data=_whole(x.data, tokens), scale=scale.to("meta"))


def _check_blocks(problem: Problem, q_shards: Shards | None, k_shards: Shards | None) -> None:
    """Blocks of tokens that share a scale must not straddle ranks."""
    for name, shards in (("q", q_shards), ("k", k_shards)):
        x = getattr(problem, name)
        granularity = x.granularity if isinstance(x, QTensor) else getattr(problem.recipe, name)
        size = x.block_size if isinstance(x, QTensor) else problem.recipe.block_size
        if granularity != "block" or shards is None:
            continue
        starts = [s.start for rank in range(shards.ranks) for s in shards.segments(rank)]
        if any(start % size for start in starts):
            raise InputError(
                f"{name} has a scale for each block of {size} tokens, and {shards.tokens} tokens on {shards.ranks} "
                f"ranks ({shards.layout}) cut blocks: take a block size that divides the shards, or another granularity"
            )


def _choose(
    a: dict[str, Any], placement: Placement, ranks: Ranks, problem: Problem, q_shards: Shards | None,
    k_shards: Shards | None,
) -> tuple[Ranks, str, Sizes]:  # fmt: skip
    """The scheme that was asked for, or the possible one that sends least, and its grid."""
    one_column, asked = ranks.along.size == 1, placement.scheme
    grids = {"gather": ranks, "ulysses": Ranks(ALONE, ranks.across), "merge": ranks, "grid": ranks, "local": ranks}
    reasons: dict[str, str | None]
    if k_shards is None:
        reasons = {"local": None, **dict.fromkeys(SCHEMES, "every rank has all keys: nothing is exchanged")}
    elif q_shards is None:
        reasons = {
            "merge": _why_no_merge(a),
            "gather": None if one_column else "replicated queries on a mesh of two axes are merged",
            "ulysses": "replicated queries are not exchanged for heads",
        }
    elif one_column:
        reasons = {
            "gather": None,
            "ulysses": _why_no_exchange(problem, ranks.across.size),
            "merge": "sharded queries are no rank's alone: only replicated ones are merged",
        }
    else:
        axes = "a mesh of two axes gathers along the first and exchanges heads along the second"
        reasons = {"grid": _why_no_exchange(problem, ranks.along.size), **dict.fromkeys(SCHEMES, axes)}
    if asked is not None and reasons[asked] is not None:
        raise InputError(f"scheme {asked!r} cannot serve this call: {reasons[asked]}")
    possible = [name for name, reason in reasons.items() if reason is None] if asked is None else [asked]
    if not possible:
        raise InputError("; ".join(f"scheme {name!r} cannot serve this call: {why}" for name, why in reasons.items()))
    sizes = {name: _sizes(a, placement, grids[name], problem, k_shards) for name in possible}
    scheme = min(possible, key=lambda name: 0 if name == "local" else data_bytes(sizes[name], name))
    return grids[scheme], scheme, sizes[scheme]


def _why_no_merge(a: dict[str, Any]) -> str | None:
    name = a["backend"] or "torch"
    partial = backends()[name].partial if name in backends() else None
    if partial is None:
        served = ", ".join(name for name, backend in backends().items() if backend.partial is not None)
        return f"backend {name!r} gives no integer sums of some of the keys; those that do: {served}"
    if a["method"] not in partial.methods:
        return f"method {a['method']!r} has no maximum and sums to merge; those that have: {', '.join(partial.methods)}"
    return None


def _why_no_exchange(problem: Problem, columns: int) -> str | None:
    """Why heads cannot be exchanged for tokens among so many ranks."""
    heads = problem.k.shape[1]
    if heads % columns:
        return f"{heads} key heads do not divide among {columns} ranks"
    for name in ("keep", "bias"):
        mask = getattr(problem, name)
        if mask is not None and mask.shape[2] > 1:
            return "a mask with a row for each query stays with its queries, which are exchanged for heads"
    return None


def _sizes(a: dict[str, Any], placement: Placement, ranks: Ranks, problem: Problem, k_shards: Shards | None) -> Sizes:
    quantized = isinstance(problem.q, QTensor)
    kinds = [getattr(problem, n).granularity if quantized else getattr(problem.recipe, n) for n in "qk"]
    blocks = 0
    if kinds[1] == "block" and k_shards is not None:
        size = problem.k.block_size if quantized else problem.recipe.block_size
        batch = problem.k.scale.shape[0] if quantized else problem.k.shape[0]
        blocks = batch * -(-k_shards.longest // size)
    return Sizes(
        q=tuple(problem.q.shape), k=tuple(problem.k.shape), v=tuple(problem.v.shape), across=ranks.across.size,
        along=ranks.along.size, layout=placement.layout, out_dtype=problem.out_dtype, return_lse=problem.return_lse,
        recipe=None if quantized else problem.recipe, keys_sharded=k_shards is not None, blocks=blocks,
        token_scales=kinds[0] in ("token", "block"), float_bytes=0 if quantized else a["k"].element_size(),
    )  # fmt: skip


def _chunks(problem: Problem, placement: Placement, scheme: str, sizes: Sizes) -> tuple[slice, ...]:
    heads = problem.k.shape[1] // (sizes.along if scheme in ("ulysses", "grid") else 1)
    count = placement.chunks or 1
    each, more = divmod(heads, min(count, heads))
    ends = [0]
    while ends[-1] < heads:
        ends.append(ends[-1] + each + (len(ends) <= more))
    return tuple(slice(*pair) for pair in zip(ends, ends[1:], strict=False))


def _facts(a: dict[str, Any], placement: Placement, problem: Problem, scheme: str, sizes: Sizes) -> dict[str, str]:
    """All that must be equal on all ranks, by the names of the arguments."""
    facts = {name: str(value) for name, value in a.items() if not isinstance(value, Tensor | QTensor | Recipe)}
    facts |= {name: _shown(getattr(problem, name), a[name]) for name in "qkv"}
    for name in ("attn_mask", "bias"):
        if a[name] is not None:
            shape = (1,) * (4 - a[name].ndim) + tuple(a[name].shape)
            facts[name] = f"{a[name].dtype} {[*shape[:2], min(shape[2], 2), shape[3]]}"  # rows: one, or of each query
    facts |= {"recipe": str(_key(problem.recipe)), "scale": str(problem.sm_scale), "out_dtype": str(problem.out_dtype)}
    facts |= {f.name: str(getattr(placement, f.name)) for f in fields(placement)}
    facts["scheme"], facts["ranks"] = scheme, f"{sizes.across} x {sizes.along}"
    facts["device"] = a["q"].device.type
    return facts


def _shown(whole: Tensor | QTensor, given: Tensor | QTensor) -> str:
    if isinstance(given, Tensor):
        return f"{given.dtype} {list(whole.shape)}"
    scale = () if given.granularity in ("token", "block") else _scale_key(given.scale)
    return f"{given.bits}-bit codes {list(whole.shape)}, a scale per {given.granularity} {given.block_size} {scale}"
