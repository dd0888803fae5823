"""The native CPU kernels: every instruction set, thread count and quantization path has the reference's bits."""

import itertools
import subprocess
import sys
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import intflash
from intflash import Recipe
from intflash.backends import cpu, reference
from intflash.numerics.exp import ABSENT
from intflash.pipeline import prepare
from oracle import randn
from pairwise import pairwise

ISAS = cpu.instruction_sets()
METHODS = list(cpu.METHODS)
pytestmark = pytest.mark.skipif(not ISAS, reason="the native module was not built")

FACTORS = {
    "method": METHODS,
    "head_dim": [64, 1, 17, 80, 256],
    "value_dim": [None, 1, 33, 256],
    "heads": [(2, 2), (4, 2), (3, 1)],
    "tokens": [(49, 49), (1, 197), (130, 75), (5, 1100)],
    "mask": ["none", "keep", "dead_rows"],
    "bias": ["none", "heads", "windows", "row"],
    "causal": [None, "top_left", "bottom_right"],
    "packed": [False, True],
    "granularity": [("tensor", "tensor", "tensor"), ("head", "head", "head"), ("token", "block", "channel")],
    "out": [torch.float32, torch.int8, torch.int16, torch.bfloat16, torch.float16],
    "amplitude": [1.0, 0.01, 30.0],
    "strided": [False, True],
}


def possible(case):
    """Of a case that may not be whole yet."""
    flash, granularity = case.get("method") in cpu.FLASH, case.get("granularity", ())
    packed_blocks = case.get("packed") and "block" in granularity
    too_fine = flash and "token" in granularity
    too_coarse = flash and case.get("amplitude") == 30.0  # rs < 1 is an error of the method
    return not (packed_blocks or too_fine or too_coarse)


CASES = pairwise(FACTORS, possible)


