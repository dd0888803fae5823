"""What docs/numerics.md promises of `intflash_bfp`: a bound for every input, the ceiling under sinks, what the dither
does and does not, the same bits everywhere.

Noise of the method itself is measured against exact softmax attention on the same codes, which leaves out what int8
inputs cost.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch

import intflash
from intflash import InputError
from intflash.backends import backends, cpu
from intflash.backends.portable.tiles import Tiling
from intflash.backends.portable.two_groups import two_groups
from intflash.call import prepare
from intflash.methods import METHODS
from intflash.methods.intflash_bfp import _p16, _score_exponent
from intflash.numerics.exp import ABSENT, K0, P16_MAX, QUADRATIC_OFFSET
from intflash.numerics.groups import BIAS_FRACTION_BITS, DITHER_KEYS, MAX_KEYS, ROUNDED_KEYS, additions, fraction_bits
from intflash.problem import Problem
from intflash.quant import QTensor
from oracle import ceiling, float64_attention, randn, sqnr

METHOD = "intflash_bfp"
RELATIVE = 0.0037  # of a weight: 0.0023 of the quadratic, 2^-9 octave = 0.0014 of the depth's rounding
ISAS = cpu.instruction_sets()


def run(problem, backend="reference", **options):
    return (cpu.run if options else backends()[backend].run)(problem, **options)


def run_on(where, problem):
    """Runs the torch backend, or the CPU backend by one of its instruction sets."""
    return run(problem, "torch") if where == "torch" else run(problem, isa=where)


def codes_problem(q, k, v, scale=1.0, **options):
    """A problem of int8 codes of scale 1, so that scores are the products times `scale`."""
    tensors = [QTensor(x.to(torch.int8), torch.ones(1, 1, 1, 1), "tensor", None) for x in (q, k, v)]
    return Problem(method=METHOD, q=tensors[0], k=tensors[1], v=tensors[2], sm_scale=scale, **options)


def bias_of(octaves, bits):
    """The fields of a problem for a bias in octaves, with so many fraction bits."""
    codes = (octaves.double() * 2**bits).round().clamp(1 - 2**31, 2**31 - 1).to(torch.int32)
    return dict(bias=codes, bias_fraction_bits=bits)


def gaps_problem(octaves, v, bits=BIAS_FRACTION_BITS, **options):
    """One query that sees keys `octaves` below the largest, with V codes v: `[keys]` and `[keys, channels]`."""
    q, k = torch.ones(1, 1, 1, 1), torch.zeros(1, 1, len(octaves), 1)
    bias = bias_of(-torch.tensor(octaves, dtype=torch.float64)[None, None, None], bits)
    return codes_problem(q, k, v[None, None], **bias, **options)


def weights_of(problem):
    """Exact weights of a problem's one row, in float64, relative to the largest."""
    octaves = problem.bias[0, 0, 0].double() / 2**problem.bias_fraction_bits
    return torch.exp2(octaves - octaves.max())


def bound_of(problem):
    """The largest error that docs/numerics.md allows in each channel of the output, in units of V's codes.

    Let x = 65193 w (1 + r) be the exact p16 of a key of weight w, relative to its group's octave: |r| <= RELATIVE.
    p24 = floor(256 x) and p16 = floor((p24 + added) / 256) = floor(x + added / 256), since `added` is an integer. So
    p16 - x is above added / 256 - 1 and at most added / 256: at most half a unit in magnitude where added is 128, and
    at most max(added, 256 - added) / 256, a unit or less, where p is dithered. A unit is 1 / 65193 of the octave. That
    is the largest weight of the group from which octaves count, keys with a value or the only group; the largest weight
    of the other group is more than half an octave. Nothing else is dropped from a sum of p.

    l' is off by the floor of two merges, 2^-F each, and by its rounding, half of 2^(24 - F) units of p, and is at least
    32597 units of p, the smallest largest p; a group that adds nothing from 48 octaves on had less than 2^-47 of a
    weight of the row for each key. acc' is off by its rounding only, half of 2^(24 - F) units of p times V.
    """
    w, v = weights_of(problem), problem.v.data[0, 0].double()
    n = len(w)
    valueless = (v == 0).all(1)
    added = additions(n).double()
    units = torch.maximum(added, 256 - added) / 256
    error, value_unit = RELATIVE * w, 0.0
    for group in (valueless, ~valueless):
        if group.any():
            unit = w[group].max() / P16_MAX * (2 if group is valueless and not valueless.all() else 1)
            error = error + torch.where(group, units * unit, 0.0)
            value_unit = 0.0 if group is valueless else unit
    # of sum w V / sum w: sum p V / sum p - exact is sum (p - w) (V - exact) / sum p
    total, exact = w.sum(), w @ v
    room = total - error.sum()
    spread = error @ (v - exact / total).abs() / room if room > 0 else torch.full_like(exact, math.inf)
    rounded = 2.0 ** (24 - fraction_bits(n)) / 2
    acc_rounding = 0.0 if rounded < 1 else rounded * value_unit / total
    return spread + acc_rounding + (exact / total).abs() * (2 * (rounded + 2**-19) / 32597 + n * 2.0**-47)


