"""Small programs: one operation each between inputs that can be any values and an output of its bits."""

import math

import torch

from intflash.integer.program import (
    Attention,
    Buffer,
    Embedding,
    Input,
    LayerNorm,
    Linear,
    Output,
    Patches,
    Pool,
    Program,
)


class Builder:
    """Adds operations one by one; `program` ends it."""

    def __init__(self):
        self.inputs, self.buffers, self.operations, self.tensors = [], {}, [], {}
        self.values = {}

    def tensor(self, x, dtype):
        name = f"t{len(self.tensors)}"
        self.tensors[name] = torch.as_tensor(x).to(dtype).contiguous()
        return name

    def buffer(self, shape, bits):
        name = f"b{len(self.buffers)}"
        self.buffers[name] = Buffer(tuple(shape), bits)
        return name

    def add(self, kind, **arguments):
        operation = kind(name=f"op{len(self.operations)}", **arguments)
        self.operations.append(operation)
        return operation.out

    def codes(self, x):
        """A buffer of these codes ``[B, R, C]``."""
        _, rows, columns = x.shape
        name = f"image{len(self.inputs)}"
        self.inputs.append(Input(name, "uint8", (1, rows, columns)))
        self.values[name] = (x.to(torch.int64) + 128).to(torch.uint8)[:, None]
        return self.add(Patches, image=name, out=self.buffer((rows, columns), 8), patch=(1, columns))

    def stream(self, x, bits):
        """A buffer of these values ``[B, R, C]``."""
        batch, rows, channels = x.shape
        name = f"index{len(self.inputs)}"
        self.inputs.append(Input(name, "index", (rows,), bound=batch * rows))
        self.values[name] = torch.arange(batch * rows).reshape(batch, rows)
        out = self.buffer((rows, channels), bits)
        table = self.tensor(x.reshape(batch * rows, channels), self.buffers[out].dtype)
        return self.add(Embedding, indices=(name,), tables=(table,), out=out)

    def linear(self, x, weight, bias, out, **arguments):
        if "multiplier" in arguments:
            arguments["multiplier"] = self.tensor(arguments["multiplier"], torch.int32)
        return self.add(
            Linear, x=x, weight=self.tensor(weight, torch.int8), bias=self.tensor(bias, torch.int32), out=out,
            **arguments,
        )  # fmt: skip

    def program(self, *outputs):
        scale = self.tensor([1.0], torch.float32)
        found = [Output(name, name, scale, self.buffers[name].shape) for name in outputs]
        return Program(
            tuple(self.inputs), self.buffers, tuple(self.operations), tuple(found), self.tensors
        ).check()  # fmt: skip


def integers(g, shape, bits, kind="uniform"):
    """Values of a signed format: all of its range, its ends, small ones, or one value in all places."""
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    if kind == "uniform":
        return torch.randint(low, high + 1, shape, generator=g)
    if kind == "ends":
        return torch.where(torch.rand(shape, generator=g) < 0.5, low, high)
    if kind == "small":
        return torch.randint(-3, 4, shape, generator=g)
    return torch.full(shape, low if kind == "lowest" else high)


KINDS = ("uniform", "ends", "small", "lowest", "highest")


def block(g, batch=2, heads=3, tokens=10, head_dim=8, method="intflash", windows=1, bias=False, mask=None):
    """A transformer block, its class token and a head on random constants: every operation but Embedding."""
    b, channels, rows = Builder(), heads * head_dim, windows * tokens
    image = Input("image", "float", (3, 4 * rows, 4))
    b.inputs.append(image)
    b.values["image"] = torch.randn(batch, *image.shape, generator=g)

    def weights(n, k):
        return integers(g, (n, k), 8).clamp(-127), torch.randint(-3000, 3000, (n,), generator=g)

    def scaled(n, reach, k):  # brings sums of K products to about `reach`
        factor = reach / (74 * 74 * k**0.5)
        shift = 30 - math.ceil(math.log2(factor))
        most = int(factor * 2**shift)
        return dict(multiplier=torch.randint(most // 2, most, (n,), generator=g), shift=shift)

    def norm(x, load_rows=None, rows=rows + 1):
        return b.add(
            LayerNorm, x=x, out=b.buffer((rows, channels), 8), eps=1 << 12, shift=8, load_rows=load_rows,
            multiplier=b.tensor(torch.randint(-(2**17), 2**17, (channels,), generator=g), torch.int32),
            bias=b.tensor(torch.randint(-5000, 5000, (channels,), generator=g), torch.int32),
        )  # fmt: skip

    def to_rows(n):
        return b.tensor(torch.randperm(rows, generator=g)[:n] + 1, torch.int32)

    codes = b.add(Patches, image="image", out=b.buffer((rows, 48), 8), patch=(4, 4), scale=0.02, zero_point=-3)
    position = b.tensor(integers(g, (rows + 1, channels), 15), torch.int16)
    stream = b.linear(
        codes, *weights(channels, 48), (b.buffer((rows + 1, channels), 16),), epilogue="residual", residual=position,
        store_rows=to_rows(rows), **scaled(channels, 8000, 48),
    )[0]  # fmt: skip
    x = norm(stream, b.tensor(torch.randperm(rows, generator=g)[:, None] + 1, torch.int32), rows)
    qkv = tuple(b.buffer((windows, heads, tokens, head_dim), 8) for _ in range(3))
    b.linear(
        x, *weights(3 * channels, channels), qkv, epilogue="codes", symmetric=True,
        **scaled(3 * channels, 60, channels),
    )  # fmt: skip
    if mask == "input":
        b.inputs.append(Input("mask", "mask", (tokens,)))
        b.values["mask"] = torch.rand(batch, tokens, generator=g) < 0.7
    elif mask == "windows":
        kept = torch.rand(windows, 1, tokens, tokens, generator=g) < 0.7
    out = b.add(
        Attention, q=qkv[0], k=qkv[1], v=qkv[2], out=b.buffer((rows, channels), 8), method=method,
        sm_scale=head_dim**-0.5, q_scale=(0.03,), k_scale=tuple(0.02 + 0.01 * h for h in range(heads)),
        v_scale=(0.02,), out_scale=(0.015,),
        bias=b.tensor(integers(g, (1, heads, tokens, tokens), 22), torch.int32) if bias else None,
        mask={None: None, "input": "mask", "windows": None}[mask] if mask != "windows" else b.tensor(kept, torch.bool),
    )  # fmt: skip
    stream = b.linear(
        out, *weights(channels, channels), (b.buffer((rows + 1, channels), 16),), epilogue="residual", residual=stream,
        store_rows=to_rows(rows), **scaled(channels, 8000, channels),
    )[0]  # fmt: skip
    hidden = b.linear(
        norm(stream), *weights(4 * channels, channels), (b.buffer((rows + 1, 4 * channels), 8),), epilogue="table",
        bits=10, table=b.tensor(integers(g, (1024,), 8), torch.int8), **scaled(4 * channels, 300, channels),
    )[0]  # fmt: skip
    stream = b.linear(
        hidden, *weights(channels, 4 * channels), (b.buffer((rows + 1, channels), 16),), epilogue="residual",
        residual=stream, **scaled(channels, 8000, 4 * channels),
    )[0]  # fmt: skip
    pooled = b.add(
        Pool, x=norm(stream), out=b.buffer((1, channels), 8), first=1, stop=rows + 1, multiplier=(1 << 30) // rows,
        shift=30,
    )  # fmt: skip
    logits = b.linear(pooled, *weights(10, channels), (b.buffer((1, 10), 32),), epilogue="accumulator")[0]
    return b.program(logits, stream), b.values
