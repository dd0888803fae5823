"""A program: an integer model as plain data. docs/numerics.md, section 4, says what each operation computes.

Operations read and write named buffers; their constants are tensors of the program, by name. `Program.check` refuses
what is not a program: unknown names, shapes that do not fit, values and widths past their bounds. Executors take a
checked program and check nothing again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from intflash.errors import InputError
from intflash.numerics.exp import MAX_HEAD_DIM, MAX_KEYS
from intflash.quant.quantizers import LEAST_SCALE

VERSION = 1  # of the definition in docs/numerics.md, section 4
METHODS = ("intflash", "intflash_p8")
EPILOGUES = ("codes", "table", "residual", "accumulator")
TABLE_BITS = (8, 10, 12)
STREAM_BITS = (16, 24)
DTYPES = {8: torch.int8, 16: torch.int16, 24: torch.int32, 32: torch.int32}
MAX_CHANNELS = 1 << 14  # of a LayerNorm
MAX_EPS = 1 << 60
MAX_NORM_MULTIPLIER = 1 << 31
MAX_NORM_BIAS = 1 << 30
MAX_NORM_SHIFT = 24
MAX_SHIFT = 62
MAX_TABLES = 16  # summands of an embedding
IMAGE_DTYPES = ("float", "uint8")


@dataclass(frozen=True)
class Buffer:
    """What one image has of a buffer: its shape, and its bits (8: int8, 16: int16, 24 and 32: int32)."""

    shape: tuple[int, ...]
    bits: int

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.bits]

    @property
    def limits(self) -> tuple[int, int]:
        """The least and the largest value."""
        return -(1 << (self.bits - 1)), (1 << (self.bits - 1)) - 1


@dataclass(frozen=True)
class Input:
    """What a model is called with.

    Attributes:
        name: of the argument.
        kind: "float" or "uint8" (an image ``[channels, H, W]``), "index" (int64 ``[N]``, from 0 to `bound` - 1) or
            "mask" (bool or integers ``[N]``, False or 0 where a token is padding).
        shape: without the batch axis.
        bound: of an index.
        optional: an index is 0 and a mask True everywhere where it is not given.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    bound: int = 0
    optional: bool = False


@dataclass(frozen=True)
class Output:
    """A result: ``float32(buffer) * scale``, one scale or one for each of the last axis, in `shape` per image."""

    name: str
    buffer: str
    scale: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Patches:
    """Codes of an image in patch rows: float images by `scale` and `zero_point`, uint8 images as x - 128."""

    name: str
    image: str
    out: str
    patch: tuple[int, int]
    scale: float = 1.0
    zero_point: int = 0


@dataclass(frozen=True)
class Embedding:
    """The saturated sum of a row of each table, chosen by an index input, and of constant `rows`."""

    name: str
    indices: tuple[str, ...]
    tables: tuple[str, ...]
    out: str
    rows: str | None = None


@dataclass(frozen=True)
class Linear:
    """An int8 product, requantized, with one epilogue.

    The input is read as rows of K codes. An `out` of four axes ``[S, heads, N, D]`` holds queries, keys or values:
    the columns are split equally among such outputs.
    """

    name: str
    x: str
    weight: str
    bias: str
    out: tuple[str, ...]
    epilogue: str
    multiplier: str | None = None
    shift: int = 1
    symmetric: bool = False
    bits: int = 8  # of the index of a table
    table: str | None = None
    residual: str | None = None
    store_rows: str | None = None


@dataclass(frozen=True)
class LayerNorm:
    """LayerNorm with an integer reciprocal square root; `load_rows` ``[R, parts]`` concatenates rows of x."""

    name: str
    x: str
    out: str
    multiplier: str
    bias: str
    shift: int
    eps: int
    load_rows: str | None = None


