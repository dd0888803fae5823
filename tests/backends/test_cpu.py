"""The native CPU kernels: every instruction set has the reference's bits."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from cpu_problems import CASES, ISAS, assert_same_bits, name_of, problem_of
from hypothesis import given, settings
from hypothesis import strategies as st

import intflash
from intflash import Recipe
from intflash.backends import cpu, reference
from intflash.call import prepare
from intflash.methods import get_method
from intflash.numerics.exp import ABSENT

pytestmark = pytest.mark.skipif(not ISAS, reason="the native module was not built")


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_every_instruction_set_has_the_bits_of_the_reference(case):
    problem = problem_of(case)
    expected = reference.BACKEND.run(problem)
    for isa in ISAS:
        assert_same_bits(cpu.run(problem, isa=isa, threads=1), expected)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_codes_of_every_kind(isa, data):
    """Ties, extreme codes and scales from dead to saturated, against the reference."""
    pick = data.draw
    method = pick(st.sampled_from(list(cpu.P_MAX)))
    nq, nk, d = pick(st.integers(1, 40)), pick(st.integers(1, 300)), pick(st.integers(1, 70))
    levels = pick(st.sampled_from([1, 2, 127]))
    g = torch.Generator().manual_seed(pick(st.integers(0, 2**20)))
    scale = 2.0 ** pick(st.floats(-12, 2))

    def codes(n):
        return torch.randint(-levels, levels + 1, (1, 2, n, d), generator=g).mul(127 // levels).to(torch.int8)

    tensors = [intflash.QTensor(codes(n), s) for n, s in ((nq, scale), (nk, scale), (nk, 0.02))]
    out_dtype = pick(st.sampled_from([torch.int8, torch.int16, torch.float32]))
    out_scale = pick(st.sampled_from(["bound", 1e-9, 1e-4, 1.0])) if out_dtype != torch.float32 else None
    problem = prepare(*tensors, method=method, out_dtype=out_dtype, out_scale=out_scale, return_lse=True)[0]
    assert_same_bits(cpu.run(problem, isa=isa, threads=1), reference.BACKEND.run(problem))


def with_scores(target):
    """Codes of three queries and of keys ``[..., N]`` whose q . k is the target, to 80,771."""
    high, low = target // 127, target % 127
    k = [(high - 127 * channel).clamp(0, 127) for channel in range(5)] + [low]
    return torch.tensor([127] * 5 + [1]).expand(*target.shape[:-1], 3, 6), torch.stack(k, -1)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("method", list(cpu.P_MAX))
def test_depths_of_every_width(isa, method):
    """Differences of scores to 80,000, units of a score around those at which 16 bits hold every live one."""
    g = torch.Generator().manual_seed(0)
    target = torch.randint(0, 80_000, (4, 1, 200), generator=g) + torch.arange(4)[:, None, None]
    q, k = with_scores(target)
    v = torch.randint(-127, 128, (4, 1, 200, 40), generator=g)
    keep = torch.rand(4, 1, 1, 200, generator=g) > 0.3
    units = (1.2e-4, 1.44e-4, 1.45e-4, 1.5e-4, 2.19e-4, 2.198e-4, 2.2e-4, 2.4e-4, 7e-4, 1.9e-3, 2e-3, 3e-3)
    if method == "intflash_online":  # the borders of 24 fraction bits, of 16-bit differences and of unshifted ones
        units = (3.48e-5, 3.49e-5, 1.37e-4, 1.373e-4, 1.374e-4, 1.38e-4, 2.4e-4, 7e-4, 2.23e-3, 2.24e-3, 3e-3)
    for octaves, options in itertools.product(units, ({}, {"attn_mask": keep}, {"is_causal": True})):
        unit = octaves / 1.4426950408889634
        tensors = [intflash.QTensor(x.to(torch.int8), s) for x, s in ((q, unit), (k, 1.0), (v, 0.02))]
        problem = prepare(*tensors, method=method, scale=1.0, return_lse=True, out_scale="bound", **options)[0]
        assert_same_bits(cpu.run(problem, isa=isa, threads=1), reference.BACKEND.run(problem))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("method", ["intflash", "intflash_p8"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_short_rows(isa, method, data):
    """To 256 keys, where AMX and 512-bit vectors have code of their own: strips and tiles of every size."""
    pick = data.draw
    nq, nk = pick(st.integers(1, 150)), pick(st.sampled_from([1, 15, 16, 17, 49, 63, 64, 65, 130, 197, 255, 256, 257]))
    d, value_dim = pick(st.sampled_from([32, 64, 7, 36, 96, 256])), pick(st.sampled_from([16, 32, 64, 48, 80, 130]))
    g = torch.Generator().manual_seed(pick(st.integers(0, 2**20)))
    q, k, v = (torch.randn(2, h, n, c, generator=g) for h, n, c in ((4, nq, d), (2, nk, d), (2, nk, value_dim)))
    layout = pick(st.sampled_from(["heads apart", "heads side by side", "channels apart"]))
    if layout != "heads apart":
        axes = (1, 2) if layout == "heads side by side" else (2, 3)
        q, k, v = (x.transpose(*axes).contiguous().transpose(*axes) for x in (q, k, v))
    options = {
        "return_lse": pick(st.booleans()),
        "recipe": Recipe(pick(st.sampled_from(["tensor", "head", "token"])), "head", "head"),
    }
    mask = pick(st.sampled_from(["none", "none", "keep", "bias"]))
    if mask == "keep":
        options["attn_mask"] = torch.rand(1, 1, nq, nk, generator=g) > 0.3
    elif mask == "bias":
        options["bias"] = torch.randn(1, 4, nq, nk, generator=g)
    out = pick(st.sampled_from([torch.int8, torch.int16, torch.float32, torch.bfloat16]))
    if out == torch.int8:
        options["out_scale"] = "bound"
    problem = prepare(q, k, v, method=method, out_dtype=out, enable_gqa=True, **options)[0].quantized()
    assert_same_bits(cpu.run(problem, isa=isa, threads=pick(st.sampled_from([1, 2]))), reference.BACKEND.run(problem))


LONG_ROWS = (257, 319, 320, 321, 512, 1023, 1024, 1025, 1089, 1216, 1281, 2047, 2048, 2250, 2561)


@pytest.mark.parametrize("method", list(cpu.P_MAX))
@pytest.mark.parametrize("nk", [x if x in (257, 1025) else pytest.param(x, marks=pytest.mark.full) for x in LONG_ROWS])
def test_long_rows(method, nk):
    """Around the borders of chunks and stages of keys and of strips of queries; short, narrow and shifted depths."""
    g = torch.Generator().manual_seed(nk)
    rows, units = (8, 9, 16, 17, 33, 64), (2.0**-12, 2.0**-20, 0.625)
    for nq, d, value_dim, unit in itertools.product(rows, (64, 17), (64, 33, 16), units):
        q, k = (torch.randint(-127, 128, (1, 2, n, d), generator=g).to(torch.int8) for n in (nq, nk))
        k[:, :, -1] = q[:, :, -1]  # the last row's maximum is the last key's; all scores of the first row are negative
        k[..., 0], q[:, :, 0], q[:, :, 0, 0] = -k[..., 0].abs().clamp(min=1), 0, 1
        v = torch.randint(-127, 128, (1, 2, nk, value_dim), generator=g).to(torch.int8)
        tensors = [intflash.QTensor(x, s) for x, s in ((q, unit), (k, 1.0), (v, 0.02))]
        problem = prepare(*tensors, method=method, scale=1.0, out_dtype=torch.int16, return_lse=True)[0]
        assert_same_bits(cpu.run(problem, threads=1), reference.BACKEND.run(problem))


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_biases_and_masks_of_every_kind(isa, data):
    """Broadcast, strided, saturated and absent ones, rows without keys, scales from dead to saturated."""
    pick = data.draw
    method = pick(st.sampled_from(list(cpu.P_MAX)))
    nq, nk, d = pick(st.integers(1, 60)), pick(st.integers(1, 270)), pick(st.sampled_from([1, 32, 64, 70]))
    g = torch.Generator().manual_seed(pick(st.integers(0, 2**20)))
    scale = 2.0 ** pick(st.floats(-14, 2))
    q, k, v = (torch.randint(-127, 128, (2, 2, n, d), generator=g).to(torch.int8) for n in (nq, nk, nk))
    tensors = [intflash.QTensor(x, s) for x, s in ((q, scale), (k, scale), (v, 0.02))]
    options = {}

    def broadcast(x):  # along any axes, or with the rows innermost in memory
        for axis in range(4):
            if pick(st.booleans()):
                x = x.narrow(axis, 0, 1)
        return x.transpose(2, 3).contiguous().transpose(2, 3) if pick(st.booleans()) else x

    if pick(st.booleans()):
        bias = torch.randn(2, 2, nq, nk, generator=g) * pick(st.sampled_from([1.0, 100.0, 1e6]))
        if pick(st.booleans()):
            bias[torch.rand(bias.shape, generator=g) > 0.7] = float("-inf")
        bias = broadcast(bias)
        options["bias"] = intflash.quantize_bias(bias) if pick(st.booleans()) else bias
    if pick(st.booleans()) or not options:
        options["attn_mask"] = broadcast(
            torch.rand(2, 2, nq, nk, generator=g) > pick(st.sampled_from([0.1, 0.5, 0.99]))
        )
    problem = prepare(
        *tensors, method=method, out_dtype=torch.int8, out_scale="bound", return_lse=True, check_finite=False, **options
    )[0]
    assert_same_bits(cpu.run(problem, isa=isa, threads=1), reference.BACKEND.run(problem))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("method", list(cpu.P_MAX))
@pytest.mark.parametrize("sign", [1, -1])
def test_biased_scores_at_the_edge_of_32_bits(isa, method, sign):
    """Scores of 63 octaves and biases with which all present keys lie some 112 above or below 0; absent ones beside."""
    largest = 16 * 127**2
    edge = (2**31 - 2**28 - largest * 2**12) // 16
    keep = torch.rand(1, 1, 20, 60, generator=torch.Generator().manual_seed(0)) > 0.3
    keep[:, :, 3] = False
    q = torch.full((1, 1, 20, 16), 127)
    k = torch.full((1, 1, 60, 16), 127 * sign)
    k[0, 0, ::4, 0] -= sign * torch.arange(15)
    v = torch.randint(-127, 128, (1, 1, 60, 16), generator=torch.Generator().manual_seed(1))
    tensors = [intflash.QTensor(x.to(torch.int8), s) for x, s in ((q, 1.0), (k, 1.0), (v, 0.02))]
    scale = 2.0**-12 / 1.4426950408889634
    for beyond in (-1, 0, 1, 2**24, 2**26, 2**31 - 1 - edge):
        for direction, options in itertools.product((1, -1), ({}, {"attn_mask": keep})):
            bias = torch.full((1, 1, 1, 60), direction * (edge + beyond)).to(torch.int32)
            bias[..., 5::7] += -direction * torch.arange(8, dtype=torch.int32) * 2**19
            bias[..., ::9] = ABSENT
            # unchecked, so that saturated ones are computed too
            options |= dict(scale=scale, bias=bias, return_lse=True, out_scale="bound", check_finite=False)
            problem = prepare(*tensors, method=method, **options)[0]
            assert_same_bits(cpu.run(problem, isa=isa, threads=1), reference.BACKEND.run(problem))
            bits = get_method(method).bias_fraction_bits
            if bits != 20:
                coarse = (bias >> (20 - bits)).masked_fill(bias == ABSENT, ABSENT)
                problem = replace(problem, bias=coarse, bias_fraction_bits=bits)
                assert_same_bits(cpu.run(problem, isa=isa, threads=1), reference.BACKEND.run(problem))


@pytest.mark.parametrize("isa", ISAS)
def test_every_step_of_online(isa):
    """Keys some 1/7 step apart, past the last step; their maximum at a whole octave and beside it."""
    q, k = with_scores(torch.arange(7400).flip(0)[None, None])
    v = torch.randint(-127, 128, (1, 1, 7400, 16), generator=torch.Generator().manual_seed(0))
    unit = 1 / 784 / 1.4426950408889634
    tensors = [intflash.QTensor(x.to(torch.int8), s) for x, s in ((q, unit), (k, 1.0), (v, 0.02))]
    to_octave = -round(7399 / 784 * 2**20)
    for bias in (None, *(torch.full((1, 1, 3, 7400), to_octave + i, dtype=torch.int32) for i in (-1, 0, 1))):
        options = dict(bias=bias, return_lse=True, out_dtype=torch.float32)
        problem = prepare(*tensors, method="intflash_online", scale=1.0, **options)[0]
        assert_same_bits(cpu.run(problem, isa=isa, threads=1), reference.BACKEND.run(problem))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("c", range(1004, 1012))
def test_differences_of_online_past_16_bits(isa, c):
    """Below a maximum at a whole octave; c in 2^-24 of 16/7 octaves: from 1009 on 16 bits hold every live one."""
    top = 10 * (7 << 20) // c
    below = torch.cat([torch.arange(10), torch.arange(65_500, 65_650), torch.arange(72_000, top + 1, 20)])
    (q, k), n = with_scores(top - below[None, None]), len(below)
    v = torch.randint(-127, 128, (1, 1, n, 40), generator=torch.Generator().manual_seed(0))
    unit = c * 2.0**-24 * 16 / 7 / 1.4426950408889634
    tensors = [intflash.QTensor(x.to(torch.int8), s) for x, s in ((q, unit), (k, 1.0), (v, 0.02))]
    keep = (torch.arange(n) % 3 != 1).expand(1, 1, 3, n)
    for mask in (None, keep):
        options = dict(attn_mask=mask, return_lse=True, out_dtype=torch.float32)
        problem = prepare(*tensors, method="intflash_online", scale=1.0, **options)[0]
        assert_same_bits(cpu.run(problem, isa=isa, threads=1), reference.BACKEND.run(problem))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("method", list(cpu.P_MAX))
@pytest.mark.parametrize("nk", [256, 65_536])
@pytest.mark.parametrize("sign", [1, -1])
def test_largest_sums(isa, method, nk, sign):
    """Keys of one score: l and the digit sums at their bounds; of 256 keys 32 bits hold both digits' sum."""
    q = intflash.QTensor(torch.full((1, 1, 2, 256), 127, dtype=torch.int8), 0.1)
    k = intflash.QTensor(torch.full((1, 1, nk, 256), -127, dtype=torch.int8), 0.1)
    v = intflash.QTensor(torch.full((1, 1, nk, 35), 127 * sign, dtype=torch.int8), 0.1)
    out = cpu.run(prepare(q, k, v, method=method, out_dtype=torch.int16)[0], isa=isa).out
    assert (out == 32767 * sign).all()


