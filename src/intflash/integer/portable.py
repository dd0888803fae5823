"""The portable executor of a program: torch operations on any device, the bits of docs/numerics.md, section 4.

Products are float matrix products in which every sum is exact; requantization and LayerNorm work on the upper halves
of 32 x 32 bit products, as a processor's or a GPU's kernels do. Rows are worked on in pieces that bound the memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from intflash.backends import select
from intflash.backends.portable.operands import exact_dtype
from intflash.integer.attend import attention_problem
from intflash.integer.program import (
    Attention,
    Embedding,
    LayerNorm,
    Linear,
    Patches,
    Pool,
    Program,
)
from intflash.numerics.rsqrt import LARGEST, TABLE

PIECE = 1 << 22  # values of an operation that are worked on at once
EXACT_K = 1024  # 1024 * 128 * 127 < 2^24: a float32 sum of that many products is exact


def run(program: Program, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The buffers of the program's outputs ``[B, *shape]``, computed where the inputs and constants are.

    Args:
        program: a checked one.
        inputs: by name, with a batch axis, as `Input` says; indices int64, masks bool.
    """
    last = program.last_uses()
    values: dict[str, Tensor] = {}
    for i, operation in enumerate(program.operations):
        found = _STEPS[type(operation)](program, operation, values, inputs)
        for name, value in found.items():
            values[name] = value.reshape(len(value), *program.buffers[name].shape)
        for name in [name for name in values if last[name] <= i]:
            del values[name]
    return {output.buffer: values[output.buffer] for output in program.outputs}


def multiply_high(a: Tensor, b: Tensor) -> Tensor:
    """The upper half of 64-bit products: floor(a * b / 2^32), int64 values of int32 ranges."""
    return (a.to(torch.int64) * b.to(torch.int64)) >> 32


def requantize(acc: Tensor, multiplier: Tensor, shift: int) -> Tensor:
    """acc * multiplier / 2^shift rounded half up, int64; with shift >= 33 from the upper half alone."""
    if shift >= 33:
        return multiply_high(acc, multiplier).add_(1 << (shift - 33)).bitwise_right_shift_(shift - 32)
    product = acc.to(torch.int64) * multiplier.to(torch.int64)
    return product.add_(1 << (shift - 1)).bitwise_right_shift_(shift)


def in_pieces(rows: Tensor, width: int, step: Callable[[Tensor], Tensor]) -> Tensor:
    """`step` of a matrix of rows, a bounded number of rows at once, as one tensor."""
    count = max(1, PIECE // max(width, rows.shape[1]))
    if len(rows) <= count:
        return step(rows)
    return torch.cat([step(piece) for piece in rows.split(count)])


def product(x: Tensor, weight: Tensor) -> Tensor:
    """int8 codes ``[M, K]`` times ``[N, K]``: int32, exact."""
    k = weight.shape[1]
    if exact_dtype(EXACT_K * 128 * 127) is torch.float64:  # float32 products are rounded to TF32 or bfloat16 here
        return (x.double() @ weight.double().T).to(torch.int32)
    if k <= EXACT_K:
        return (x.float() @ weight.float().T).to(torch.int32)
    parts = zip(x.split(EXACT_K, dim=1), weight.split(EXACT_K, dim=1), strict=True)
    return functools.reduce(torch.add, ((a.float() @ b.float().T).to(torch.int32) for a, b in parts))


def _patches(program: Program, op: Patches, values: dict[str, Tensor], inputs: Mapping[str, Tensor]) -> dict:
    image = inputs[op.image]
    if image.dtype == torch.uint8:
        codes = (image ^ 128).view(torch.int8)
    else:
        inv = 1.0 / torch.tensor(op.scale, dtype=torch.float32, device=image.device)
        scaled = torch.round(image.double() * inv.double()) + op.zero_point
        bound = torch.copysign(torch.full_like(scaled, 127.5), image) - 0.5  # 127 or -128, for NaN
        codes = torch.where(scaled.isnan(), bound, scaled.clamp(-128, 127)).to(torch.int8)
    ph, pw = op.patch
    codes = codes.unfold(2, ph, ph).unfold(3, pw, pw)  # [B, c, rows, columns, ph, pw]
    return {op.out: codes.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)}


def _embedding(program: Program, op: Embedding, values: dict[str, Tensor], inputs: Mapping[str, Tensor]) -> dict:
    out = program.buffers[op.out]
    total = None if op.rows is None else program.tensors[op.rows].to(torch.int32)
    for index, table in zip(op.indices, op.tables, strict=True):
        rows = torch.nn.functional.embedding(inputs[index], program.tensors[table]).to(torch.int32)
        total = rows if total is None else rows + total
    return {op.out: total.clamp_(*out.limits).to(out.dtype)}


def _linear(program: Program, op: Linear, values: dict[str, Tensor], inputs: Mapping[str, Tensor]) -> dict:
    weight, bias = program.tensors[op.weight], program.tensors[op.bias]
    n, k = weight.shape
    x = values[op.x]
    batch, out = len(x), program.buffers[op.out[0]]
    x = x.reshape(-1, k)
    if op.epilogue == "accumulator":
        return {op.out[0]: in_pieces(x, n, lambda rows: product(rows, weight) + bias).view(batch, -1)}
    multiplier, bits = program.tensors[op.multiplier], out.bits
    finish = None
    if op.epilogue == "table":
        table, bits = program.tensors[op.table], op.bits
        finish = lambda y: table[(y + (1 << (bits - 1))).to(torch.int32)]  # noqa: E731
    elif op.epilogue == "residual":
        bits = 32  # saturated only with the residual
    limits = (-(1 << (bits - 1)) + op.symmetric, (1 << (bits - 1)) - 1)

    def step(rows: Tensor) -> Tensor:
        y = requantize(product(rows, weight) + bias, multiplier, op.shift).clamp_(*limits)
        return y.to(torch.int32 if bits == 32 else out.dtype) if finish is None else finish(y)

    y = in_pieces(x, n, step)
    if op.epilogue == "residual":
        return {op.out[0]: _with_residual(program, op, y.view(batch, -1, n), values)}
    if len(out.shape) == 2:
        return {op.out[0]: y.view(batch, -1)}
    s, heads, tokens, head_dim = out.shape
    y = y.view(batch, s, tokens, len(op.out), heads, head_dim).transpose(2, 4)  # [B, S, heads, outputs, N, D]
    return {name: y[:, :, :, i].contiguous() for i, name in enumerate(op.out)}


