"""Repeated calls on the `cpu` backend run by a plan from the third on, with the bits and errors of the first."""

import pytest
import torch

import intflash
from intflash import Recipe, plans
from intflash.backends import cpu
from intflash.tape import Plan, leaves

pytestmark = pytest.mark.skipif(not cpu.instruction_sets(), reason="the native module was not built")


REPEATED = {
    "dynamic": {},
    "static": dict(recipe=Recipe(q_scale=0.02, k_scale=0.03, v_scale=0.02)),
    "heads": dict(recipe=Recipe(q="head", k="head", v="head")),
    "scale tensors": dict(recipe=Recipe(q_scale=torch.tensor(0.02), k_scale=0.03, v_scale=0.02), check_finite=False),
    "smooth": dict(recipe=Recipe(smooth_k=True), check_finite=False),
    "tokens": dict(recipe=Recipe(q="token"), check_finite=False),
    "causal": dict(is_causal=True),
    "lse": dict(return_lse=True),
    "integer": dict(out_dtype=torch.int8),
    "unchecked": dict(check_finite=False),
    "gqa": dict(enable_gqa=True),
}
PLANNED = {"dynamic", "static", "heads", "causal", "unchecked", "gqa", "smooth"}


@pytest.mark.parametrize("name", REPEATED)
@pytest.mark.parametrize("method", ["intflash", "intflash_p8", "intflash_online"])
def test_repeated_calls_give_the_bits_of_single_ones(method, name, monkeypatch):
    monkeypatch.setattr(plans, "_plans", {})
    options, known = dict(method=method) | REPEATED[name], []
    for i in range(5):
        packed = torch.randn(2, 30, 3, 4, 16) * (i + 1)
        q, k, v = packed.permute(2, 0, 3, 1, 4).half() if i % 2 else packed.permute(2, 0, 3, 1, 4)
        if name == "gqa":
            k, v = k[:, :2], v[:, :2]
        if name == "scale tensors":  # the same signature, other values
            options["recipe"] = Recipe(q_scale=torch.tensor(0.02 * (i + 1)), k_scale=0.03, v_scale=0.02)
        for _ in range(3):
            known.append((q, k, v, dict(options), intflash.attention(q, k, v, **options)))
    monkeypatch.setattr(plans, "run", lambda call, arguments: call(**arguments))
    for q, k, v, options, got in known:
        want = intflash.attention(q, k, v, **options)
        assert all(torch.equal(x, y) for x, y in zip(leaves(want), leaves(got), strict=True))
    assert any(isinstance(plan, Plan) for plan in plans._plans.values()) == (name in PLANNED)


def test_repeated_calls_look_at_their_values_and_take_the_threads_of_the_time():
    q, k, v = (torch.randn(1, 2, 200, 16) for _ in range(3))
    want = intflash.attention(q, k, v)
    for threads in (1, 2, 1, 2):
        torch.set_num_threads(threads)
        assert torch.equal(intflash.attention(q, k, v), want)
    v[0, 1, 5, 3] = torch.inf
    for _ in range(2):
        with pytest.raises(intflash.InputError, match="v must be finite, got 1 non-finite of 6400"):
            intflash.attention(q, k, v)
    v[0, 1, 5, 3] = torch.nan
    assert intflash.attention(q, k, v, check_finite=False).shape == q.shape