def _of_octaves(octaves, values):
    """A problem of intflash_bfp whose octave and value of each key are given."""
    q, k, v = (torch.zeros(1, 1, n, 16, dtype=torch.int8) for n in (2, len(octaves), len(octaves)))
    q[..., 0] = 1
    k[..., 0] = octaves.to(torch.int8)
    v += values.to(torch.int8)[:, None]
    q, k, v = (intflash.QTensor(x, 1.0) for x in (q, k, v))
    return prepare(q, k, v, method="intflash_bfp", scale=math.log(2.0), out_dtype=torch.float32, return_lse=True)[0]


def _assert_every_set_has_the_bits(problem):
    expected = reference.BACKEND.run(problem)
    for isa in ISAS:
        assert_same_bits(cpu.run(problem, isa=isa), expected)


@pytest.mark.parametrize("nk", [65_536, 65_537, pytest.param(131_072, marks=pytest.mark.full), 131_073])
@pytest.mark.parametrize("value", [127, -127])
def test_largest_sums_of_many_keys(nk, value):
    """Sums of 32 bits at their bounds, and of 64 bits; a few keys have no value."""
    values = torch.full((nk,), value)
    _assert_every_set_has_the_bits(_of_octaves(torch.zeros(nk), values))
    values[::1000] = 0
    _assert_every_set_has_the_bits(_of_octaves((values == 0) * 3, values))


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_keys_without_a_value_of_any_octave(data):
    """Runs of keys of one octave with and without a value, of sequences that are rounded and that are dithered."""
    octave = st.sampled_from([-127, -60, -17, -9, -1, 0, 1, 9, 24, 40, 127])
    runs = data.draw(st.lists(st.tuples(octave, st.booleans(), st.integers(1, 200)), min_size=1, max_size=16))
    octaves = torch.cat([torch.full((n,), x) for x, _, n in runs])
    values = torch.randint(1, 128, octaves.shape, generator=torch.Generator().manual_seed(len(octaves)))
    values *= torch.cat([torch.full((n,), has_value) for _, has_value, n in runs])
    problem = _of_octaves(octaves, values)
    _assert_every_set_has_the_bits(replace(problem, out_dtype=data.draw(st.sampled_from([torch.int8, torch.float32]))))