def problem_of(case, seed=0):
    g = torch.Generator().manual_seed(seed)
    (hq, hk), (nq, nk), d = case["heads"], case["tokens"], case["head_dim"]
    batch = 1 if case["packed"] else 4
    shapes = [(batch, hq, nq, d), (batch, hk, nk, d), (batch, hk, nk, case["value_dim"] or d)]
    tensors = [torch.randn(s, generator=g) * case["amplitude"] for s in shapes]
    if case["strided"]:  # [B, H, D, N] memory: not even the last axis is contiguous
        tensors = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in tensors]
    recipe = Recipe(*case["granularity"], block_size=64, rule="divide" if case["method"] in cpu.FLASH else "exact")
    flash = case["method"] in cpu.FLASH
    options = dict(enable_gqa=True, recipe=recipe, out_dtype=case["out"], return_lse=not flash)
    if case["mask"] != "none":
        mask = torch.rand(batch, 1, nq, nk, generator=g) > 0.3
        if case["mask"] == "dead_rows":
            mask[:, :, ::3] = False
        options["attn_mask"] = mask
    if case["bias"] != "none":
        windows = 2 if batch == 4 else 1
        shape = {"heads": (1, hq, nq, nk), "windows": (windows, 1, nq, nk), "row": (1, 1, 1, nk)}[case["bias"]]
        options["bias"] = torch.randn(shape, generator=g)
        options["bias"][..., ::5] = float("-inf")
    if case["packed"]:
        cu_q = torch.tensor([0, nq // 3, nq // 3, nq], dtype=torch.int32)
        cu_k = torch.tensor([0, nk // 2, nk // 2, nk], dtype=torch.int32)
        options |= dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    if case["causal"]:
        options |= dict(is_causal=True, causal_align=case["causal"])
    return prepare(*tensors, method=case["method"], **options)[0]


def name_of(case):
    return "-".join(str(v).replace("torch.", "").replace(" ", "") for v in case.values())


def assert_same_bits(result, expected):
    assert torch.equal(result.out, expected.out)
    if expected.out_scale is not None:
        assert torch.equal(result.out_scale.expand_as(expected.out_scale), expected.out_scale)
    if expected.lse is not None:
        assert torch.equal(result.lse, expected.lse)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_every_instruction_set_has_the_bits_of_the_reference(case):
    problem = problem_of(case)
    expected = reference.BACKEND.run(problem)
    for isa in ISAS:
        assert_same_bits(cpu.run(problem, isa=isa, threads=1), expected)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("threads", [2, 3, 7])
@pytest.mark.parametrize("shape", [(6, 7, 131, 48), (1, 3, 250, 64), (1, 5, 400, 64)], ids=str)
def test_thread_counts_do_not_change_bits(method, shape, threads):
    """Heads whole to a thread and heads cut between threads, which then take them up in the middle."""
    q, k, v = (torch.randn(shape) for _ in range(3))
    problem = prepare(q, k, v, method=method)[0]
    expected = cpu.run(problem, threads=1)
    for _ in range(4):  # threads draw from one another as it happens
        assert_same_bits(cpu.run(problem, threads=threads), expected)


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
    out_scale = pick(st.sampled_from([None, 1e-9, 1e-4, 1.0])) if out_dtype != torch.float32 else None
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
        problem = prepare(*tensors, method=method, scale=1.0, return_lse=True, **options)[0]
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
    problem = prepare(q, k, v, method=method, out_dtype=out, enable_gqa=True, **options)[0].quantized()
    assert_same_bits(cpu.run(problem, isa=isa, threads=pick(st.sampled_from([1, 2]))), reference.BACKEND.run(problem))


@pytest.mark.parametrize("method", list(cpu.P_MAX))
@pytest.mark.parametrize("nk", [257, 319, 320, 321, 512, 1023, 1024, 1025, 1089, 1216, 1281, 2047, 2048, 2250, 2561])
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
        options["bias"] = broadcast(bias)
    if pick(st.booleans()) or not options:
        options["attn_mask"] = broadcast(
            torch.rand(2, 2, nq, nk, generator=g) > pick(st.sampled_from([0.1, 0.5, 0.99]))
        )
    problem = prepare(*tensors, method=method, out_dtype=torch.int8, return_lse=True, **options)[0]
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
            problem = prepare(*tensors, method=method, scale=scale, bias=bias, return_lse=True, **options)[0]
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["tensor", "head", "static", "static tensor", "static heads"])
def test_native_quantization_has_the_library_s_codes(isa, dtype, kind):
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 3, 77, 40, generator=g).to(dtype) for _ in range(3))
    v[1] = 2.0**-24 if dtype == torch.float16 else 2.0**-110  # float16's smallest, or an amax that counts as 0
    q[0, 0, :, :7] = 0.5 * q.abs().amax() / 127 * torch.arange(77)[:, None].to(dtype)  # ties
    numbers = dict(q_scale=0.01, k_scale=0.02, v_scale=0.03)
    heads = torch.tensor([0.01, 0.5, 0.2])
    recipe = {
        "static": Recipe(**numbers),
        "static tensor": Recipe(**{name: torch.tensor(x) for name, x in numbers.items()}),
        "static heads": Recipe(*["head"] * 3, q_scale=heads, k_scale=heads[None, :, None, None], v_scale=heads),
    }.get(kind) or Recipe(kind, kind, kind)
    problem = prepare(q, k, v, recipe=recipe)[0]
    assert cpu._float_scales(problem) is not None
    for threads in (1, 2):
        assert_same_bits(cpu.run(problem, isa=isa, threads=threads), reference.BACKEND.run(problem))


@pytest.fixture
def without_exchange():
    cpu._native.use_exchange(None)
    yield
    cpu._native.use_exchange(getattr(torch.Tensor, "__dlpack_c_exchange_api__", None))


@pytest.mark.parametrize("case", CASES[::6], ids=name_of)
def test_tensors_read_by_their_methods(case, without_exchange):
    """As with a torch that has no DLPack exchange."""
    problem = problem_of(case)
    assert_same_bits(cpu.run(problem), reference.BACKEND.run(problem))


def test_scales_read_by_their_methods(without_exchange):
    x, heads = torch.randn(2, 3, 77, 40), torch.tensor([0.01, 0.5, 0.2])
    recipe = Recipe(
        "head", "tensor", "head", q_scale=heads, k_scale=torch.tensor([[0.02]]), v_scale=heads[None, :, None, None]
    )
    problem = prepare(x, x, x, recipe=recipe)[0]
    assert cpu._float_scales(problem) is not None
    assert_same_bits(cpu.run(problem), reference.BACKEND.run(problem))
    empty = intflash.quantize(x)
    empty.data.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="no memory of its own"):
        intflash.attention(empty, empty, empty, backend="cpu")


