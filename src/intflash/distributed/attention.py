"""Attention whose tokens lie on several ranks, with the bits of one process.

Q, K and V become int8 codes by scales that all ranks share; the codes travel, and each rank calls `intflash.attention`
on whole sequences of keys. So neither the number of ranks nor the scheme changes a bit, whatever the method.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from intflash import api, call, op, validate
from intflash.backends import select
from intflash.distributed import merge
from intflash.distributed.agreement import ERROR, agree
from intflash.distributed.codes import Operand, bits_of, fused_maxima, shared_mean
from intflash.distributed.groups import Ranks, Where, ranks_of
from intflash.distributed.messages import Messages, share
from intflash.distributed.overlap import Lane
from intflash.distributed.plan import Placement, Plan, plan_of, whole_keys
from intflash.distributed.traffic import apart_maxima
from intflash.errors import InputError
from intflash.methods import AUTO, get_method, resolve
from intflash.numerics.groups import has_same_sums
from intflash.quant import QTensor, Recipe, key_mean
from intflash.quant.quantizers import absolute_maximum, divided, scale_of_maximum

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Options(api.Options, total=False):
    """The arguments by name of `intflash.attention`."""

    out_dtype: torch.dtype | None
    return_lse: bool


Three = tuple[Operand, Operand, Operand]
_SHARED = ("tensor", "head", "channel")  # granularities whose scales hold for tokens of all ranks


def attention(
    q: Tensor | QTensor,
    k: Tensor | QTensor,
    v: Tensor | QTensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    group: Where = None,
    layout: str = "contiguous",
    queries: str = "sharded",
    keys: str = "sharded",
    query_length: int | None = None,
    key_length: int | None = None,
    scheme: str | None = None,
    chunks: int | None = None,
    **options: Unpack[Options],
) -> Any:
    """`intflash.attention` of a sequence whose tokens lie on the ranks of a process group.

    Each rank gives its shard and gets its queries' rows of what one process computes from whole tensors, with the same
    bits for every number of ranks, layout and scheme. All ranks must make the same call. For inference, as
    `intflash.attention`.

    Args:
        q, k, v: all float tensors or all `QTensor`s, with four axes: this rank's tokens ``[B, Hq, n, D]``,
            ``[B, Hk, n, D]``, ``[B, Hk, n, Dv]``. `QTensor`s whose scale is of more than a token have the same one on
            all ranks.
        attn_mask: as for `intflash.attention`, for this rank's queries and all keys in the order of the sequence:
            broadcastable to ``[B, Hq, n, Nk]``. So is `bias` of the options.
        is_causal: hide keys after the query's position in the whole sequence.
        scale: softmax scale, > 0; default 1 / sqrt(D).
        group: a `ProcessGroup`, or a `DeviceMesh` of one axis; default: all processes. With a mesh of two axes
            (gather, ulysses) the sequence lies on the ranks of both in row-major order; the second is best inside a
            host.
        layout: "contiguous", or "zigzag" for causal attention with equal work on all ranks; see `shard`.
        queries, keys: "sharded", or "replicated" where every rank has all of q, or of k and v (cross attention to a
            short text; one new token over a sharded KV cache).
        query_length, key_length: tokens of the whole sequence, where shards are not even. Default: ranks times the
            shard's.
        scheme: "gather" (int8 K and V of all ranks to each), "ulysses" (tokens for heads; key heads must be a multiple
            of the ranks), "merge" (replicated queries, `intflash` and `intflash_p8`: integer maxima and sums of each
            rank's keys); default: the one that sends least.
        chunks: groups of heads that are exchanged and computed one after the other, the next group's exchange begun
            before a group is computed, so that whole keys of two groups are held. Default: one group, which is
            fastest on GPUs of one host; more need less memory.
        options: the other arguments of `intflash.attention` by name: method ("intflash", "intflash_p8",
            "intflash_online", "intflash_bfp", or "auto" by the number of keys of all ranks), backend, enable_gqa, bias,
            causal_align, recipe, out_dtype, out_scale, return_lse, check_finite.

    Returns:
        As `intflash.attention`, for this rank's queries: the output ``[B, Hq, n, Dv]``, or with `return_lse` the pair
        of output and lse ``[B, Hq, n]``.

    Raises:
        InputError: an argument is wrong on some rank, or differs between ranks: on every rank, before data moves.
        BackendError: no backend can serve this call.
        DistributedError: a collective failed or a rank ended; no later than the process group's timeout.

    Source: docs/design/distributed.md.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from intflash.distributed import attention
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun: without arguments
        >>> q, k, v = (torch.randn(1, 4, 64, 32) for _ in range(3))  # this rank's tokens
        >>> attention(q, k, v, is_causal=True).shape
        torch.Size([1, 4, 64, 32])
        >>> dist.destroy_process_group()
    """
    ranks = ranks_of(group)
    for each in ranks.groups:
        each.check_usable()
    placement = Placement(layout, queries, keys, query_length, key_length, scheme, chunks)
    given = dict(q=q, k=k, v=v, attn_mask=attn_mask, is_causal=is_causal, scale=scale, **options)
    with torch.no_grad():
        out, lse, arguments = _compute(given, placement, ranks)
    wanting = op.gradients_wanted(arguments)
    if wanting:
        out, lse = op.refuse_backward(out, wanting), op.refuse_backward(lse, wanting)
    return out if lse is None else (out, lse)


_agreed: set[tuple] = set()  # keys of plans whose facts all ranks had in an earlier call


@torch.compiler.disable
def _compute(
    given: dict[str, Any], placement: Placement, ranks: Ranks
) -> tuple[Tensor | QTensor, Tensor | None, dict[str, Any]]:
    """Output and log-sum-exp of a call, and all its arguments."""
    device = _device(given["q"], ranks)
    with _on(device), torch.autocast(device.type, enabled=False):
        try:
            arguments = call.complete((), given)
            if arguments["method"] == AUTO:
                arguments["method"] = resolve(AUTO, whole_keys(arguments["k"], placement, ranks))
            arguments = call.normalize(arguments)
            key, plan = plan_of(arguments, placement, ranks)
            check = arguments["check_finite"]
            check = device.type == "cpu" if check is None else check
            if check:
                _check_values(arguments, plan)
            maxima = _early_maxima(arguments, plan)
        except (InputError, TypeError) as error:
            agree(ranks, {ERROR: f"{type(error).__name__}: {error}"}, None, device, read=True)
            raise
        read = check or device.type == "cpu" or key not in _agreed
        maxima = agree(ranks, plan.facts, maxima, device, read)
        _agreed.add(key)
        if arguments["check_finite"] is False:
            arguments = call.with_usable_scales(arguments)
        operands, lse_shift = _operands(arguments, plan, maxima)
        attend = merge.attend if plan.scheme == "merge" else _attend
        out, out_scale, lse = attend(plan, operands, arguments)
        if lse is not None and lse_shift is not None:
            lse = lse + lse_shift
    return (out if out_scale is None else call.integer_output(out, out_scale)), lse, arguments


def _on(device: torch.device) -> AbstractContextManager:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _device(q: object, ranks: Ranks) -> torch.device:
    """That of q, or where q is no tensor the one on which its group communicates."""
    if isinstance(q, Tensor | QTensor):
        return q.device
    nccl = any("nccl" in group.pg.name() for group in ranks.groups)
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def _check_values(a: dict[str, Any], plan: Plan) -> None:
    """What one process refuses about values, before any of them moves."""
    q, k, v = a["q"], a["k"], a["v"]
    validate.check_scales(q, k, v, plan.problem.recipe)
    if not isinstance(q, QTensor):
        validate.check_finite(q, k, v)
    for name in ("attn_mask", "bias"):
        if a[name] is not None and a[name].dtype != torch.bool:
            validate.check_bias_values(a[name], name, get_method(plan.problem.method).bias_fraction_bits)
    if isinstance(a["out_scale"], Tensor):
        validate.check_scale(a["out_scale"], "out_scale")


def _early_maxima(a: dict[str, Any], plan: Plan) -> Tensor | None:
    """The local maxima that travel with the fingerprint, see `_maxima`."""
    recipe = plan.sizes.recipe
    if recipe is None or apart_maxima(recipe, *_whole_shapes(plan)):
        return None
    return _maxima({name: a[name] for name in "qkv"}, recipe)


def _maxima(x: dict[str, Tensor], recipe: Recipe) -> Tensor | None:
    """The local maxima of those of Q, K and V whose dynamic scales all ranks share, int32 as `bits_of`, one after the
    other; None without any."""
    names = _shared_names(recipe)
    if len(names) == 3 and (found := fused_maxima(x["q"], x["k"], x["v"], recipe)) is not None:
        return found
    parts = [bits_of(absolute_maximum(x[name], getattr(recipe, name), 0)).flatten() for name in names]
    return torch.cat(parts) if parts else None


def _shared_names(recipe: Recipe) -> list[str]:
    """Those of q, k and v with dynamic scales that hold for tokens of all ranks."""
    return [name for name in "qkv" if getattr(recipe, f"{name}_scale") is None and getattr(recipe, name) in _SHARED]


def _whole_shapes(plan: Plan) -> tuple:
    return plan.sizes.q, plan.sizes.k, plan.sizes.v


def _operands(a: dict[str, Any], plan: Plan, maxima: Tensor) -> tuple[Three, Tensor | None]:
    """Q, K and V with their scales, and what to add to log-sum-exp (K smoothing).

    maxima: those of all ranks that travelled with the fingerprint.
    """
    recipe, lse_shift = plan.sizes.recipe, None
    if recipe is None:
        return tuple(Operand.of_codes(a[name]) for name in "qkv"), None
    x = {name: a[name] for name in "qkv"}
    if recipe.rotate or recipe.smooth_k:
        unrotated = x["k"]

        def mean_of(k: Tensor) -> Tensor:
            k = k if recipe.rotate else unrotated  # of 16 bits it is half as long a message
            return key_mean(k) if plan.k_shards is None else shared_mean(k, plan.ranks, plan.k_shards)

        sm_scale = plan.problem.sm_scale if plan.problem.return_lse else None
        x["q"], x["k"], lse_shift = call.rotate_and_smooth(x["q"].float(), x["k"].float(), recipe, sm_scale, mean_of)
    scales: dict[str, Tensor] = {}
    if shared := _shared_names(recipe):
        if apart_maxima(recipe, *_whole_shapes(plan)):
            maxima = plan.ranks.reduce(_maxima(x, recipe), dist.ReduceOp.MAX)
        shapes = [_scale_shape(getattr(recipe, name), x[name]) for name in shared]
        parts = scale_of_maximum(maxima.view(torch.float32), recipe.bits).split([*map(math.prod, shapes)])
        scales = {name: part.view(shape) for name, part, shape in zip(shared, parts, shapes, strict=True)}
    for name in "qkv":
        if getattr(recipe, f"{name}_scale") is None and name not in shared:
            amax = absolute_maximum(x[name].float(), getattr(recipe, name), recipe.block_size)
            scales[name] = scale_of_maximum(amax, recipe.bits)
    return tuple(Operand.of_floats(x[name], name, recipe, scales.get(name)) for name in "qkv"), lse_shift


def _scale_shape(granularity: str, x: Tensor) -> tuple[int, ...]:
    """The shape of a scale that all ranks share."""
    b, h, _, d = x.shape
    return {"tensor": (1, 1, 1, 1), "head": (b, h, 1, 1), "channel": (b, h, 1, d)}[granularity]


def _attend(plan: Plan, operands: Three, a: dict[str, Any]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Output, its scale where it is integer, and log-sum-exp of this rank's queries.

    The next group's keys are sent for before a group is computed, and a group's outputs as soon as they are there.
    """
    _, _, v = operands
    # all codes first: an attention kernel fills the GPU, so that a kernel which comes after it would wait for its end
    lane, messages = Lane(v.x.device), Messages(plan, *operands)
    out_scale = _out_scale(plan, a, v)

    def begin(chunk: slice):
        return lane.begin(lambda: (messages.queries(chunk), *messages.keys(chunk)))

    sent = []
    coming = begin(plan.chunks[0])
    for i, chunk in enumerate(plan.chunks):
        here = coming
        if i + 1 < len(plan.chunks):
            coming = begin(plan.chunks[i + 1])
        rows = _rows(plan, *here(), out_scale, chunk, a)
        sent.append((rows, lane.begin(lambda rows=rows: [*map(messages.back, rows)])))
    groups = [ready() for _, ready in sent]  # the rows are kept until they are sent
    out, *lse = (lane.hand_over(_joined(parts).flatten(1, 2)) for parts in zip(*groups, strict=True))
    return out.contiguous(), out_scale, lse[0][..., 0].contiguous() if lse else None


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Along axis 2, without a copy where there is one part."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts], dim=2)


def _rows(
    plan: Plan, q: QTensor | Operand, k: QTensor, v: QTensor, out_scale: Tensor | None, chunk: slice, a: dict[str, Any]
) -> list[Tensor]:
    """Output and, where it is wanted, log-sum-exp ``[B, h, rows, Dv | 1]`` of a group of heads."""
    recipe = None
    if isinstance(q, Operand):
        q, recipe = q.x, Recipe(q=q.granularity, q_scale=q.scale)
    own = share(plan, chunk, a["q"].shape[1])
    heads = own.heads(plan.ranks.along.rank if own.columns > 1 else 0)
    first, found = 0, []
    for count, seen, causal in _segments(plan, own.columns > 1, q.shape[2], k.shape[2]):
        rows = slice(first, first + count)
        first = rows.stop
        out = _one_process(
            dict(
                q=_rows_of(q, rows), k=_keys_of(k, seen), v=_keys_of(v, seen),
                attn_mask=_part(a["attn_mask"], heads, rows, seen), bias=_part(a["bias"], heads, rows, seen),
                scale=plan.problem.sm_scale, method=a["method"], backend=a["backend"], enable_gqa=True, recipe=recipe,
                out_dtype=plan.problem.out_dtype, out_scale=_part(out_scale, heads), return_lse=bool(a["return_lse"]),
                check_finite=a["check_finite"],
            ),
            causal,
        )  # fmt: skip
        found.append([x for x in out if x is not None])
    return [_joined(parts) for parts in zip(*found, strict=True)]


def _segments(plan: Plan, of_row: bool, rows: int, keys: int) -> list[tuple[int, int, int | None]]:
    """Queries that lie together: how many, how many keys from the first on they are given, and o with "key j is present
    for query i iff j <= i + o". Of causal queries a segment is given the keys up to its own last."""
    offset = plan.problem.causal
    if offset is None or plan.q_shards is None:
        return [(rows, keys, offset)]
    rank, found = plan.ranks.rank, []
    for s in plan.q_shards.union(plan.ranks.row if of_row else range(rank, rank + 1)):
        # intflash_bfp counts how many keys there are in all
        alike = plan.problem.method != "intflash_bfp" or has_same_sums(s.stop, keys)
        found.append((s.stop - s.start, s.stop if alike else keys, s.start))
    return found


def _one_process(given: dict[str, Any], causal: int | None) -> tuple[Tensor, Tensor | None]:
    """Output and log-sum-exp ``[..., 1]`` in one process."""
    aligned = {None: {}, 0: dict(is_causal=True)}
    aligned[given["k"].shape[2] - given["q"].shape[2]] = dict(is_causal=True, causal_align="bottom_right")
    if causal in aligned:
        found = api.attention(**given, **aligned[causal])
        out, lse = found if given["return_lse"] else (found, None)
        out = out.data if isinstance(out, QTensor) else out
    else:
        problem, _ = call.prepare_call(call.complete((), given))
        problem = replace(problem, causal=causal)
        result = select(problem, given["backend"]).run(problem)
        out, lse = result.out, result.lse
    return out, None if lse is None else lse[..., None]


def _rows_of(q: QTensor | Tensor, rows: slice) -> QTensor | Tensor:
    if rows == slice(0, q.shape[2]):
        return q
    if isinstance(q, Tensor):
        return q[:, :, rows]
    scale = q.scale[:, :, rows] if q.granularity == "token" else q.scale
    return QTensor(q.data[:, :, rows], scale, q.granularity, None, q.bits)


def _keys_of(x: QTensor, count: int) -> QTensor:
    """The first keys."""
    if count == x.shape[2]:
        return x
    scale = x.scale[:, :, : -(-count // x.block_size)] if x.granularity == "block" else x.scale
    return QTensor(x.data[:, :, :count], scale, x.granularity, x.block_size, x.bits)


def _part(mask: Tensor | None, heads: slice, rows: slice = slice(None), keys: int | None = None) -> Tensor | None:
    """The heads, rows and first keys of a mask or scale that broadcasts to ``[B, Hq, rows, keys]``."""
    if mask is None:
        return None
    mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
    mask = mask if mask.shape[1] == 1 else mask[:, heads]
    mask = mask if mask.shape[2] == 1 else mask[:, :, rows]
    return mask if mask.shape[3] == 1 else mask[..., :keys]


def _out_scale(plan: Plan, a: dict[str, Any], v: Operand) -> Tensor | None:
    """The scale of integer output for all heads: the caller's, or the one that no output exceeds."""
    dtype, given = plan.problem.out_dtype, a["out_scale"]
    if dtype.is_floating_point:
        return None
    if given is None or isinstance(given, str):  # "bound"
        group = plan.problem.group
        s_v = v.scale if v.scale.shape[1] == 1 else v.scale.repeat_interleave(group, dim=1)
        return divided(s_v * ((1 << (v.bits - 1)) - 1), torch.iinfo(dtype).max)
    if isinstance(given, Tensor):
        return given.to(v.scale).reshape(1, 1, 1, 1) if given.numel() == 1 else given.to(v.scale)
    return torch.full((1, 1, 1, 1), float(given), device=v.scale.device)
