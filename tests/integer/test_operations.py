"""Each operation: the two executors equal in every bit, and the reference against exact or float64 arithmetic."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from integer.programs import (
    attention_program,
    codes_input,
    integers,
    linear_program,
    norm_program,
    pool_program,
    seeded,
    single,
)
from intflash.integer import portable, reference
from intflash.integer.program import Buffer, Embedding, Input, Patches
from intflash.numerics.rsqrt import rsqrt

few = settings(max_examples=60, deadline=None)
seeds = st.integers(0, 2**32 - 1)


def both(program, inputs):
    """The output buffer by the reference, after comparing the torch executor with it."""
    expected = reference.run(program, inputs)["y"]
    found = portable.run(program, inputs)["y"]
    assert found.dtype == expected.dtype == program.buffers["y"].dtype
    assert torch.equal(found, expected)
    return expected


def image(g, program, batch=2, extreme=False):
    shape = (batch, *program.inputs[0].shape)
    if extreme:  # the ends of the range only
        return torch.where(torch.rand(shape, generator=g) < 0.5, 0, 255).to(torch.uint8)
    return integers(g, 0, 255, *shape, dtype=torch.uint8)


@few
@given(
    seed=seeds, m=st.integers(1, 5), k=st.sampled_from([1, 16, 77, 1024, 1025, 3072]), n=st.integers(1, 40),
    shift=st.integers(1, 62), epilogue=st.sampled_from(["codes", "residual", "accumulator"]),
    out_bits=st.sampled_from([16, 24]), extreme=st.booleans(), mapped=st.booleans(),
)  # fmt: skip
def test_linear(seed, m, k, n, shift, epilogue, out_bits, extreme, mapped):
    """Any shift with multipliers up to 2^31 - 1 and biases up to the bound: saturation everywhere, or nowhere."""
    g = seeded(seed)
    top_bias = (1 << 31) - 1 - k * 128 * 127 if extreme else 1 << 20
    program = linear_program(
        g, m, k, n, epilogue, out_bits=8 if epilogue == "codes" else out_bits, shift=shift, top_bias=top_bias,
        mapped=mapped and epilogue == "residual", symmetric=epilogue == "codes" and mapped,
    )  # fmt: skip
    x = image(g, program, extreme=extreme)
    y = both(program, {"image": x})
    t = program.tensors
    codes = x.flatten(1, 2).to(torch.int64) - 128
    row = int(torch.randint(m, (1,), generator=g))
    out_row = int(t["at"][row]) if "at" in t else row
    acc = int((codes[0, row] * t["w"][0].to(torch.int64)).sum()) + int(t["b"][0])
    if epilogue == "accumulator":
        assert int(y[0, row, 0]) == acc
        return
    value = math.floor(Fraction(acc * int(t["m"][0]), 2**shift) + Fraction(1, 2))
    low, high = program.buffers["y"].limits
    if epilogue == "residual":
        value += int(t["r"][out_row, 0])
    elif program.operations[1].symmetric:
        low = -high
    assert int(y[0, out_row, 0]) == min(max(value, low), high)
    if "at" in t:
        kept = [r for r in range(m + 3) if r not in t["at"].tolist()]
        assert torch.equal(y[1, kept], t["r"][kept])


@few
@given(seed=seeds, bits=st.sampled_from([8, 10, 12]), out_bits=st.sampled_from([8, 16]), shift=st.integers(20, 45))
def test_table(seed, bits, out_bits, shift):
    g = seeded(seed)
    program = linear_program(g, 3, 40, 9, "table", bits=bits, out_bits=out_bits, shift=shift)
    x = image(g, program)
    y = both(program, {"image": x})
    t, half = program.tensors, 1 << (bits - 1)
    for row, column in ((0, 0), (2, 8)):
        codes = x[1, 0, row].to(torch.int64) - 128
        acc = int((codes * t["w"][column].to(torch.int64)).sum()) + int(t["b"][column])
        index = math.floor(Fraction(acc * int(t["m"][column]), 2**shift) + Fraction(1, 2))
        assert int(y[1, row, column]) == int(t["t"][min(max(index, -half), half - 1) + half])


def test_requantization_rounds_half_up():
    acc = torch.tensor([-3, -1, 1, 3, 5])
    half = torch.tensor([1])  # times 1 / 2
    for requantize in (reference.requantize, portable.requantize):
        assert requantize(acc, half, 1).tolist() == [-1, 0, 1, 2, 3]
        assert requantize(acc << 20, half << 30, 51).tolist() == [-1, 0, 1, 2, 3]


@pytest.mark.parametrize(
    "pairs", [range(1 << 30, 1 << 32, 40_000_003), [*(((i + 64) << 24) for i in range(192)), (1 << 32) - 1]]
)
def test_rsqrt(pairs):
    for n in pairs:
        root = rsqrt(n)
        assert 1 << 30 <= root < 1 << 31
        assert abs(root / (2.0**46 / math.sqrt(n)) - 1) < 2.0**-27


def norm_of(g, c, bits, out_bits, kind, *, shift=12, eps=None, load_rows=None, rows=4):
    """A LayerNorm program over rows of one kind, with scales that use the output's range."""
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    dtype = torch.int16 if bits == 16 else torch.int32
    table = {
        "uniform": lambda: integers(g, low, high, rows, c),
        "small": lambda: integers(g, -2, 2, rows, c),
        "constant": lambda: integers(g, low, high, rows, 1).expand(rows, c),
        "ends": lambda: torch.where(torch.rand(rows, c, generator=g) < 0.5, low, high),
        "top": lambda: torch.full((rows, c), high) - (torch.rand(rows, c, generator=g) < 0.01).long(),
        "outlier": lambda: torch.cat([torch.full((rows, 1), high), integers(g, -9, 9, rows, c - 1)], 1),
    }[kind]().to(dtype)
    channels = c if load_rows is None else c * load_rows.shape[1]
    limit = 1 << (out_bits - 1)
    # gamma / s_out up to a quarter of the output's range
    factor = (torch.rand(channels, generator=g, dtype=torch.float64) - 0.5) * limit / 2
    m = torch.round(factor * math.sqrt(channels) * 2 ** (shift + 3))
    shift_down = max(0, math.ceil(math.log2(float(m.abs().max()) / 2**31 + 1e-9)) + 1)
    shift, m = shift - shift_down, torch.round(m / 2**shift_down)
    top = min(1 << 30, limit << shift) - (1 << (shift - 1)) - 1
    bias = integers(g, -top, top, channels) + (1 << (shift - 1))
    eps = int(torch.randint(1, 1 << 20, (1,), generator=g)) if eps is None else eps
    program = norm_program(
        table, 4, bits, multiplier=m.to(torch.int32), bias=bias.to(torch.int32), shift=shift, eps=eps,
        out_bits=out_bits, load_rows=load_rows,
    )  # fmt: skip
    return program, m, bias, shift, eps