@pytest.mark.parametrize("out_dtype, failing", [(torch.int8, 1), (torch.int8, 2), (torch.float32, 1)])
def test_outputs_that_cannot_be_made(out_dtype, failing):
    """The caller's error (of codes or of their scale), though workers have begun by then; the next call is right."""
    q = torch.randn(1, 12, 197, 64)
    problem = prepare(q, q, q, out_dtype=out_dtype)[0]
    expected = cpu.run(problem, threads=1)
    made = []

    def empty_like(x):
        made.append(x)
        if len(made) == failing:
            raise MemoryError("none left")
        return torch.empty_like(x)

    problem = problem if out_dtype.is_floating_point else problem.quantized()
    for threads in (1, 2, 4):
        made.clear()
        cpu._native.use_torch(empty_like, cpu.empty_output)
        try:
            with pytest.raises(MemoryError, match="none left"):
                cpu.run(problem, threads=threads)
        finally:
            cpu._native.use_torch(torch.empty_like, cpu.empty_output)
        assert len(made) == failing
        assert_same_bits(cpu.run(problem, threads=threads), expected)


def test_short_calls_beside_sleeping_workers():
    """Far apart the caller does them alone; close together they wake the workers."""
    q = torch.randn(1, 12, 98, 32)
    problem = prepare(q, q, q, method="intflash_p8")[0]
    expected = cpu.run(problem, threads=1)
    for pause in (0.01, 0.01, 0, 0, 0, 0.01, 0):
        time.sleep(pause)
        for _ in range(20 if pause == 0 else 1):
            assert_same_bits(cpu.run(problem, threads=3), expected)


@pytest.mark.skipif(not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="this torch has no DLPack exchange")
def test_another_exchange_is_refused():
    with pytest.raises(ValueError, match="incorrect name"):
        cpu._native.use_exchange(torch.utils.dlpack.to_dlpack(torch.ones(1)))
    x = torch.randn(1, 2, 20, 16)
    assert torch.equal(intflash.attention(x, x, x, backend="cpu"), intflash.attention(x, x, x, backend="reference"))


def test_parameters():
    x = torch.nn.Parameter(torch.randn(1, 2, 20, 16))
    with torch.no_grad():
        assert torch.equal(intflash.attention(x, x, x, backend="cpu"), intflash.attention(x, x, x, backend="reference"))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 3, 32), (50, 5, 32), (33, 2, 100)])