@dataclass(frozen=True)
class Attention:
    """Attention on codes at static scales, one of a tensor or one of each head; the output's is one."""

    name: str
    q: str
    k: str
    v: str
    out: str
    method: str
    sm_scale: float
    q_scale: tuple[float, ...]
    k_scale: tuple[float, ...]
    v_scale: tuple[float, ...]
    out_scale: tuple[float, ...]
    bias: str | None = None
    mask: str | None = None


@dataclass(frozen=True)
class Pool:
    """The requantized sum of the rows from `first` up to, without it, `stop`."""

    name: str
    x: str
    out: str
    first: int
    stop: int
    multiplier: int
    shift: int


Operation = Patches | Embedding | Linear | LayerNorm | Attention | Pool
OPERATIONS: dict[str, type] = {kind.__name__: kind for kind in Operation.__args__}


@dataclass(frozen=True, eq=False)
class Program:
    """An integer model.

    Attributes:
        inputs: in the order of the call.
        buffers: by name; each is written once, or, of some Linears, in parts of one operation.
        operations: in order.
        outputs: the results.
        tensors: the constants, by name.
        result: how the outputs are returned: "tensor" (the only one) or "dict".
    """

    inputs: tuple[Input, ...]
    buffers: dict[str, Buffer]
    operations: tuple[Operation, ...]
    outputs: tuple[Output, ...]
    tensors: dict[str, Tensor] = field(repr=False)
    result: str = "tensor"

    def reads(self, operation: Operation) -> list[str]:
        """The buffers that an operation reads."""
        match operation:
            case Attention():
                names = [operation.q, operation.k, operation.v]
            case Patches() | Embedding():
                names = []
            case Linear():
                names = [operation.x, operation.residual]
            case _:
                names = [operation.x]
        return [name for name in names if name in self.buffers]

    @staticmethod
    def writes(operation: Operation) -> tuple[str, ...]:
        """The buffers that an operation writes."""
        return operation.out if isinstance(operation, Linear) else (operation.out,)

    def last_uses(self) -> dict[str, int]:
        """Buffer -> the index of the last operation that needs it; outputs are needed to the end."""
        last = {}
        for i, operation in enumerate(self.operations):
            for name in (*self.reads(operation), *self.writes(operation)):
                last[name] = i
        return last | {output.buffer: len(self.operations) for output in self.outputs}

    def constants(self, operation: Operation) -> Iterator[str]:
        """The names of the tensors that an operation uses."""
        for f in fields(operation):
            value = getattr(operation, f.name)
            for name in value if isinstance(value, tuple) else (value,):
                if isinstance(name, str) and f.name != "name" and name in self.tensors:
                    yield name

    def check(self) -> Program:
        """This program, after refusing what does not fit docs/numerics.md.

        Raises:
            InputError: names the operation, what is expected and what it has.
        """
        for name, buffer in self.buffers.items():
            _check_types(buffer, name)
            _expect(buffer.bits in DTYPES, name, f"bits among {tuple(DTYPES)}", buffer.bits)
            _expect(bool(buffer.shape) and min(buffer.shape) >= 1, name, "a shape", buffer.shape)
        for name, x in self.tensors.items():
            _expect(x.numel() > 0, name, "a tensor of values", f"the shape {tuple(x.shape)}")
        for part in (*self.inputs, *self.operations, *self.outputs):
            _check_types(part, str(part.name))
        names = [operation.name for operation in self.operations]
        _expect(len(set(names)) == len(names), "program", "operations of different names", names)
        _expect(self.result in ("tensor", "dict"), "program", "the result 'tensor' or 'dict'", self.result)
        for given in self.inputs:
            _check_input(given)
        written: set[str] = set()
        for operation in self.operations:
            for name in self.reads(operation):
                _expect(name in written, operation.name, f"buffer {name!r} to be written before it is read", "not")
            _CHECKS[type(operation)](self, operation)
            for name in self.writes(operation):
                _expect(name not in written, operation.name, f"buffer {name!r} to be written once", "twice")
                written.add(name)
        _expect(bool(self.outputs), "program", "outputs", "none")
        for output in self.outputs:
            buffer = self.buffer(output.buffer, output.name)
            _expect(output.buffer in written, output.name, f"buffer {output.buffer!r} to be written", "not")
            _expect(
                math.prod(output.shape) == math.prod(buffer.shape), output.name, f"a shape of {buffer.shape}",
                output.shape,
            )  # fmt: skip
            scale = self.tensor(output.scale, output.name, torch.float32)
            sizes = ((1,), (output.shape[-1],))
            _expect(tuple(scale.shape) in sizes, output.name, f"scales {sizes}", tuple(scale.shape))
            _expect(bool(torch.isfinite(scale).all()), output.name, "finite scales", "others")
        return self

    def buffer(self, name: str, of: str) -> Buffer:
        _expect(name in self.buffers, of, "a buffer", name)
        return self.buffers[name]

    def tensor(self, name: str | None, of: str, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> Tensor:
        """The constant of that name, which must have this dtype and shape."""
        _expect(name in self.tensors, of, "a tensor of the program", name)
        x = self.tensors[name]
        _expect(x.dtype == dtype, of, f"{name} of {dtype}", x.dtype)
        if shape is not None:
            _expect(tuple(x.shape) == shape, of, f"{name} of shape {shape}", tuple(x.shape))
        return x

    def input(self, name: str, of: str, kinds: tuple[str, ...]) -> Input:
        found = [given for given in self.inputs if given.name == name]
        _expect(bool(found) and found[0].kind in kinds, of, f"an input of kind {' or '.join(kinds)}", name)
        return found[0]


def _check_types(part: Buffer | Input | Operation | Output, of: str) -> None:
    for name, kind in _field_types(type(part)).items():
        value = getattr(part, name)
        _expect(_is_of(value, kind), of, f"{name} of the type {kind}", repr(value))


@functools.cache
def _field_types(part: type) -> dict[str, Any]:
    return get_type_hints(part)


def _is_of(x: object, kind: Any) -> bool:
    """Whether x is of a field's type: a plain one, exactly, tuples of such, or one of several."""
    kinds = get_args(kind)
    if get_origin(kind) is not tuple:
        return any(_is_of(x, one) for one in kinds) if kinds else type(x) is kind
    if not isinstance(x, tuple):
        return False
    kinds = kinds[:1] * len(x) if kinds[-1] is Ellipsis else kinds
    return len(kinds) == len(x) and all(map(_is_of, x, kinds))


def _expect(holds: bool, of: str, expected: str, found: object) -> None:
    if not holds:
        raise InputError(f"{of}: expected {expected}, got {found}")


def _check_input(given: Input) -> None:
    axes = {"float": 3, "uint8": 3, "index": 1, "mask": 1}
    _expect(given.kind in axes, given.name, f"a kind of input among {tuple(axes)}", given.kind)
    fits = len(given.shape) == axes[given.kind] and min(given.shape) >= 1
    _expect(fits, given.name, f"{axes[given.kind]} axes", given.shape)
    _expect(given.kind != "index" or given.bound >= 1, given.name, "an index with a bound", given.bound)


def _check_patches(program: Program, op: Patches) -> None:
    image = program.input(op.image, op.name, IMAGE_DTYPES)
    channels, height, width = image.shape
    ph, pw = op.patch
    _expect(
        ph >= 1 and pw >= 1 and height % ph == 0 and width % pw == 0, op.name,
        f"a patch that divides {height} x {width}", op.patch,
    )  # fmt: skip
    rows, columns = (height // ph) * (width // pw), channels * ph * pw
    _expect_codes(program, op.out, op.name, (rows, columns))
    _expect(_is_scale(op.scale), op.name, "a scale that is finite and > 0", op.scale)
    _expect(-128 <= op.zero_point <= 127, op.name, "an int8 zero point", op.zero_point)


def _check_embedding(program: Program, op: Embedding) -> None:
    out = _stream(program, op.out, op.name)
    rows, channels = _matrix(out, op.name)
    _expect(
        len(op.indices) == len(op.tables) and 1 <= len(op.tables) < MAX_TABLES, op.name,
        f"as many tables as indices, fewer than {MAX_TABLES}", (op.indices, op.tables),
    )  # fmt: skip
    for index, table in zip(op.indices, op.tables, strict=True):
        given = program.input(index, op.name, ("index",))
        _expect(given.shape == (rows,), op.name, f"index {index!r} of {rows} tokens", given.shape)
        entries = program.tensor(table, op.name, out.dtype, (given.bound, channels))
        _expect_within(entries, out, op.name, table)
    if op.rows is not None:
        _expect_within(program.tensor(op.rows, op.name, out.dtype, (rows, channels)), out, op.name, op.rows)


def _check_linear(program: Program, op: Linear) -> None:
    _expect(op.epilogue in EPILOGUES, op.name, f"an epilogue among {EPILOGUES}", op.epilogue)
    x = program.buffer(op.x, op.name)
    _expect(x.bits == 8, op.name, f"codes of 8 bits in {op.x!r}", x.bits)
    _expect(bool(op.out), op.name, "outputs", op.out)
    _expect(op.bits in TABLE_BITS, op.name, f"a table of {TABLE_BITS} bits", op.bits)
    for option, epilogue in (("table", "table"), ("residual", "residual")):
        given = getattr(op, option) is not None
        _expect(given == (op.epilogue == epilogue), op.name, f"a {option} with its epilogue only", op.epilogue)
    _expect(
        op.store_rows is None or op.residual is not None, op.name, "a map of rows with a residual only", op.epilogue
    )
    weight = program.tensor(op.weight, op.name, torch.int8)
    _expect(weight.ndim == 2, op.name, "weights [N, K]", tuple(weight.shape))
    n, k = weight.shape
    size = math.prod(x.shape)
    _expect(size % k == 0, op.name, f"rows of K = {k} codes in {op.x!r}", x.shape)
    rows = size // k
    _expect(int(weight.min()) >= -127, op.name, "weights from -127", int(weight.min()))
    bias = program.tensor(op.bias, op.name, torch.int32, (n,))
    largest = int(bias.to(torch.int64).abs().max())
    _expect(
        k * 128 * 127 + largest < 1 << 31, op.name, "K * 128 * 127 + max |bias| < 2^31",
        f"K = {k}, max |bias| = {largest}",
    )  # fmt: skip
    if op.epilogue == "accumulator":
        _expect(op.multiplier is None, op.name, "no multiplier for accumulators", op.multiplier)
        out = program.buffer(op.out[0], op.name)
        _expect(len(op.out) == 1 and out.bits == 32, op.name, "one output of 32 bits", op.out)
        _expect(math.prod(out.shape) == rows * n, op.name, f"{rows * n} accumulators", out.shape)
        return
    multiplier = program.tensor(op.multiplier, op.name, torch.int32, (n,))
    _expect(int(multiplier.min()) >= 0, op.name, "multipliers of at least 0", int(multiplier.min()))
    _expect(1 <= op.shift <= MAX_SHIFT, op.name, f"a shift in [1, {MAX_SHIFT}]", op.shift)
    outs = [program.buffer(name, op.name) for name in op.out]
    _expect(all(out.bits != 32 for out in outs), op.name, "outputs of at most 24 bits", op.out)
    if len(outs[0].shape) == 4:
        _check_heads(op, outs, rows, n)
        return
    _expect(len(outs) == 1, op.name, "one output, or queries, keys and values of four axes", op.out)
    out = outs[0]
    if op.epilogue == "residual":
        _check_residual(program, op, out, rows, n)
        return
    _expect(math.prod(out.shape) == rows * n, op.name, f"{rows} x {n} values in {op.out[0]!r}", out.shape)
    if op.epilogue == "table":
        _expect_within(program.tensor(op.table, op.name, out.dtype, (1 << op.bits,)), out, op.name, op.table)


def _check_heads(op: Linear, outs: list[Buffer], rows: int, n: int) -> None:
    shape = outs[0].shape
    s, heads, tokens, head_dim = shape
    fits = all(out.shape == shape and out.bits == 8 for out in outs) and op.epilogue == "codes" and op.symmetric
    _expect(fits, op.name, "symmetric codes of one shape for all heads", op.out)
    _expect(
        rows == s * tokens and n == len(outs) * heads * head_dim, op.name,
        f"{s * tokens} rows of {len(outs)} x {heads} x {head_dim} columns", (rows, n),
    )  # fmt: skip


def _check_residual(program: Program, op: Linear, out: Buffer, rows: int, n: int) -> None:
    stream = _stream(program, op.out[0], op.name)
    total, channels = _matrix(stream, op.name)
    if op.residual in program.tensors:
        constant = program.tensor(op.residual, op.name, out.dtype, (total, channels))
        _expect_within(constant, out, op.name, op.residual)
    else:
        residual = program.buffer(op.residual, op.name)
        _expect(residual == out, op.name, f"a residual of {out}", residual)
    if op.store_rows is None:
        _expect(math.prod(out.shape) == rows * n, op.name, f"{rows} x {n} values in {op.out[0]!r}", out.shape)
        return
    _expect(channels == n, op.name, f"{n} channels in {op.out[0]!r}", channels)
    at = program.tensor(op.store_rows, op.name, torch.int32, (rows,))
    _expect_rows(at, total, op.name)
    _expect(len(at.unique()) == rows, op.name, "a map that names each row once", op.store_rows)


def _check_layer_norm(program: Program, op: LayerNorm) -> None:
    x, out = program.buffer(op.x, op.name), program.buffer(op.out, op.name)
    _expect(x.bits != 32 and out.bits != 32, op.name, "buffers of at most 24 bits", (x.bits, out.bits))
    rows, channels = _matrix(x, op.name)
    if op.load_rows is not None:
        at = program.tensor(op.load_rows, op.name, torch.int32)
        _expect(at.ndim == 2, op.name, "a map [R, parts]", tuple(at.shape))
        _expect_rows(at, rows, op.name)
        rows, channels = at.shape[0], at.shape[1] * channels
    _expect(2 <= channels <= MAX_CHANNELS, op.name, f"from 2 to {MAX_CHANNELS} channels", channels)
    _expect(out.shape == (rows, channels), op.name, f"an output of {rows} x {channels}", out.shape)
    _expect(1 <= op.eps <= MAX_EPS, op.name, "eps in [1, 2^60]", op.eps)
    _expect(1 <= op.shift <= MAX_NORM_SHIFT, op.name, f"a shift up to {MAX_NORM_SHIFT}", op.shift)
    multiplier = program.tensor(op.multiplier, op.name, torch.int32, (channels,)).to(torch.int64).abs()
    _expect(int(multiplier.max()) < MAX_NORM_MULTIPLIER, op.name, "|m| < 2^31", int(multiplier.max()))
    bias = program.tensor(op.bias, op.name, torch.int32, (channels,)).to(torch.int64).abs()
    _expect(int(bias.max()) < MAX_NORM_BIAS, op.name, "|b| < 2^30", int(bias.max()))


def _check_attention(program: Program, op: Attention) -> None:
    _expect(op.method in METHODS, op.name, f"a method among {METHODS}", op.method)
    q = program.buffer(op.q, op.name)
    _expect(len(q.shape) == 4 and q.bits == 8, op.name, "codes [S, heads, N, D]", q)
    for name in (op.k, op.v):
        _expect(program.buffer(name, op.name) == q, op.name, f"{name!r} as {q}", program.buffers[name])
    s, heads, tokens, head_dim = q.shape
    _expect(tokens <= MAX_KEYS, op.name, f"at most {MAX_KEYS} keys (65,193 * N < 2^32)", tokens)
    _expect(head_dim <= MAX_HEAD_DIM, op.name, f"head_dim of at most {MAX_HEAD_DIM}", head_dim)
    _expect_codes(program, op.out, op.name, (s * tokens, heads * head_dim))
    _expect(_is_scale(op.sm_scale), op.name, "a softmax scale that is finite and > 0", op.sm_scale)
    for name in ("q_scale", "k_scale", "v_scale", "out_scale"):
        scales = getattr(op, name)
        fits = len(scales) in (1, heads) and all(map(_is_scale, scales))
        _expect(fits, op.name, f"1 or {heads} scales {name} that are finite and > 0", scales)
    if op.bias is not None:
        program.tensor(op.bias, op.name, torch.int32, (1, heads, tokens, tokens))
    if op.mask in program.tensors:
        program.tensor(op.mask, op.name, torch.bool, (s, 1, tokens, tokens))
    elif op.mask is not None:
        given = program.input(op.mask, op.name, ("mask",))
        _expect(given.shape == (tokens,) and s == 1, op.name, f"a mask of {tokens} tokens, no windows", given.shape)


def _check_pool(program: Program, op: Pool) -> None:
    x, out = program.buffer(op.x, op.name), program.buffer(op.out, op.name)
    rows, channels = _matrix(x, op.name)
    _expect(0 <= op.first < op.stop <= rows, op.name, f"rows within {rows}", (op.first, op.stop))
    summed = op.stop - op.first
    _expect(summed << (x.bits - 1) < 1 << 31, op.name, "rows * 2^(bits - 1) < 2^31", f"{summed} rows of {x.bits} bits")
    _expect(out.shape == (1, channels) and out.bits != 32, op.name, f"an output of 1 x {channels}", out)
    _expect(0 <= op.multiplier < 1 << 31, op.name, "a multiplier < 2^31", op.multiplier)
    _expect(1 <= op.shift <= MAX_SHIFT, op.name, f"a shift in [1, {MAX_SHIFT}]", op.shift)


_CHECKS = {
    Patches: _check_patches,
    Embedding: _check_embedding,
    Linear: _check_linear,
    LayerNorm: _check_layer_norm,
    Attention: _check_attention,
    Pool: _check_pool,
}


def _matrix(buffer: Buffer, of: str) -> tuple[int, int]:
    """Rows and channels of a buffer of two axes."""
    _expect(len(buffer.shape) == 2, of, "rows and channels", buffer.shape)
    return buffer.shape


def _stream(program: Program, name: str, of: str) -> Buffer:
    buffer = program.buffer(name, of)
    _expect(buffer.bits in STREAM_BITS, of, f"a stream of {STREAM_BITS} bits in {name!r}", buffer.bits)
    return buffer


def _expect_codes(program: Program, name: str, of: str, shape: tuple[int, ...]) -> None:
    buffer = program.buffer(name, of)
    _expect(buffer == Buffer(shape, 8), of, f"codes of {shape} in {name!r}", buffer)


def _expect_rows(at: Tensor, rows: int, of: str) -> None:
    _expect(
        int(at.min()) >= 0 and int(at.max()) < rows, of, f"a map of rows below {rows}", (int(at.min()), int(at.max()))
    )


def _expect_within(x: Tensor, buffer: Buffer, of: str, name: str | None) -> None:
    low, high = buffer.limits
    _expect(
        int(x.min()) >= low and int(x.max()) <= high, of, f"{name} in [{low}, {high}]", (int(x.min()), int(x.max()))
    )


def _is_scale(x: float) -> bool:
    return LEAST_SCALE <= x <= torch.finfo(torch.float32).max