def _with_residual(program: Program, op: Linear, y: Tensor, values: dict[str, Tensor]) -> Tensor:
    out = program.buffers[op.out[0]]
    constant = program.tensors.get(op.residual)
    residual = values[op.residual] if constant is None else constant.expand(len(y), *out.shape)
    if op.store_rows is None:
        return (residual.to(torch.int64) + y.view(residual.shape)).clamp_(*out.limits).to(out.dtype)
    rows = program.tensors[op.store_rows].to(torch.int64)
    added = (residual.index_select(1, rows).to(torch.int64) + y).clamp_(*out.limits).to(out.dtype)
    return residual.index_copy(1, rows, added)


def _layer_norm(program: Program, op: LayerNorm, values: dict[str, Tensor], inputs: Mapping[str, Tensor]) -> dict:
    x, out = values[op.x], program.buffers[op.out]
    batch = len(x)
    if op.load_rows is not None:
        rows = program.tensors[op.load_rows].to(torch.int64)
        x = x.index_select(1, rows.flatten()).view(batch, *rows.shape, -1).flatten(2)
    m, b = program.tensors[op.multiplier], program.tensors[op.bias]

    def step(rows: Tensor) -> Tensor:
        y = (multiply_high(_normalized(rows, op.eps), m) + b) >> op.shift
        return y.clamp_(*out.limits).to(out.dtype)

    x = x.reshape(-1, x.shape[-1])
    return {op.out: in_pieces(x, x.shape[1], step).view(batch, -1)}


@functools.cache
def _roots(device: torch.device) -> Tensor:
    return torch.tensor(TABLE, dtype=torch.int64, device=device)


def _normalized(x: Tensor, eps: int) -> Tensor:
    """2^29 (x - mean) / sqrt(C var + eps) of each row, int64."""
    channels = x.shape[1]
    x = x.to(torch.int64)
    total = x.sum(1, keepdim=True)
    mean = torch.div(total, channels, rounding_mode="floor")
    rest = total - mean * channels
    x = x - mean
    # sum (x - mean)^2 = Q - 2 q S + C q^2: the same integer
    e = x.square().sum(1, keepdim=True) - torch.div(rest * rest, channels, rounding_mode="floor") + eps
    pairs = _leading_pairs(e)
    top = torch.where(pairs < 16, e >> (32 - 2 * pairs).clamp(min=0), e << (2 * pairs - 32).clamp(min=0))
    root = _roots(x.device)[(top >> 24) - 64]
    for _ in range(2):
        root = (root * ((3 << 28) - multiply_high(multiply_high(root, root), top))) >> 29
    fraction = pairs - 1
    deviation = (x << fraction).sub_(torch.div(rest << fraction, channels, rounding_mode="floor"))
    return multiply_high(deviation, root.clamp_(max=LARGEST))


def _leading_pairs(e: Tensor) -> Tensor:
    """How often 1 <= e < 2^62 can be shifted left by two bits and stay below 2^64."""
    # float64 may round up to the next power of two, where one pair too few is counted
    pairs = (64 - torch.frexp(e.double())[1].to(torch.int64)) >> 1
    fits = pairs + 1
    return torch.where((e >> (64 - 2 * fits).clamp(0, 62)) == 0, fits, pairs)


def _attention(program: Program, op: Attention, values: dict[str, Tensor], inputs: Mapping[str, Tensor]) -> dict:
    q, k, v = (values[name].flatten(0, 1) for name in (op.q, op.k, op.v))
    problem = attention_problem(program, op, q, k, v, inputs)
    out = select(problem, None).run(problem).out
    return {op.out: out.transpose(1, 2).reshape(len(values[op.q]), -1)}


def attention_backend(program: Program, op: Attention) -> str:
    """The name of this library's backend that computes an attention operation here."""
    s, *shape = program.buffers[op.q].shape
    device = next(iter(program.tensors.values())).device
    codes = torch.zeros(s, *shape, dtype=torch.int8, device=device)
    inputs = {
        i.name: torch.ones(1, *i.shape, dtype=torch.bool, device=device) for i in program.inputs if i.kind == "mask"
    }
    return select(attention_problem(program, op, codes, codes, codes, inputs), None).name


def _pool(program: Program, op: Pool, values: dict[str, Tensor], inputs: Mapping[str, Tensor]) -> dict:
    out = program.buffers[op.out]
    total = values[op.x][:, op.first : op.stop].sum(1, dtype=torch.int64)
    multiplier = torch.tensor(op.multiplier, device=total.device)
    return {op.out: requantize(total, multiplier, op.shift).clamp_(*out.limits).to(out.dtype)}


_STEPS = {
    Patches: _patches,
    Embedding: _embedding,
    Linear: _linear,
    LayerNorm: _layer_norm,
    Attention: _attention,
    Pool: _pool,
}