def test_quantization_in_memory_s_order(isa, dtype, shape):
    """A token's heads side by side, apart from one another, of one batch only; the largest value anywhere."""
    tokens, heads, d = shape
    g = torch.Generator().manual_seed(tokens)
    packed = torch.randn(2, tokens, 3, heads, d, generator=g).to(dtype)
    packed[1, -1, :, -1, -1] = torch.tensor([-9, 11, -13]).to(dtype)
    for qkv in (packed, packed[:1], packed[..., : d // 2]):
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        for recipe in (Recipe(), Recipe(q_scale=0.05, k="head", v_scale=torch.tensor(0.1))):
            problem = prepare(q, k, v, recipe=recipe)[0]
            assert cpu._float_scales(problem) is not None
            expected = reference.BACKEND.run(problem)
            for threads in (1, 2):
                assert_same_bits(cpu.run(problem, isa=isa, threads=threads), expected)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_the_output_has_the_layout_of_q(method, dtype):
    """Tokens before heads in memory, as a model's next layer wants them; the same values."""
    g = torch.Generator().manual_seed(0)
    qkv = torch.randn(2, 53, 3, 4, 32, generator=g).permute(2, 0, 3, 1, 4)
    for tensors in (qkv.unbind(0), qkv.contiguous().unbind(0)):
        problem = prepare(*tensors, method=method, out_dtype=dtype)[0]
        result = cpu.run(problem)
        assert_same_bits(result, reference.BACKEND.run(problem))
        if problem.method not in cpu.FLASH and dtype.is_floating_point:
            assert result.out.stride(1) < result.out.stride(2) or tensors[0].stride(1) > tensors[0].stride(2)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("method", ["intflash", "intflash_p8", "intflash_online"])
@pytest.mark.parametrize("nk", [256, 65_536])
@pytest.mark.parametrize("sign", [1, -1])
def test_largest_sums(isa, method, nk, sign):
    """Keys of one score: l and the digit sums at their bounds; of 256 keys 32 bits hold both digits' sum."""
    q = intflash.QTensor(torch.full((1, 1, 2, 256), 127, dtype=torch.int8), 0.1)
    k = intflash.QTensor(torch.full((1, 1, nk, 256), -127, dtype=torch.int8), 0.1)
    v = intflash.QTensor(torch.full((1, 1, nk, 35), 127 * sign, dtype=torch.int8), 0.1)
    out = cpu.run(prepare(q, k, v, method=method, out_dtype=torch.int16)[0], isa=isa).out
    assert (out == 32767 * sign).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("nk", [200, 518, 519, 700])
@pytest.mark.parametrize("out_scale", [None, 0.0371, 0.1 / 3, 7.0, 1e-9, 1e9])
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
    problem = prepare(q, k, intflash.QTensor(v.to(torch.int8), 0.1), method="intflash_p8", out_dtype=torch.int8)[0]
    assert_same_bits(cpu.run(problem, isa=isa), reference.BACKEND.run(problem))


def test_scores_beyond_the_scratch_are_computed_twice():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 8, generator=g) for n in (3, 40_000, 40_000))
    problem = prepare(q, k, v, return_lse=True)[0]
    expected = reference.BACKEND.run(problem)
    for isa in ISAS:
        assert_same_bits(cpu.run(problem, isa=isa), expected)


def test_calls_from_several_threads_at_once():
    problems = [prepare(*(torch.randn(4, 8, n, 32) for _ in range(3)))[0] for n in (90, 97, 113, 130)]
    expected = [cpu.run(p, threads=1).out for p in problems]
    wrong = []

    def work(i):
        for _ in range(20):
            if not torch.equal(cpu.run(problems[i], threads=2).out, expected[i]):
                wrong.append(i)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert not wrong


def test_calls_of_one_head_after_one_another():
    for seed in range(3):
        problem = prepare(*randn(1, 1, 40, 16, seed=seed))[0]
        expected = reference.BACKEND.run(problem)
        for isa in ISAS:
            assert_same_bits(cpu.run(problem, isa=isa, threads=1), expected)


def test_a_forked_child_computes():
    code = """
import os, torch
from intflash.backends import cpu
from intflash.pipeline import prepare
q = torch.randn(4, 8, 100, 32)
problem = prepare(q, q, q)[0]
a = cpu.run(problem, threads=2).out
pid = os.fork()
if pid == 0:  # without torch's own threads, which do not survive a fork
    os._exit(0 if cpu.run(problem, threads=2).out.numpy().tobytes() == a.numpy().tobytes() else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


SHORT_OF = """
import os, resource, sys, torch
from intflash import QTensor
from intflash.backends import cpu
from intflash.pipeline import prepare
torch.set_num_threads(1)

def problem(keys, head_dim):
    codes = [torch.randint(-127, 128, (1, 4, n, head_dim), dtype=torch.int8) for n in (64, keys, keys)]
    return prepare(*(QTensor(x, 0.01) for x in codes), method="intflash_p8", out_dtype=torch.int8)[0]

