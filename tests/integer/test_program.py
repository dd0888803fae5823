"""`Program.check`: every bound of docs/numerics.md at its edge and one past it, and what is no program."""

import dataclasses
import math

import pytest
import torch

from integer.programs import (
    attention_program,
    integers,
    linear_program,
    norm_program,
    pool_program,
    seeded,
)
from intflash import InputError
from intflash.integer.program import Buffer, Input, Program


def changed(program: Program, at: int, **fields) -> Program:
    """The program with other fields of one operation."""
    operations = list(program.operations)
    operations[at] = dataclasses.replace(operations[at], **fields)
    return dataclasses.replace(program, operations=tuple(operations))


def with_tensor(program: Program, name: str, x: torch.Tensor) -> Program:
    return dataclasses.replace(program, tensors=program.tensors | {name: x})


def refused(program: Program, message: str) -> None:
    with pytest.raises(InputError, match=message):
        program.check()


def test_linear_bound_at_its_edge():
    """K * 128 * 127 + max |bias| < 2^31."""
    k = 16
    program = linear_program(seeded(0), 2, k, 3, "codes")
    edge = (1 << 31) - 1 - k * 128 * 127
    with_tensor(program, "b", torch.tensor([0, -edge, edge], dtype=torch.int32)).check()
    refused(
        with_tensor(program, "b", torch.tensor([0, 0, edge + 1], dtype=torch.int32)),
        r"linear: expected K \* 128 \* 127 \+ max \|bias\| < 2\^31, got K = 16",
    )
    k = 132_104  # 128 * 127 * K is 640 below 2^31
    assert k * 128 * 127 < 1 << 31 <= (k + 1) * 128 * 127
    linear_program(seeded(0), 1, k, 1, "codes", top_bias=0)
    with pytest.raises(InputError, match="K = 132105"):
        linear_program(seeded(0), 1, k + 1, 1, "codes", top_bias=0)


def test_linear_is_refused():
    program = linear_program(seeded(0), 2, 16, 3, "residual", out_bits=16, mapped=True)
    for fields, message in (
        ({"shift": 0}, r"a shift in \[1, 62\], got 0"),
        ({"shift": 63}, "a shift in"),
        ({"epilogue": "relu"}, "an epilogue among"),
        ({"x": "y"}, "to be written before it is read"),
        ({"weight": "none"}, "a tensor of the program, got none"),
        ({"out": ("z",)}, "a buffer, got z"),
        ({"epilogue": "codes"}, "a residual with its epilogue only"),
        ({"residual": "w"}, "w of torch.int16"),
    ):
        refused(changed(program, 1, **fields), f"linear: expected .*{message}")
    t = program.tensors
    refused(with_tensor(program, "w", torch.full_like(t["w"], -128)), "weights from -127, got -128")
    refused(with_tensor(program, "m", -t["m"] - 1), "multipliers of at least 0")
    refused(with_tensor(program, "m", t["m"][:2]), r"m of shape \(3,\), got \(2,\)")
    refused(with_tensor(program, "b", t["b"].float()), "b of torch.int32, got torch.float32")
    refused(with_tensor(program, "at", t["at"] + 5), "a map of rows below 5")
    refused(with_tensor(program, "at", torch.zeros(2, dtype=torch.int32)), "names each row once")
    wide = linear_program(seeded(0), 2, 16, 3, "residual", out_bits=24)
    refused(with_tensor(wide, "r", wide.tensors["r"] * 0 + (1 << 23)), r"r in \[-8388608, 8388607\]")
    table = linear_program(seeded(0), 2, 16, 3, "table", bits=10)
    refused(changed(table, 1, bits=9), r"a table of \(8, 10, 12\) bits, got 9")
    refused(changed(table, 1, bits=8), r"t of shape \(256,\), got \(1024,\)")
    accumulator = linear_program(seeded(0), 2, 16, 3, "accumulator")
    refused(changed(accumulator, 1, multiplier="b"), "no multiplier for accumulators")


def norm(channels=16, bits=16, **options):
    g = seeded(0)
    table = integers(g, -100, 100, 2, channels, dtype=torch.int16 if bits == 16 else torch.int32)
    values = dict(
        multiplier=integers(g, 1 - (1 << 31), (1 << 31) - 1, channels, dtype=torch.int32),
        bias=torch.full((channels,), (1 << 30) - 1, dtype=torch.int32), shift=24, eps=1 << 60,
    )  # fmt: skip
    return norm_program(table, 2, bits, **(values | options))