# ---- the bound


def layouts(n, g):
    """Distances in octaves of n keys that are hard for weights of few bits: sinks, ties, plateaus, ladders."""
    gap = float(torch.rand((), generator=g) * 34)
    tail = torch.rand(n, generator=g) * float(torch.rand((), generator=g) * 8) + gap
    kind = int(torch.randint(6, (), generator=g))
    count = int(torch.randint(1, 9, (), generator=g))
    places = torch.randint(n, (count,), generator=g)
    if kind == 0:  # one sink or several over a tail
        tail[places] = 0
    elif kind == 1:  # sinks of different heights
        tail[places] = torch.rand(count, generator=g) * gap
    elif kind == 2:  # every key at the same half of a unit of p
        tail[:] = gap
        tail[places] = 0
    elif kind == 3:  # a ladder
        tail = torch.arange(n) * (gap / n)
    elif kind == 4:  # as a normal distribution of scores has it
        tail = torch.randn(n, generator=g).mul(gap / 4).neg().add(gap).clamp(min=0)
    return tail.tolist()


def values(n, g):
    v = torch.randint(-127, 128, (n, 4), generator=g)
    kind = int(torch.randint(5, (), generator=g))
    if kind == 1:
        v = v.abs()  # coherent: nothing averages out
    elif kind == 2:
        v = v // 40
    elif kind == 3:
        v[torch.rand(n, generator=g) < 0.5] = 0
    return v


def excess(octaves, v):
    """How far the error of the reference is beyond the bound, as a factor: at most 1."""
    problem = gaps_problem(octaves, v)
    w = weights_of(problem)
    exact = (w @ problem.v.data[0, 0].double()) / w.sum()
    error = (run(problem).out[0, 0, 0].double() - exact).abs()
    return float((error / (bound_of(problem) + 2**-22 * exact.abs())).nan_to_num(0.0).max())  # of the float32 output