small, large = problem(256, 64), problem(65536, 256)
expected = cpu.run(small, threads=1).out
resource_of = getattr(resource, sys.argv[1])
if sys.argv[1] == "RLIMIT_AS":
    cpu.run(small, threads=2)  # the worker is there
    failed = 0
    for room in range(10, 200, 10):
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource_of, (used + (room << 20), resource.RLIM_INFINITY))
        try:
            cpu.run(large, threads=2)
        except MemoryError:
            failed += 1
        resource.setrlimit(resource_of, (resource.RLIM_INFINITY,) * 2)
        assert torch.equal(cpu.run(small, threads=2).out, expected)
    assert failed
else:
    if os.geteuid() == 0:
        os.setuid(65534)  # a limit of processes is none for root
    resource.setrlimit(resource_of, (1, 1))
    for _ in range(3):
        assert torch.equal(cpu.run(small, threads=4).out, expected)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits as Linux has them")
@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_NPROC"])
def test_short_of_memory_or_threads(limit):
    """MemoryError, whichever thread it hits, and the next call is right; threads that cannot start are done without."""
    done = subprocess.run([sys.executable, "-c", SHORT_OF, limit], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_it_is_the_default_on_a_cpu():
    q = torch.randn(1, 2, 20, 16)
    a, b = (intflash.attention(q, q, q, backend=name) for name in (None, "cpu"))
    assert torch.equal(a, b)
    assert intflash.info()["backends"]["cpu"]["available"] is None


def test_an_unknown_instruction_set_is_refused():
    problem = prepare(*(torch.randn(1, 1, 4, 4) for _ in range(3)))[0]
    with pytest.raises(ValueError, match="instruction set"):
        cpu.run(problem, isa="sse")


@pytest.mark.parametrize("method", cpu.FLASH)
@pytest.mark.parametrize("scale", [30.0, 1e-6])
def test_flash_score_units_past_int32_are_refused(method, scale):
    codes = torch.ones(1, 1, 4, 4, dtype=torch.int8)
    tensors = [intflash.QTensor(codes, s) for s in (scale, scale, 1.0)]
    with pytest.raises(intflash.InputError, match="int32|2\\^31"):
        cpu.run(prepare(*tensors, method=method, out_dtype=torch.int8)[0])


def test_reasons():
    def reason(**options):
        return cpu.unsupported(prepare(*(torch.randn(1, 1, 4, 4) for _ in range(3)), **options)[0])

    assert reason() is None
    assert "log-sum-exp" in reason(method="qflash", return_lse=True)
    assert "methods" in reason(method="fp32")
    x = torch.randn(1, 1, 4, 257)
    assert cpu.unsupported(prepare(x[..., :4], x[..., :4], x[..., :256])[0]) is None
    assert "to 256, got 257" in cpu.unsupported(prepare(x[..., :4], x[..., :4], x)[0])


def test_unsupported_shapes_go_to_another_backend():
    q, v = torch.randn(1, 1, 4, 4), torch.randn(1, 1, 4, 300)
    for method, lse in itertools.product(("intflash", "intflash_p8"), (False, True)):
        intflash.attention(q, q, v, method=method, return_lse=lse)


@pytest.mark.parametrize("method", ["intflash", "qflash"])
@pytest.mark.parametrize("layout", ["channels last", "expanded", "transposed"])
def test_integer_output_of_any_layout(method, layout):
    x = torch.randn(2, 6, 14, 16)
    if layout == "channels last":
        x = x.to(memory_format=torch.channels_last)
    elif layout == "transposed":
        x = x.mT.contiguous().mT
    else:
        x = x[:1, :1].expand(2, 6, 14, 16)
    codes = intflash.quantize(x)
    for inputs in ([x] * 3, [codes] * 3):
        options = dict(method=method, out_dtype=torch.int8)
        found = intflash.attention(*inputs, backend="cpu", **options)
        assert torch.equal(found.data, intflash.attention(*inputs, backend="reference", **options).data)
