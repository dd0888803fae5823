"""Random programs of one operation: what the executors are compared on."""

from __future__ import annotations

import torch
from torch import Tensor

from intflash.integer.program import (
    Attention,
    Buffer,
    Embedding,
    Input,
    LayerNorm,
    Linear,
    Operation,
    Output,
    Patches,
    Pool,
    Program,
)


def single(operations: list[Operation], inputs, buffers, tensors, out: str) -> Program:
    """A checked program whose only output is the buffer `out`, with scale 1."""
    tensors = dict(tensors, one=torch.ones(1))
    output = Output("out", out, "one", buffers[out].shape)
    return Program(tuple(inputs), buffers, tuple(operations), (output,), tensors).check()


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def integers(g: torch.Generator, low: int, high: int, *shape: int, dtype=torch.int64) -> Tensor:
    """Uniform in [low, high]."""
    return torch.randint(low, high + 1, shape, generator=g).to(dtype)


def codes_input(rows: int, channels: int) -> tuple[list[Input], dict[str, Buffer], Operation]:
    """A uint8 image that is `rows` rows of int8 codes, in the buffer "x"."""
    op = Patches("patches", "image", "x", (1, channels))
    return [Input("image", "uint8", (1, rows, channels))], {"x": Buffer((rows, channels), 8)}, op


def stream_input(
    rows: int, channels: int, bits: int, table: Tensor
) -> tuple[list[Input], dict[str, Buffer], dict, Operation]:
    """A stream "x" of rows that the index input "index" chooses from a table ``[entries, channels]``."""
    op = Embedding("embedding", ("index",), ("table",), "x")
    return [Input("index", "index", (rows,), len(table))], {"x": Buffer((rows, channels), bits)}, {"table": table}, op


def linear_program(
    g: torch.Generator, m: int, k: int, n: int, epilogue: str, *, bits: int = 8, out_bits: int = 8, shift: int = 40,
    top_bias: int = 1 << 20, top_multiplier: int = (1 << 31) - 1, symmetric: bool = False, mapped: bool = False,
) -> Program:  # fmt: skip
    """A linear with random constants; its residual is a constant of `m` rows, or of `m + 3` that a map picks from."""
    inputs, buffers, patches = codes_input(m, k)
    tensors = {
        "w": integers(g, -127, 127, n, k, dtype=torch.int8),
        "b": integers(g, -top_bias, top_bias, n, dtype=torch.int32),
    }
    rows = m + 3 if mapped else m
    options = {}
    if epilogue != "accumulator":
        tensors["m"] = integers(g, 0, top_multiplier, n, dtype=torch.int32)
        options |= {"multiplier": "m", "shift": shift, "symmetric": symmetric}
    else:
        out_bits = 32
    buffers["y"] = Buffer((rows, n), out_bits)
    low, high = buffers["y"].limits
    if epilogue == "table":
        tensors["t"] = integers(g, low, high, 1 << bits, dtype=buffers["y"].dtype)
        options |= {"table": "t", "bits": bits}
    if epilogue == "residual":
        tensors["r"] = integers(g, low, high, rows, n, dtype=buffers["y"].dtype)
        options["residual"] = "r"
        if mapped:
            tensors["at"] = torch.randperm(rows, generator=g)[:m].to(torch.int32)
            options["store_rows"] = "at"
    return single(
        [patches, Linear("linear", "x", "w", "b", ("y",), epilogue, **options)], inputs, buffers, tensors, "y"
    )


def norm_program(
    table: Tensor, rows: int, bits: int, *, multiplier: Tensor, bias: Tensor, shift: int, eps: int, out_bits: int = 8,
    load_rows: Tensor | None = None,
) -> Program:  # fmt: skip
    """A LayerNorm of rows of a table."""
    inputs, buffers, tensors, embedding = stream_input(rows, table.shape[1], bits, table)
    tensors |= {"m": multiplier, "b": bias}
    shape = (rows, table.shape[1])
    if load_rows is not None:
        tensors["at"] = load_rows
        shape = (load_rows.shape[0], load_rows.shape[1] * table.shape[1])
    buffers["y"] = Buffer(shape, out_bits)
    norm = LayerNorm("norm", "x", "y", "m", "b", shift, eps, None if load_rows is None else "at")
    return single([embedding, norm], inputs, buffers, tensors, "y")


def attention_program(
    g: torch.Generator,
    windows: int,
    heads: int,
    n: int,
    d: int,
    method: str,
    *,
    biased: bool,
    mask: str,
    per_head: bool,
) -> Program:
    """Heads from a linear of random codes, then attention; mask: "none", "windows" or "padding"."""
    inputs, buffers, patches = codes_input(windows * n, 16)
    width = heads * d
    tensors = {
        "w": integers(g, -127, 127, 3 * width, 16, dtype=torch.int8),
        "b": integers(g, -1000, 1000, 3 * width, dtype=torch.int32),
        "m": integers(g, 1 << 20, 1 << 24, 3 * width, dtype=torch.int32),
    }
    for name in "qkv":
        buffers[name] = Buffer((windows, heads, n, d), 8)
    buffers["y"] = Buffer((windows * n, width), 8)
    if biased:
        tensors["bias"] = integers(g, -(1 << 22), 1 << 22, 1, heads, n, n, dtype=torch.int32)
    given = None
    if mask == "windows":
        tensors["keep"] = torch.rand(windows, 1, n, n, generator=g) < 0.7
        given = "keep"
    elif mask == "padding":
        inputs.append(Input("keep", "mask", (n,), optional=True))
        given = "keep"
    count = heads if per_head else 1

    def scales() -> tuple[float, ...]:
        values = torch.rand(count, generator=g) * 0.2 + 0.01
        return tuple(float(x) for x in values)

    attend = Attention(
        "attention", "q", "k", "v", "y", method, d**-0.5, scales(), scales(), scales(), scales(),
        "bias" if biased else None, given,
    )  # fmt: skip
    qkv = Linear("qkv", "x", "w", "b", ("q", "k", "v"), "codes", "m", 30, symmetric=True)
    return single([patches, qkv, attend], inputs, buffers, tensors, "y")


def pool_program(
    table: Tensor, rows: int, bits: int, first: int, stop: int, multiplier: int, shift: int, out_bits: int
):
    """The requantized sum of rows of a table."""
    inputs, buffers, tensors, embedding = stream_input(rows, table.shape[1], bits, table)
    buffers["y"] = Buffer((1, table.shape[1]), out_bits)
    return single([embedding, Pool("pool", "x", "y", first, stop, multiplier, shift)], inputs, buffers, tensors, "y")
