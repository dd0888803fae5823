"""What docs/numerics.md promises of `intflash_bfp`: a bound for every input, the ceiling under
sinks, the same bits everywhere.
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
from intflash.call import prepare
from intflash.methods import METHODS
from intflash.methods.intflash_bfp import _score_exponent
from intflash.numerics.groups import BIAS_FRACTION_BITS, BLOCK, MAX_KEYS, ONE_BLOCK, block_keys, dropped_bits
from intflash.numerics.exp import ABSENT
from intflash.problem import Problem
from intflash.quant import QTensor
from oracle import ceiling, float64_attention, randn, sqnr

METHOD = "intflash_bfp"
RELATIVE = 0.0037  # of a weight: the quadratic and the depth's rounding
OF_LARGEST = 1 / 32597  # of its group's largest weight: a unit of p16
DROPPED = 1 / 32597  # a unit of a block's acc, relative to the same weight
ISAS = cpu.instruction_sets()


def run(problem, backend="reference", **options):
    return (cpu.run if options else backends()[backend].run)(problem, **options)


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
    """The largest error that docs/numerics.md allows in each channel of the output, in units of V's codes."""
    w, v = weights_of(problem), problem.v.data[0, 0].double()
    valueless = (v == 0).all(1)
    error, largest, dropped = RELATIVE * w, torch.zeros_like(w), 0.0
    count, unit = block_keys(len(w)), (1 << dropped_bits(len(w))) - 1
    for start in range(0, len(w), count):
        for group in (valueless, ~valueless):
            members = torch.zeros_like(valueless)
            members[start : start + count] = group[start : start + count]
            if members.any():
                largest[members] = w[members].max()
                dropped += 0 if group is valueless else unit * DROPPED * w[members].max()
    error = error + OF_LARGEST * largest
    # of sum w V / sum w, whose numerator and denominator are off by no more than sum e |V| and sum e
    total, exact = w.sum(), w @ v
    spread = error @ (v - exact / total).abs()
    rounding = largest[~valueless].max() / 2**15 if (~valueless).any() else 0  # of acc and l to 2^-24 of their sums
    return spread / (total - error.sum()) + (rounding + dropped + exact.abs() * 2**-14) / total


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
    return float((error / (bound_of(problem) + 1e-7 * exact.abs())).nan_to_num(0.0).max())


@pytest.mark.parametrize("seed", range(40))
def test_every_output_is_within_the_bound(seed):
    g = torch.Generator().manual_seed(seed)
    n = [1, 2, 49, 197, ONE_BLOCK, ONE_BLOCK + 1, 900][seed % 7]
    assert excess(layouts(n, g), values(n, g)) <= 1


def climb(seed, steps):
    """The largest excess found by changes of the worst input so far: distances, sinks, ties, signs and zeros of V."""
    g = torch.Generator().manual_seed(seed)
    n = [49, 500, 800][seed % 3]
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


@pytest.mark.parametrize("seed", range(3))
def test_no_search_leaves_the_bound(seed):
    assert climb(seed, 40) <= 1


@pytest.mark.full
@pytest.mark.parametrize("seed", range(30))
def test_no_long_search_leaves_the_bound(seed):
    assert climb(seed, 1500) <= 1


# ---- the ceiling