KINDS = ["uniform", "small", "constant", "ends", "top", "outlier"]


@settings(max_examples=150, deadline=None)
@given(
    seed=seeds, c=st.one_of(st.sampled_from([16, 192, 768, 4096]), st.integers(2, 4096)),
    bits=st.sampled_from([16, 24]), out_bits=st.sampled_from([8, 16]), kind=st.sampled_from(KINDS),
    parts=st.sampled_from([0, 1, 4]), eps=st.sampled_from([None, 1, 1 << 60]),
)  # fmt: skip
def test_layer_norm(seed, c, bits, out_bits, kind, parts, eps):
    """Equal bits, and within one code of float64: of any variance, any width, and rows of equal values."""
    g = seeded(seed)
    at = integers(g, 0, 3, 5, parts, dtype=torch.int32) if parts else None
    program, m, bias, shift, eps = norm_of(g, c, bits, out_bits, kind, eps=eps, load_rows=at)
    index = integers(g, 0, 3, 2, 4)
    y = both(program, {"index": index})
    x = program.tensors["table"].double()[index]
    if at is not None:
        x = x[:, at.long()].flatten(2)
    d = x - x.mean(2, keepdim=True)
    e = d.square().sum(2, keepdim=True) + eps
    scaled = d / torch.sqrt(e) * m / 8 / 2**shift
    expected = torch.floor(scaled + bias / 2**shift).clamp(*program.buffers["y"].limits)
    # e is floored, which its root sees halved; the root has an error of 2^-27
    doubt = scaled.abs() * (0.5 / (e - 1).clamp(min=1) + 2**-27)
    assert ((y.double() - expected).abs() <= 1 + doubt).all()
    if kind in ("uniform", "ends") and eps < 1 << 30 and out_bits == 8:
        assert (y.double() != expected).double().mean() < 0.01


def test_layer_norm_of_equal_values_is_beta():
    g = seeded(0)
    for bits in (16, 24):
        program, _, bias, shift, _ = norm_of(g, 768, bits, 8, "constant", eps=1)
        y = both(program, {"index": torch.tensor([[0, 1, 2, 3]])})
        expected = (bias >> shift).clamp(-128, 127).to(torch.int8)
        assert torch.equal(y, expected.expand_as(y))


