"""The golden executor of a program: int64 values, each declared width asserted, written for clarity.

docs/numerics.md, section 4, line by line. Every other executor is compared with it bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from intflash.integer.attend import attention_problem
from intflash.integer.program import (
    MAX_NORM_BIAS,
    Attention,
    Embedding,
    LayerNorm,
    Linear,
    Patches,
    Pool,
    Program,
)
from intflash.methods import get_method
from intflash.methods.arrays import matmul, within
from intflash.numerics.rsqrt import LARGEST, TABLE, newton_step

CODES = (-128, 127)


def run(program: Program, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The buffers of the program's outputs ``[B, *shape]``.

    Args:
        program: a checked one.
        inputs: by name, with a batch axis, as `Input` says; indices int64, masks bool.
    """
    values: dict[str, Tensor] = {}
    for operation in program.operations:
        for name, value in _STEPS[type(operation)](program, operation, values, inputs).items():
            buffer = program.buffers[name]
            within(value, buffer.bits, name)
            values[name] = value.reshape(-1, *buffer.shape)
    return {o.buffer: values[o.buffer].to(program.buffers[o.buffer].dtype) for o in program.outputs}


def _patches(program: Program, op: Patches, values: dict[str, Tensor], inputs: Mapping[str, Tensor]) -> dict:
    image = inputs[op.image]
    if image.dtype == torch.uint8:
        codes = image.to(torch.int64) - 128
    else:
        x = image.float()
        inv = 1.0 / torch.tensor(op.scale, dtype=torch.float32)
        rounded = torch.round(x.double() * inv.double())  # 24 x 24 bits: exact in float64, one rounding
        codes = (rounded + op.zero_point).clamp(*CODES)
        codes = torch.where(codes.isnan(), torch.where(torch.signbit(x), -128.0, 127.0).double(), codes).to(torch.int64)
    b, c, height, width = codes.shape
    ph, pw = op.patch
    rows = codes.reshape(b, c, height // ph, ph, width // pw, pw).permute(0, 2, 4, 1, 3, 5)
    return {op.out: rows.reshape(b, -1, c * ph * pw)}


def _embedding(program: Program, op: Embedding, values: dict[str, Tensor], inputs: Mapping[str, Tensor]) -> dict:
    tables = zip(op.indices, op.tables, strict=True)
    total = sum(program.tensors[table].to(torch.int64)[inputs[index]] for index, table in tables)
    if op.rows is not None:
        total = total + program.tensors[op.rows].to(torch.int64)
    return {op.out: total.clamp(*program.buffers[op.out].limits)}


def requantize(acc: Tensor, multiplier: Tensor | int, shift: int) -> Tensor:
    """round(acc * multiplier / 2^shift), half up; acc int32, multiplier in [0, 2^31)."""
    return (within(acc, 32, "accumulator") * multiplier + (1 << (shift - 1))) >> shift


def _linear(program: Program, op: Linear, values: dict[str, Tensor], inputs: Mapping[str, Tensor]) -> dict:
    weight, bias = program.tensors[op.weight].to(torch.int64), program.tensors[op.bias].to(torch.int64)
    x = values[op.x]
    x = x.reshape(x.shape[0], -1, weight.shape[1])
    acc = matmul(x, weight.T, op.name) + bias
    if op.epilogue == "accumulator":
        return {op.out[0]: within(acc, 32, op.name)}
    y = requantize(acc, program.tensors[op.multiplier].to(torch.int64), op.shift)
    out = program.buffers[op.out[0]]
    if op.epilogue == "table":
        half = 1 << (op.bits - 1)
        table = program.tensors[op.table].to(torch.int64)
        return {op.out[0]: table[y.clamp(-half, half - 1) + half]}
    if op.epilogue == "residual":
        return {op.out[0]: _add_residual(program, op, y, values)}
    low, high = out.limits
    y = y.clamp(-high if op.symmetric else low, high)
    if len(out.shape) == 2:
        return {op.out[0]: y}
    s, heads, tokens, head_dim = out.shape
    y = y.reshape(len(y), s, tokens, len(op.out), heads, head_dim).permute(3, 0, 1, 4, 2, 5)
    return dict(zip(op.out, y, strict=True))


def _add_residual(program: Program, op: Linear, y: Tensor, values: dict[str, Tensor]) -> Tensor:
    out = program.buffers[op.out[0]]
    if op.residual in program.tensors:
        residual = program.tensors[op.residual].to(torch.int64).expand(len(y), *out.shape)
    else:
        residual = values[op.residual]
    if op.store_rows is None:
        return (residual + y.reshape(residual.shape)).clamp(*out.limits)
    total = residual.clone()
    rows = program.tensors[op.store_rows].to(torch.int64)
    total[:, rows] = (residual[:, rows] + y).clamp(*out.limits)
    return total


def bit_length(x: Tensor) -> Tensor:
    """Number of bits of x in [1, 2^62)."""
    length = torch.zeros_like(x)
    for step in (32, 16, 8, 4, 2, 1):
        large = x >= (1 << step)
        length = torch.where(large, length + step, length)
        x = torch.where(large, x >> step, x)
    return length + 1


def _layer_norm(program: Program, op: LayerNorm, values: dict[str, Tensor], inputs: Mapping[str, Tensor]) -> dict:
    x = values[op.x]
    if op.load_rows is not None:
        x = x[:, program.tensors[op.load_rows].to(torch.int64)].flatten(2)
    channels = x.shape[2]
    total, squares = x.sum(2, keepdim=True), (x * x).sum(2, keepdim=True)
    q = total // channels
    r = total - q * channels
    w = squares - 2 * q * total + channels * q * q - r * r // channels
    e = w + op.eps
    assert int(w.min()) >= 0 and int(e.min()) >= 1 and int(e.max()) < 1 << 62, f"{op.name}: variance leaves 62 bits"
    h = (64 - bit_length(e)) // 2
    n = torch.where(h >= 16, e << (2 * h - 32).clamp(min=0), e >> (32 - 2 * h).clamp(min=0))
    root = torch.tensor(TABLE, device=x.device)[(n >> 24) - 64]
    root = newton_step(newton_step(root, n), n).clamp(max=LARGEST)
    f = h - 1
    t = within(((x - q) << f) - (r << f) // channels, 32, f"{op.name}: deviation")
    z = within((t * root) >> 32, 31, f"{op.name}: norm")
    m, b = program.tensors[op.multiplier].to(torch.int64), program.tensors[op.bias].to(torch.int64)
    assert int(b.abs().max()) < MAX_NORM_BIAS
    y = within(((z * m) >> 32) + b, 32, f"{op.name}: scaled norm") >> op.shift
    return {op.out: y.clamp(*program.buffers[op.out].limits)}


def _attention(program: Program, op: Attention, values: dict[str, Tensor], inputs: Mapping[str, Tensor]) -> dict:
    codes = [values[name].flatten(0, 1).to(torch.int8) for name in (op.q, op.k, op.v)]
    problem = attention_problem(program, op, *codes, inputs)
    out = get_method(op.method).reference(problem).out  # [B * S, heads, N, D]
    return {op.out: out.transpose(1, 2).to(torch.int64)}


def _pool(program: Program, op: Pool, values: dict[str, Tensor], inputs: Mapping[str, Tensor]) -> dict:
    total = values[op.x][:, op.first : op.stop].sum(1, keepdim=True)
    return {op.out: requantize(total, op.multiplier, op.shift).clamp(*program.buffers[op.out].limits)}


_STEPS = {
    Patches: _patches,
    Embedding: _embedding,
    Linear: _linear,
    LayerNorm: _layer_norm,
    Attention: _attention,
    Pool: _pool,
}