def test_the_exponential_is_within_its_relative_error():
    """Of every depth with a p24 above 2^16, where what its floor drops is less than 2^-16 of it."""
    depth = torch.arange(0, 1 << 11)  # 1/256 octave
    x = (K0 >> 24) - depth
    p24 = ((256 + x % 256) ** 2 + QUADRATIC_OFFSET << 14).double() * 2.0 ** (x // 256 - 14 - 8)
    ratio = p24 / (P16_MAX * 256 * torch.exp2(-depth.double() / 256))
    assert (ratio - 1).abs().max() < 0.0023
    assert 0.0023 + (2 ** (2**-9) - 1) * 1.0023 < RELATIVE + 1e-4 and (ratio.max() * 2 ** (2**-9)) - 1 < RELATIVE


@pytest.mark.parametrize("seed", range(40))
def test_every_output_is_within_the_bound(seed):
    g = torch.Generator().manual_seed(seed)
    n = [1, 2, 49, 197, ROUNDED_KEYS, ROUNDED_KEYS + 1, 900, 3000][seed % 8]
    assert excess(layouts(n, g), values(n, g)) <= 1


def climb(seed, steps):
    """The largest excess found by changes of the worst input so far: distances, sinks, ties, signs and zeros of V."""
    g = torch.Generator().manual_seed(seed)
    n = [49, 500, 800, 2000][seed % 4]
    octaves, v = layouts(n, g), values(n, g)
    worst = excess(octaves, v)
    for _ in range(steps):
        tried, w = list(octaves), v.clone()
        for j in torch.randint(n, (int(torch.randint(1, n, (), generator=g)),), generator=g).tolist():
            change = int(torch.randint(5, (), generator=g))
            if change == 0:
                tried[j] = tried[int(torch.randint(n, (), generator=g))]
            elif change == 1:
                tried[j] = max(0.0, tried[j] + float(torch.randn((), generator=g)) * 0.01)
            elif change == 2:
                w[j] = 0
            elif change == 3:
                w[j] = 127
            else:
                w[j] = -w[j]
        found = excess(tried, w)
        if found >= worst:
            octaves, v, worst = tried, w, found
    return worst


@pytest.mark.parametrize("seed", range(4))
def test_no_search_leaves_the_bound(seed):
    assert climb(seed, 40) <= 1


@pytest.mark.full
@pytest.mark.parametrize("seed", range(30))
def test_no_long_search_leaves_the_bound(seed):
    assert climb(seed, 1500) <= 1


# ---- the ceiling


SHARES = (0, 0.1, 0.5, 0.9, 0.99, 0.999)
PLACES = {"first": [0], "last": [-1], "middle": [0.5], "first four": [0, 1, 2, 3], "spread": [0, 0.3, 0.6, -1]}
SINK_VALUES = {"zero": 0.0, "small": 0.03, "as others": 1.0, "outlier": 4.0}


def sink_case(n, std, share, place, value, rows=64, seed=0):
    """Queries, keys and values of normal scores, and the bias that gives sinks a share of the mean row."""
    q, k, v = randn(1, 1, n, 64, seed=seed)
    q = q[:, :, :rows] if n > rows else randn(1, 1, rows, 64, seed=seed + 1)[0]
    q, k = q * std**0.5, k * std**0.5
    places = [int(p * n) if isinstance(p, float) else p % n for p in PLACES[place]]
    bias = torch.zeros(1, 1, 1, n)
    if share:
        k[:, :, places] = 0
        scores = q.double() @ k.double().mT / 8
        scores[..., places] = -math.inf
        rest = scores.logsumexp(-1).mean().item()
        bias[..., places] = rest + math.log(share / (1 - share) / len(places))
        v[:, :, places] *= SINK_VALUES[value]
    return q, k, v, bias


def measure(case, **options):
    """SQNR in dB: the ceiling of int8 inputs, the method, and its own noise."""
    q, k, v, bias = case
    exact, best = float64_attention(q, k, v, bias=bias), ceiling(q, k, v, bias=bias)
    out = intflash.attention(q, k, v, method=METHOD, bias=bias, backend="torch", **options)
    out = out.dequantize() if isinstance(out, QTensor) else out
    return sqnr(exact, best), sqnr(exact, out), sqnr(best, out)


def is_at_the_ceiling(case):
    """Within 0.5 dB of it, and where it is so high that noise of 46 dB would cost more, no noise above that."""
    best, reached, own = measure(case)
    return best - reached < 0.5 or (best > 37 and own > 46)


QUICK = [
    (197, 1.0, 0.99, "first", "zero"), (49, 0.1, 0.999, "first", "zero"), (1024, 1.0, 0.9, "first four", "small"),
    (1024, 0.5, 0.5, "spread", "outlier"), (4096, 0.1, 0.9, "middle", "as others"), (900, 4.0, 0.999, "last", "zero"),
    (197, 0.1, 0.9, "middle", "outlier"), (768, 0.1, 0.99, "first", "outlier"),
]  # fmt: skip


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_it_stays_at_the_ceiling(case):
    assert is_at_the_ceiling(sink_case(*case, rows=256))


@pytest.mark.full
@pytest.mark.parametrize("std", (0.1, 0.5, 1.0, 2.0, 4.0))
@pytest.mark.parametrize("n", (49, 197, 288, 768, 1024, 4096, 16384, 65536))
def test_it_stays_at_the_ceiling_on_the_grid(n, std):
    rows = 256 if n <= 4096 else 64
    for share, place, value in itertools.product(SHARES, PLACES, SINK_VALUES):
        if share == 0 and (place, value) != ("first", "zero"):
            continue
        assert is_at_the_ceiling(sink_case(n, std, share, place, value, rows=rows)), (share, place, value)


@pytest.mark.parametrize("n", (1024, pytest.param(65536, marks=pytest.mark.full)))
@pytest.mark.parametrize("share, value", [(0, "zero"), (0.9, "zero"), (0.5, "outlier")])
def test_int16_output_of_a_dynamic_scale_is_within_1_db_of_floats(n, share, value):
    case = sink_case(n, 0.5, share, "first", value)
    assert measure(case, out_dtype=torch.int16, out_scale="dynamic")[1] > measure(case)[1] - 1


# ---- biases, bounds


@pytest.mark.parametrize("offset", (0.0, 5000.0, 300_000.0, -300_000.0))
def test_a_constant_bias_changes_nothing(offset):
    q, k, v = randn(1, 2, 200, 32)
    plain, moved = (
        intflash.attention(q, k, v, method=METHOD, bias=torch.full((1, 1, 1, 200), x)) for x in (0.0, offset)
    )
    assert sqnr(plain, moved) > 50  # the bias ends at a fraction of 2^-12 octave


def test_alibi_of_a_long_row_is_exact_to_the_codes():
    q, k, v = randn(1, 1, 4096, 32)
    q = q[:, :, -32:]
    distance = torch.arange(4096) - torch.arange(4096 - 32, 4096)[:, None]
    bias = (distance * 0.5).float()[None, None]
    best = ceiling(q, k, v, bias=bias)
    out = intflash.attention(q, k, v, method=METHOD, bias=bias)
    assert sqnr(best, out) > 48


def test_a_bias_past_its_codes_is_refused():
    q, k, v = randn(1, 1, 4, 8)
    with pytest.raises(InputError, match="363408"):
        intflash.attention(q, k, v, method=METHOD, bias=torch.full((1, 1, 1, 4), 4e5))


def test_codes_of_quantize_bias_keep_their_fraction_bits():
    """T += code << 12 for codes, T += bias_q << 20 for floats, which have another range."""
    tensors = [x.mul(20).round().to(torch.int8) for x in randn(1, 2, 30, 16)]
    plain = _score_exponent(codes_problem(*tensors))[0]
    bias = randn(1, 2, 30, 30)[0] * 100
    bias[..., ::7] = float("-inf")
    codes = intflash.quantize_bias(bias)
    q, k, v = (QTensor(x, 1.0) for x in tensors)
    for given, bits, scaled in ((codes, 20, codes), (bias, 12, torch.round(bias.double() * math.log2(math.e) * 2**12))):
        for name in ("bias", "attn_mask") if given is bias else ("bias",):
            problem = prepare(q, k, v, method=METHOD, scale=1.0, out_dtype=torch.float32, **{name: given})[0]
            assert problem.bias_fraction_bits == bits
            T, present = _score_exponent(problem)
            added = torch.where(bias.isinf(), 0, scaled).to(torch.int64) << (32 - bits)
            assert torch.equal(T, plain + added) and torch.equal(present, ~bias.isinf().expand(T.shape))
    assert prepare(q, k, v, method=METHOD, bias=codes, out_dtype=torch.float32)[0].bias.data_ptr() == codes.data_ptr()


@pytest.mark.parametrize("bits", (20, BIAS_FRACTION_BITS))
@pytest.mark.parametrize("n", (49, ROUNDED_KEYS, 390))
def test_absent_keys_and_every_unit_of_the_bias_have_the_reference_bits(n, bits):
    """Scores with and without 24 fraction bits, biases that 32 bits of T hold and that they do not."""
    g = torch.Generator().manual_seed(n)
    q, k, v = (torch.randint(-127, 128, (2, 2, rows, 32), generator=g) for rows in (33, n, n))
    v[:, :, 3::5] = 0
    for scale, reach in itertools.product((2.0**-16, 1e-5, 0.3), (4, 100, 2000)):
        octaves = (torch.rand(2, 1, 33, n, generator=g) - 0.5) * 2 * reach
        bias = bias_of(octaves, bits)
        bias["bias"][torch.rand(octaves.shape, generator=g) < 0.2] = ABSENT
        bias["bias"][:, :, 7] = ABSENT
        problem = codes_problem(q, k, v, scale, return_lse=True, **bias)
        expected = run(problem)
        for got in (run(problem, "torch"), *(run(problem, isa=isa) for isa in ISAS)):
            assert torch.equal(got.out, expected.out), (scale, reach)
            assert torch.allclose(got.lse, expected.lse, rtol=1e-6)


def test_an_absent_key_never_decides_an_octave():
    problem = gaps_problem([3.0] * 200, torch.full((200, 4), 5))
    bias = problem.bias.clone()
    bias[..., 7] = 2**31 - 1
    keep = torch.ones(1, 1, 1, 200, dtype=torch.bool)
    keep[..., 7] = False
    expected = run(gaps_problem([0.0] * 199, torch.full((199, 4), 5)))
    assert torch.equal(run(replace(problem, bias=bias, keep=keep)).out, expected.out)


def test_more_keys_than_proved_are_refused():
    check = METHODS[METHOD].check
    k = torch.zeros(1, 1, 1, 1, dtype=torch.int8).expand(1, 1, MAX_KEYS + 1, 1)
    check(codes_problem(torch.zeros(1, 1, 1, 1), k[:, :, :-1], k[:, :, :-1]))
    with pytest.raises(InputError, match="1048576 keys"):
        check(codes_problem(torch.zeros(1, 1, 1, 1), k, k))


# ---- the same bits


def hard_problems():
    """Problems at the edges of the definition, of several rows."""
    g = torch.Generator().manual_seed(1)

    def problem(n, octaves, v, dtype, rows=5, bits=BIAS_FRACTION_BITS, **options):
        q = torch.ones(1, 1, rows, 1)
        bias = bias_of(-torch.stack([torch.tensor(octaves).roll(r) for r in range(rows)])[None, None], bits)
        return codes_problem(
            q, torch.zeros(1, 1, n, 1), v[None, None], out_dtype=dtype, return_lse=True, **bias, **options
        )

    wide = torch.rand(900, generator=g) * 8
    for start, depth in enumerate((0, 8, 16, 23, 25, 47, 90)):  # keys around the last p above 0, and far below it
        wide[start * 128 : start * 128 + 128] += depth
    for dtype in (torch.float32, torch.int8, torch.int16):
        yield f"rising {dtype}", problem(900, wide.flip(0).tolist(), values(900, g), dtype)
        yield f"falling {dtype}", problem(900, wide.tolist(), values(900, g), dtype)
        yield f"falling codes {dtype}", problem(900, wide.tolist(), values(900, g), dtype, bits=20)
        small = None if dtype.is_floating_point else torch.full((1, 1, 1, 1), 1e-30)
        for n in (260, 800):
            v = values(n, g).clone()
            v[3], v[200:230] = 0, 0
            sink = [20 + 0.01 * j for j in range(n)]
            # the sink lies up to 200 octaves above the others, which add to l below 48, and from 96 on count as 96
            for depth in (19.5, 0.0, -4.0, -27.0, -27.9, -28.0, -29.0, -75.0, -76.0, -77.0, -180.0):
                sink[3] = depth
                yield f"sink {depth} without value of {n} {dtype}", problem(n, sink, v, dtype, out_scale=small)
            yield f"no values of {n} {dtype}", problem(n, sink, torch.zeros(n, 3), dtype)
    yield "one key", problem(1, [0.0], torch.full((1, 1), -127), torch.float32)
    for n, value in itertools.product((500, ROUNDED_KEYS, ROUNDED_KEYS + 1), (-128, 127)):  # the largest sums
        for dtype in (torch.int16, torch.float32):
            yield f"{value} of {n} {dtype}", problem(n, [0.0] * n, torch.full((n, 2), value), dtype)


HARD = dict(hard_problems())


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("where", ["torch", *ISAS])
def test_backends_give_the_reference_bits(name, where):
    problem = HARD[name]
    expected = run(problem)
    got = run_on(where, problem)
    assert torch.equal(got.out, expected.out)
    assert torch.allclose(got.lse, expected.lse, rtol=1e-6)


@pytest.mark.parametrize("where", ["torch", *ISAS])
@pytest.mark.parametrize("n", (289, 500, ROUNDED_KEYS, ROUNDED_KEYS + 1))
def test_a_sink_without_value_among_scores(n, where):
    """No bias: sinks come from the products, in rows of two scales and with a mask."""
    q, k, v = randn(1, 4, n, 64, seed=2)
    k[:, :, 130] *= 30
    v[:, :2, 130], v[:, 1:3, 250:] = 0, 0
    mask = torch.rand(1, 1, n, n, generator=torch.Generator().manual_seed(0)) > 0.2
    for options in ({}, {"attn_mask": mask}, {"is_causal": True}, {"scale": 3.0}):
        problem = prepare(q, k, v, method=METHOD, out_dtype=torch.float32, **options)[0]
        assert torch.equal(run_on(where, problem).out, run(problem).out)


@pytest.mark.full
@pytest.mark.parametrize("where", ["torch", *ISAS])
@pytest.mark.parametrize("n", (65_536, 65_537, 200_000))
def test_long_rows_give_the_reference_bits(n, where):
    g = torch.Generator().manual_seed(n)
    shapes = ((1, 1, 2, 4), (1, 1, n, 4), (1, 1, n, 2))
    problem = codes_problem(*(torch.randint(-127, 128, s, generator=g) for s in shapes), 2.0**-12)
    assert torch.equal(run_on(where, problem).out, run(problem).out)
    zeros = torch.zeros(1, 1, n, 1)
    for value in (-128, 127):  # the largest sums
        equal = codes_problem(zeros[:, :, :1], zeros, zeros + value)
        assert torch.equal(run_on(where, equal).out, run(equal).out)
    valueless = torch.arange(n)[None, None, :, None] % 3 > 0  # sums of both groups, the larger without a value
    both = replace(problem, v=replace(problem.v, data=problem.v.data * valueless))
    assert torch.equal(run_on(where, both).out, run(both).out)


@pytest.mark.full
@pytest.mark.parametrize("where", ["torch", *ISAS])
def test_the_most_keys_of_the_largest_sums(where):
    zeros = torch.zeros(1, 1, MAX_KEYS, 1)
    problem = codes_problem(zeros[:, :, :1], zeros, zeros - 128)
    assert float(run(problem).out) == float(run_on(where, problem).out) == -128


# ---- order, tiles and splits


def test_keys_of_a_short_sequence_may_come_in_any_order():
    q, k, v = randn(1, 2, ROUNDED_KEYS, 16, seed=4)
    order = torch.randperm(ROUNDED_KEYS, generator=torch.Generator().manual_seed(0))
    options = dict(method=METHOD, backend="reference")
    expected = intflash.attention(q, k, v, **options)
    assert torch.equal(intflash.attention(q, k[:, :, order], v[:, :, order], **options), expected)


def test_keys_of_a_long_sequence_may_change_places_with_those_of_the_same_dither():
    """All sums are exact. Another order has other bits."""
    n = 2 * DITHER_KEYS
    q, k, v = randn(1, 2, n, 16, seed=4)
    q, k = q[:, :, :64], k * 3  # so that many p are small
    options = dict(method=METHOD, backend="reference")
    expected = intflash.attention(q, k, v, **options)
    added, order = additions(n), torch.randperm(n, generator=torch.Generator().manual_seed(0))
    moved = torch.empty(n, dtype=torch.int64)
    moved[added.argsort()] = order[added[order].argsort()]
    assert torch.equal(intflash.attention(q, k[:, :, moved], v[:, :, moved], **options), expected)
    assert not torch.equal(intflash.attention(q, k.roll(1, 2), v.roll(1, 2), **options), expected)


@pytest.mark.parametrize("steps", [None, ((1024, 1500), (0, 1), (1, 300), (300, 1024))], ids=("in order", "in any"))
def test_tiles_and_splits_change_no_bit(steps):
    g = torch.Generator().manual_seed(3)
    octaves, v = layouts(1500, g), values(1500, g)
    v[::7] = 0
    problem = gaps_problem(octaves, v)
    tilings = [Tiling(keys=keys, steps=steps) for keys in ((1500,) if steps else (1, 100, 256, 1500))]
    assert all(torch.equal(two_groups(problem, tiling).out, run(problem).out) for tiling in tilings)


def test_absent_keys_at_the_end_of_a_long_sequence_change_no_bit():
    """A row has the same sums in every sequence of more than 768 keys that begins with the keys it sees."""
    g = torch.Generator().manual_seed(5)
    octaves, v = layouts(1500, g), values(1500, g)
    keep = (torch.arange(1500) < 900)[None, None, None]
    expected = run(gaps_problem(octaves[:900], v[:900]))
    assert torch.equal(run(gaps_problem(octaves, v, keep=keep)).out, expected.out)


# ---- the dither


DEAD = 6400  # depth, in 1/256 octave, from which p24 is 0


def p16_of(depths, n):
    """p16 of the definition's code at depths in 1/256 octave, for each key of a sequence of n: `[depths, n]`."""
    depth = (torch.as_tensor(depths) << 24)[None, None, :, None].expand(1, 1, -1, n)
    return _p16(depth, torch.tensor(True))[0, 0]


def p24_of(depth):
    """p16 at a depth in 1/256 octave, with 8 fraction bits, by Python's integers."""
    octaves, fraction = divmod(3686 - depth, 256)
    m = (256 + fraction) ** 2 + QUADRATIC_OFFSET
    return m << octaves - 8 if octaves >= 8 else m >> 8 - octaves


def exact_of(depths):
    """p16 at depths in 1/256 octave, not rounded."""
    x = 3686 - torch.as_tensor(depths)
    return ((256 + x % 256) ** 2 + QUADRATIC_OFFSET).double() * 2.0 ** (x // 256 - 16).double()


P24 = torch.tensor([p24_of(depth) for depth in range(DEAD)])
BITS = (0, 1, 2, 3, 7, 8, 9, 10)  # of a key's number, from the highest bit of its dither to the lowest
DITHERS = torch.tensor([sum((key >> bit & 1) << 7 - i for i, bit in enumerate(BITS)) for key in range(DITHER_KEYS)])


def test_p_of_every_depth_and_key_is_the_formula():
    depths = torch.arange(DEAD)
    assert torch.equal(p16_of(depths, DITHER_KEYS), (P24[:, None] + DITHERS) // 256)
    assert torch.equal(p16_of(depths, 7), ((P24 + 128) // 256)[:, None].expand(-1, 7))
    assert DITHERS.bincount().tolist() == [8] * 256
    assert torch.equal(additions(3 * DITHER_KEYS - 5), DITHERS.repeat(3)[:-5])


def test_768_keys_are_rounded_and_769_dithered():
    depth = [17 * 256]  # p is 0.497
    assert p16_of(depth, ROUNDED_KEYS).unique().tolist() == [0]
    assert p16_of(depth, ROUNDED_KEYS + 1).unique().tolist() == [0, 1]
    assert p16_of([17 * 256 - 20], ROUNDED_KEYS).unique().tolist() == [1]
    for n, lost in ((ROUNDED_KEYS, True), (ROUNDED_KEYS + 1, False)):
        v = torch.full((n, 1), 100)
        v[0] = -100
        out = run(gaps_problem([0.0] + [17.0] * (n - 1), v)).out  # of 768 keys nothing but the sink is seen
        assert (float(out) == -100) == lost


@pytest.mark.parametrize("n", (DITHER_KEYS, 2 * DITHER_KEYS))
def test_keys_of_one_depth_lose_nothing_but_the_floor_of_p24(n):
    """Of n equal keys, whole periods of the dither, p adds up to n / 256 times p24 at every depth: less than 1/256 of a
    unit of p is lost for each key, 2^-24 of the group's largest weight.
    """
    depths = torch.arange(DEAD)
    sums = p16_of(depths, n).sum(-1)
    assert torch.equal(sums, P24 * (n // 256))
    lost = n * exact_of(depths) - sums
    assert lost.min() >= 0 and lost.max() < n / 256


@pytest.mark.parametrize("octaves", (17.0, 17.5, 18.0, 19.0, 20.0))
def test_ties_below_a_sink_keep_their_weight(octaves):
    """4,096 keys each 2^-17 to 2^-20 of a sink with a value: within 2^-24 of the sink's weight for each key, and the
    relative error of the exponential. Rounded, all of them would be lost.
    """
    n = 4096
    v = torch.full((n, 1), 100)
    v[n // 2] = 0
    v = torch.cat((v, v.roll(1, 0) * 0 + (torch.arange(n) == n // 2)[:, None] * 100), 1)  # the sink has its own channel
    depth = [octaves] * n
    depth[n // 2] = 0.0
    out = run(gaps_problem(depth, v)).out[0, 0, 0].double()
    weight = (n - 1) * 2.0**-octaves
    error = (out[0] / out[1] - weight).abs()
    assert error <= n * 2.0**-24 + weight * 2 * RELATIVE + 1 / P16_MAX
    assert out[0] / out[1] > weight * 0.85


def dithering_errors():
    """What p of each key of a period is off by against p24, of every p24 modulo 256: `[256, keys]`, in units."""
    fractions = torch.arange(256)[:, None]
    return (fractions + DITHERS) // 256 - fractions / 256


def test_a_run_of_keys_of_one_depth_is_off_by_13_units_at_most():
    """Of any consecutive keys, wherever they begin: 12.8 units of p against p24, the largest of all runs and depths.
    Whole periods are off by nothing, so that this is how far the sums from the first key on lie apart. Of any 16
    consecutive keys it is less than a unit.
    """
    errors = dithering_errors()
    sums = errors.cumsum(1)
    assert not sums[:, -1].any()
    assert 12.8 < (sums.amax(1) - sums.amin(1)).max() < 13
    assert errors.repeat(1, 2).unfold(1, 16, 1).sum(-1).abs().max() == 15 / 16


def most_of_class(bits):
    """How far p of the keys of one class modulo 2^bits can be off on average, against p24: their dithers have so many
    of their highest bits in common.
    """
    return 1 - 2.0 ** -sum(bit < bits for bit in BITS)


@pytest.mark.parametrize("bits", range(12))
def test_a_class_of_residues_loses_at_most_a_unit_for_each_of_its_keys(bits):
    """An adversary who knows the dither gives weight to the keys of one class modulo 2^bits alone: n / 2^bits keys are
    then like a sequence of so many keys whose p is floored, or always raised.
    """
    error = dithering_errors().unflatten(1, (-1, 1 << bits)).mean(1)
    assert -error.min() == error.max() == most_of_class(bits)


def test_an_adversary_s_class_of_residues_is_within_the_bound():
    """Keys of one class modulo 2^bits, each just less than what its dither would raise, below a sink."""
    n = 4096
    for bits in (1, 4, 8, 11):
        for place in (0, (1 << bits) - 1):
            for octaves in (16.1, 17.0, 18.0, 20.0, 23.9):
                depth = [60.0] * n
                depth[place :: 1 << bits] = [octaves] * (n >> bits)
                depth[2 * n // 3] = 0.0
                v = torch.full((n, 1), 127)
                v[2 * n // 3] = -127
                assert excess(depth, v) <= 1, (bits, place, octaves)
                problem = gaps_problem(depth, v)
                w = weights_of(problem)
                exact = float(w @ v[:, 0].double() / w.sum())
                error = abs(float(run(problem).out) - exact) / 254  # of the sum of the keys' weights, relative to 1
                assert error <= (n >> bits) * (most_of_class(bits) + 2**-8) / P16_MAX + RELATIVE * (float(w.sum()) - 1)


@pytest.mark.parametrize("n", (1024, 16_384, 262_144))
def test_errors_of_unrelated_depths_grow_with_the_square_root(n):
    """Of keys whose depths, 16 to 20 octaves, do not depend on their numbers: the root mean square error of the sum of
    p is below 0.35 sqrt(n) units, as where p is rounded at random.
    """
    g = torch.Generator().manual_seed(n)
    depths = torch.randint(16 * 256, 20 * 256, (64, n), generator=g)
    errors = ((P24[depths] + additions(n)) // 256 - P24[depths] / 256).sum(1)
    assert errors.square().mean().sqrt() < 0.35 * n**0.5