def test_leading_pairs_at_powers_of_two():
    values = sorted({x for i in range(62) for x in ((1 << i) - 1, 1 << i, (1 << i) + 1) if 1 <= x < 1 << 62})
    e = torch.tensor(values)
    exact = torch.tensor([(64 - x.bit_length()) // 2 for x in values])
    assert torch.equal(portable._leading_pairs(e), exact)
    assert torch.equal((64 - reference.bit_length(e)) // 2, exact)


@few
@given(
    seed=seeds, windows=st.sampled_from([1, 4]), heads=st.integers(1, 3), n=st.integers(1, 20),
    d=st.sampled_from([4, 16, 32]), method=st.sampled_from(["intflash", "intflash_p8"]), biased=st.booleans(),
    mask=st.sampled_from(["none", "windows", "padding"]), per_head=st.booleans(),
)  # fmt: skip
def test_attention(seed, windows, heads, n, d, method, biased, mask, per_head):
    g = seeded(seed)
    windows = 1 if mask == "padding" else windows
    program = attention_program(g, windows, heads, n, d, method, biased=biased, mask=mask, per_head=per_head)
    inputs = {"image": image(g, program, batch=3)}
    if mask == "padding":
        inputs["keep"] = torch.rand(3, n, generator=g) < 0.8
    both(program, inputs)


@few
@given(
    seed=seeds, bits=st.sampled_from([16, 24]), out_bits=st.sampled_from([8, 16, 24]), shift=st.integers(10, 50),
    rows=st.integers(1, 200),
)  # fmt: skip
def test_pool(seed, bits, out_bits, shift, rows):
    g = seeded(seed)
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    table = integers(g, low, high, 5, 7, dtype=torch.int16 if bits == 16 else torch.int32)
    first = int(torch.randint(rows, (1,), generator=g))
    multiplier = int(torch.randint((1 << 31) - 1, (1,), generator=g))
    program = pool_program(table, rows, bits, first, rows, multiplier, shift, out_bits)
    index = integers(g, 0, 4, 2, rows)
    y = both(program, {"index": index})
    total = int(table.to(torch.int64)[index[1, first:], 3].sum())
    low, high = program.buffers["y"].limits
    exact = math.floor(Fraction(total * multiplier, 2**shift) + Fraction(1, 2))
    assert int(y[1, 0, 3]) == min(max(exact, low), high)


@few
@given(seed=seeds, bits=st.sampled_from([16, 24]), tables=st.integers(1, 3), rows=st.booleans())
def test_embedding(seed, bits, tables, rows):
    g = seeded(seed)
    buffers = {"y": Buffer((6, 5), bits)}
    low, high = buffers["y"].limits
    constants = {f"t{i}": integers(g, low, high, 4, 5, dtype=buffers["y"].dtype) for i in range(tables)}
    if rows:
        constants["rows"] = integers(g, low, high, 6, 5, dtype=buffers["y"].dtype)
    names = tuple(f"i{i}" for i in range(tables))
    op = Embedding("embedding", names, tuple(f"t{i}" for i in range(tables)), "y", "rows" if rows else None)
    program = single([op], [Input(name, "index", (6,), 4) for name in names], buffers, constants, "y")
    inputs = {name: integers(g, 0, 3, 2, 6) for name in names}
    y = both(program, inputs)
    total = sum(int(constants[f"t{i}"][int(inputs[f"i{i}"][1, 2]), 4]) for i in range(tables))
    total += int(constants["rows"][2, 4]) if rows else 0
    assert int(y[1, 2, 4]) == min(max(total, low), high)


@few
@given(
    seed=seeds,
    scale=st.floats(1e-3, 10),
    zero=st.integers(-128, 127),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def test_float_patches(seed, scale, zero, dtype):
    """Ties, values past the range, infinity and NaN of both signs."""
    g = seeded(seed)
    op = Patches("patches", "image", "y", (2, 3), scale, zero)
    program = single([op], [Input("image", "float", (2, 4, 6))], {"y": Buffer((4, 12), 8)}, {}, "y")
    x = torch.randn(3, 2, 4, 6, generator=g) * 50
    x[0, 0, 0, :4] = torch.tensor([float("inf"), float("-inf"), float("nan"), -float("nan")])
    x[0, 0, 1] = torch.arange(6) + 0.5
    y = both(program, {"image": x.to(dtype)})
    assert y[0, 0, :3].tolist() == [127, -128, 127] and int(y[0, 1, 0]) == -128


def test_patch_order_is_that_of_a_convolution():
    inputs, buffers, _ = codes_input(1, 1)
    op = Patches("patches", "image", "y", (2, 3))
    program = single([op], [Input("image", "uint8", (2, 4, 6))], {"y": Buffer((4, 12), 8)}, {}, "y")
    x = torch.arange(48, dtype=torch.uint8).reshape(1, 2, 4, 6)
    y = both(program, {"image": x})
    expected = torch.nn.functional.unfold(x.float(), (2, 3), stride=(2, 3)).transpose(1, 2)
    assert torch.equal(y.float() + 128, expected)


def test_reference_asserts_its_widths():
    """An accumulator past int32, which `Program.check` refuses, does not pass the reference unseen."""
    g = seeded(0)
    program = linear_program(g, 1, 16, 2, "accumulator")
    program.tensors["b"].fill_((1 << 31) - 1)
    program.tensors["w"].fill_(127)
    with pytest.raises(AssertionError, match="leaves int32"):
        reference.run(program, {"image": torch.full((1, 1, 1, 16), 255, dtype=torch.uint8)})