SHARES = (0, 0.1, 0.5, 0.9, 0.99, 0.999)
PLACES = {"first": [0], "last": [-1], "middle": [0.5], "four in a block": [0, 1, 2, 3], "spread": [0, 0.3, 0.6, -1]}
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
    (197, 1.0, 0.99, "first", "zero"), (49, 0.1, 0.999, "first", "zero"), (1024, 1.0, 0.9, "four in a block", "small"),
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
@pytest.mark.parametrize("n", (49, ONE_BLOCK, 390))
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
    for start, depth in enumerate((0, 23, 25, 47, 49, 90)):  # blocks that span more octaves than the sums' fractions
        wide[start * 128 : start * 128 + 128] += depth
    for dtype in (torch.float32, torch.int8, torch.int16):
        yield f"rising {dtype}", problem(900, wide.flip(0).tolist(), values(900, g), dtype)
        yield f"falling {dtype}", problem(900, wide.tolist(), values(900, g), dtype)
        yield f"falling codes {dtype}", problem(900, wide.tolist(), values(900, g), dtype, bits=20)
        small = None if dtype.is_floating_point else torch.full((1, 1, 1, 1), 1e-30)
        for n in (260, 500, 800):
            v = values(n, g).clone()
            v[3], v[200:230] = 0, 0
            sink = [20 + 0.01 * j for j in range(n)]
            for depth in (0.0, -24.0, -28.0, -180.0):  # of the sink above the others: the last two drop their l
                sink[3] = depth
                yield f"sink {depth} without value of {n} {dtype}", problem(n, sink, v, dtype, out_scale=small)
            yield f"no values of {n} {dtype}", problem(n, sink, torch.zeros(n, 3), dtype)
    yield "one key", problem(1, [0.0], torch.full((1, 1), -127), torch.float32)
    for n, value in itertools.product((500, ONE_BLOCK, ONE_BLOCK + 1), (-128, 127)):  # the largest sums
        for dtype in (torch.int16, torch.float32):
            yield f"{value} of {n} {dtype}", problem(n, [0.0] * n, torch.full((n, 2), value), dtype)


HARD = dict(hard_problems())


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("where", ["torch", *ISAS])
def test_backends_give_the_reference_bits(name, where):
    problem = HARD[name]
    expected = run(problem)
    got = run(problem, "torch") if where == "torch" else run(problem, isa=where)
    assert torch.equal(got.out, expected.out)
    assert torch.allclose(got.lse, expected.lse, rtol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("n", (289, 500, ONE_BLOCK, ONE_BLOCK + 1))
def test_a_sink_without_value_among_scores(n, isa):
    """No bias: sinks come from the products, in rows of two scales and with a mask."""
    q, k, v = randn(1, 4, n, 64, seed=2)
    k[:, :, 130] *= 30
    v[:, :2, 130], v[:, 1:3, 250:] = 0, 0
    mask = torch.rand(1, 1, n, n, generator=torch.Generator().manual_seed(0)) > 0.2
    for options in ({}, {"attn_mask": mask}, {"is_causal": True}, {"scale": 3.0}):
        problem = prepare(q, k, v, method=METHOD, out_dtype=torch.float32, **options)[0]
        assert torch.equal(run(problem, isa=isa).out, run(problem).out)


@pytest.mark.full
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("n", (65_536, 65_537, 200_000))
def test_long_rows_give_the_reference_bits(n, isa):
    g = torch.Generator().manual_seed(n)
    shapes = ((1, 1, 2, 4), (1, 1, n, 4), (1, 1, n, 2))
    problem = codes_problem(*(torch.randint(-127, 128, s, generator=g) for s in shapes), 2.0**-12)
    assert torch.equal(run(problem, isa=isa).out, run(problem).out)
    assert torch.equal(run(problem, "torch").out, run(problem).out)
    zeros = torch.zeros(1, 1, n, 1)
    all_127 = codes_problem(zeros[:, :, :1], zeros, zeros + 127)
    assert torch.equal(run(all_127, isa=isa).out, run(all_127).out)


def test_blocks_may_come_in_any_order():
    q, k, v = randn(1, 2, 512, 16, seed=4)
    order = torch.randperm(4, generator=torch.Generator().manual_seed(0))
    moved = [x.unflatten(2, (4, BLOCK))[:, :, order].flatten(2, 3) for x in (k, v)]
    options = dict(method=METHOD, backend="reference")
    assert torch.equal(intflash.attention(q, *moved, **options), intflash.attention(q, k, v, **options))