def test_layer_norm_bounds():
    """The constructions are at the edges; one past each is refused."""
    program = norm()
    norm(2)
    norm(1 << 14)
    with pytest.raises(InputError, match="norm: expected from 2 to 16384 channels, got 16385"):
        norm((1 << 14) + 1)
    with pytest.raises(InputError, match="from 2 to 16384 channels, got 1"):
        norm(1)
    for fields, message in (
        ({"eps": 0}, r"eps in \[1, 2\^60\]"), ({"eps": (1 << 60) + 1}, "eps in"), ({"eps": 1.0}, "eps of the type"),
        ({"shift": 0}, "a shift up to 24"), ({"shift": 25}, "a shift up to 24"), ({"out": "x"}, "written once"),
    ):  # fmt: skip
        refused(changed(program, 1, **fields), message)
    refused(with_tensor(program, "b", program.tensors["b"] + 1), r"\|b\| < 2\^30, got 1073741824")
    least = torch.full_like(program.tensors["m"], -(1 << 31))
    with_tensor(program, "m", least + 1).check()
    refused(with_tensor(program, "m", least), r"\|m\| < 2\^31, got 2147483648")


def test_widest_variance_stays_in_62_bits():
    """Rows of both ends of a wide stream, the most channels and the largest eps: the sums that bound the definition."""
    from intflash.integer import portable, reference

    channels = 1 << 14
    half = torch.tensor([-(1 << 23), (1 << 23) - 1], dtype=torch.int32).repeat(channels // 2)
    table = torch.stack([half, half.flip(0)])
    program = norm_program(
        table, 2, 24, multiplier=torch.full((channels,), (1 << 31) - 1, dtype=torch.int32),
        bias=torch.full((channels,), -(1 << 30) + 1, dtype=torch.int32), shift=1, eps=1 << 60,
    )  # fmt: skip
    inputs = {"index": torch.tensor([[0, 1]])}
    assert torch.equal(reference.run(program, inputs)["y"], portable.run(program, inputs)["y"])


def test_attention_bounds():
    program = attention_program(seeded(0), 1, 2, 5, 4, "intflash", biased=True, mask="none", per_head=True)
    attention_program(seeded(0), 1, 1, 3, 256, "intflash", biased=False, mask="none", per_head=False)
    with pytest.raises(InputError, match="attention: expected head_dim of at most 256, got 257"):
        attention_program(seeded(0), 1, 1, 3, 257, "intflash", biased=False, mask="none", per_head=False)
    for fields, message in (
        ({"method": "qflash"}, "a method among"),
        ({"q_scale": (0.0,)}, "scales q_scale that are finite and > 0"),
        ({"q_scale": (0.1, 0.1, 0.1)}, "1 or 2 scales q_scale"),
        ({"out_scale": (math.nan,)}, "out_scale"),
        ({"sm_scale": -1.0}, "a softmax scale"),
        ({"mask": "image"}, "an input of kind mask"),
        ({"bias": "w"}, "w of torch.int32"),
        ({"k": "x"}, "'x' as Buffer"),
    ):
        refused(changed(program, 2, **fields), message)


def test_pool_bounds():
    """rows * 2^(bits - 1) < 2^31."""
    g = seeded(0)
    table = integers(g, -5, 5, 2, 3, dtype=torch.int32)
    pool_program(table, 300, 24, 0, 255, (1 << 31) - 1, 62, 24)
    with pytest.raises(InputError, match=r"pool: expected rows \* 2\^\(bits - 1\) < 2\^31, got 256 rows of 24 bits"):
        pool_program(table, 300, 24, 0, 256, 1, 1, 24)
    program = pool_program(table, 9, 24, 0, 9, 1, 1, 24)
    refused(changed(program, 1, stop=10), "rows within 9")
    refused(changed(program, 1, multiplier=1 << 31), "a multiplier < 2")
    refused(changed(program, 1, shift=63), "a shift in")


def test_what_is_no_program_is_refused():
    program = linear_program(seeded(0), 2, 16, 3, "codes")
    refused(dataclasses.replace(program, outputs=()), "expected outputs, got none")
    refused(dataclasses.replace(program, result="list"), "the result 'tensor' or 'dict'")
    refused(dataclasses.replace(program, operations=program.operations * 2), "operations of different names")
    refused(dataclasses.replace(program, inputs=(Input("image", "sound", (1,)),)), "a kind of input")
    refused(dataclasses.replace(program, inputs=(Input("image", "float", (1, 2)),)), "image: expected 3 axes")
    refused(dataclasses.replace(program, inputs=(Input("i", "index", (2,)),)), "an index with a bound")
    refused(dataclasses.replace(program, buffers=program.buffers | {"x": Buffer((2, 16), 9)}), "x: expected bits among")
    refused(dataclasses.replace(program, buffers=program.buffers | {"x": Buffer((0, 16), 8)}), "x: expected a shape")
    refused(changed(program, 0, patch=(1, 5)), "a patch that divides 2 x 16")
    refused(changed(program, 0, scale=math.inf), "a scale that is finite")
    refused(changed(program, 0, zero_point=128), "an int8 zero point")


def test_last_uses():
    program = attention_program(seeded(0), 1, 2, 5, 4, "intflash", biased=False, mask="none", per_head=False)
    assert program.last_uses() == {"x": 1, "q": 2, "k": 2, "v": 2, "y": 3}
    assert list(program.constants(program.operations[1])) == ["w", "b", "m"]
