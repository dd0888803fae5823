"""Problems for the native CPU kernels: pairs of everything that they tell apart."""

import torch

from intflash import Recipe
from intflash.backends import cpu
from intflash.call import prepare
from pairwise import pairwise

ISAS = cpu.instruction_sets()
METHODS = list(cpu.METHODS)

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
    if case["out"] == torch.int8:
        options["out_scale"] = "bound"
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