@pytest.mark.parametrize("isa", ISAS)
def test_dither_of_every_depth(isa):
    """Every depth at which p16 may not be 0, 1/256 octave apart. A channel has the sum of p over 1/2 octave."""
    depth = torch.arange(6500).repeat(4)[torch.randperm(26_000, generator=torch.Generator().manual_seed(0))]
    q, k = with_scores((7000 - depth).view(1, 1, -1))
    v = torch.nn.functional.one_hot(depth // 128).view(1, 1, 26_000, -1)
    tensors = [intflash.QTensor(x.to(torch.int8), s) for x, s in ((q, 2.0**-8), (k, 1.0), (v, 1.0))]
    problem = prepare(*tensors, method="intflash_bfp", scale=math.log(2.0), out_dtype=torch.float32, return_lse=True)[0]
    assert_same_bits(cpu.run(problem, isa=isa, threads=1), reference.BACKEND.run(problem))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("nk", [200, 518, 519, 700])
@pytest.mark.parametrize("out_scale", ["bound", 0.0371, 0.1 / 3, 7.0, 1e-9, 1e9])
def test_sums_at_24_bits(isa, nk, out_scale):
    """The rows of a block: up to 518 keys of one score have short sums, the last row far less."""
    g = torch.Generator().manual_seed(nk)
    q = torch.zeros(1, 1, 20, 32, dtype=torch.int8)
    q[:, :, -1] = 127
    k, v = (torch.randint(-127, 128, (1, 1, nk, 32), generator=g, dtype=torch.int8) for _ in "kv")
    v[..., 0], v[..., 1] = 127, -127
    q, k, v = (intflash.QTensor(x, 0.1) for x in (q, k, v))
    problem = prepare(q, k, v, method="intflash_p8", out_dtype=torch.int8, out_scale=out_scale)[0]
    assert_same_bits(cpu.run(problem, isa=isa), reference.BACKEND.run(problem))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("nk", [510, 1030, 1034])
def test_means_between_two_codes(isa, nk):
    """Sums past 24 bits whose last bit decides; at 510 keys they have 24."""
    q, k = (intflash.QTensor(torch.zeros(1, 1, n, 32, dtype=torch.int8), 0.1) for n in (3, nk))
    v = torch.arange(64, 96).expand(1, 1, nk, 32).clone()
    v[:, :, ::2] += 1
    v[..., 1::2] *= -1
    problem = prepare(
        q, k, intflash.QTensor(v.to(torch.int8), 0.1), method="intflash_p8", out_dtype=torch.int8, out_scale="bound"
    )[0]
    assert_same_bits(cpu.run(problem, isa=isa), reference.BACKEND.run(problem))


def test_scores_beyond_the_scratch_are_computed_twice():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 8, generator=g) for n in (3, 40_000, 40_000))
    problem = prepare(q, k, v, return_lse=True)[0]
    expected = reference.BACKEND.run(problem)
    for isa in ISAS:
        assert_same_bits(cpu.run(problem, isa=isa), expected)
