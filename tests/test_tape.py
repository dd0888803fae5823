"""Plans without a GPU: kernels are stood in for by functions that know addresses only."""

from __future__ import annotations

import ctypes
import gc
import inspect
import subprocess
import sys
import weakref

import pytest
import torch

import intflash
from intflash import plans
from intflash.quant import QTensor, Recipe, quantize
from intflash.tape import Tape, leaves, nest, note


def launch(out, x):
    """out = 2 x, six floats, as a kernel would: by address."""

    def again(addresses):
        to, of = ((ctypes.c_float * 6).from_address(a) for a in addresses)
        for i in range(6):
            to[i] = 2 * of[i]

    again([out.data_ptr(), x.data_ptr()])
    note(lambda: ([out, x], again))


CONSTANT = torch.full((6,), 10.0)


def call(a, b):
    hidden = torch.empty(8)[2:]
    launch(hidden, a)
    filled = torch.zeros(6).copy_(b)
    doubled = torch.empty(2, 6)[1]
    launch(doubled, filled)
    with_constant = torch.empty(6)
    launch(with_constant, CONSTANT)
    out = torch.empty(6)
    launch(out, hidden)
    codes = quantize(torch.stack([doubled, with_constant]).view(1, 1, 2, 6))
    return out.view(2, 3), codes, None, torch.max(doubled, 0).values


def planned(call, *tensors):
    with Tape(list(tensors)) as tape:
        result = call(*tensors)
    return tape.plan(result)


def pair():
    return torch.randn(6), torch.randn(6)


def test_a_plan_does_the_call_again_for_other_tensors():
    plan = planned(call, *pair())
    for _ in range(3):
        a, b = pair()
        before = a.clone(), b.clone()
        want, got = call(a, b), plan.run([a, b])
        assert isinstance(got[1], QTensor) and got[2] is None
        assert all(torch.equal(x, y) for x, y in zip(leaves(want), leaves(got), strict=True))
        assert torch.equal(a, before[0]) and torch.equal(b, before[1])


def test_results_are_memory_of_their_own():
    plan = planned(call, *pair())
    first = plan.run(list(pair()))[0]
    kept = first.clone()
    plan.run(list(pair()))
    assert torch.equal(first, kept)


def test_a_plan_keeps_no_tensor_of_the_call_that_it_was_made_from():
    a, b = pair()
    watched = weakref.ref(a), weakref.ref(b)
    plan = planned(call, a, b)
    del a, b
    gc.collect()
    assert plan is not None and [ref() for ref in watched] == [None, None]
    assert sum(isinstance(x, torch.Tensor) for x in plan.others) == 1  # the constant


def test_addresses_follow_views_of_arguments_and_of_what_is_made():
    def shifted(a, b):
        out = torch.empty(3, 6)
        launch(out[1], a[1:])
        launch(out[2], b.view(2, 6)[1])
        return out[1:]

    def tensors():
        return torch.randn(7), torch.randn(12)

    plan = planned(shifted, *tensors())
    a, b = tensors()
    assert torch.equal(plan.run([a, b]), torch.stack([a[1:], b[6:]]) * 2)


def test_no_plan_where_the_host_reads_or_nothing_is_launched_or_an_argument_is_hidden():
    def reads(a, b):
        out = torch.empty(6)
        launch(out, a)
        return out * b.sum().item()

    def draws(a, b):
        out = torch.rand(6)
        launch(out, a)
        return out

    def hidden(a, b):
        with torch.utils._python_dispatch._disable_current_modes():
            alias = a.view(6)
        out = torch.empty(6)
        launch(out, alias)
        return out

    def shaped(a, b):
        out = torch.empty(6)
        launch(out, a)
        return torch.nonzero(b)

    def by_keyword(a, b):
        out = torch.empty(6)
        launch(out, a)
        return torch.mul(a, 2, out=torch.empty(6))

    for function in (reads, draws, hidden, shaped, by_keyword, torch.add):
        assert planned(function, *pair()) is None


def test_hidden_buffers_lie_apart_at_multiples_of_256_bytes():
    seen = []

    def two(a, b):
        x, y, out = torch.empty(3), torch.empty(5), torch.empty(6)
        note(lambda: ([x, y], seen.append))
        launch(out, a)
        return out

    planned(two, *pair()).run(list(pair()))
    ((x, y),) = seen
    assert x != y and (x - y) % 256 == 0


def test_memory_that_is_made_of_zeros_is_so_again():
    seen = []

    def read(addresses):
        seen.extend((ctypes.c_float * 64).from_address(addresses[0]))

    def zeroed(a, b):
        x, out = torch.zeros(64), torch.empty(6)
        note(lambda: ([x], read))
        launch(out, a)
        return out

    plan = planned(zeroed, *pair())
    torch.use_deterministic_algorithms(True)  # fills what torch.empty makes with NaN
    try:
        plan.run(list(pair()))
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [0.0] * 64


def test_without_a_tape_nothing_is_noted():
    note(lambda: pytest.fail("asked for"))


def arguments(**changes):
    q, k, v = (torch.zeros(1, 2, 8, 16) for _ in "qkv")
    return dict.fromkeys(plans.NAMES) | dict(q=q, k=k, v=v, is_causal=False) | changes


def test_a_signature_has_every_argument():
    assert list(plans.NAMES) == list(inspect.signature(intflash.attention).parameters)


BASE = torch.zeros(4096)
CODES = torch.zeros(1, 2, 8, 16, dtype=torch.int8)


@pytest.mark.parametrize(
    "change",
    [
        dict(q=torch.zeros(1, 2, 9, 16)),
        dict(q=torch.zeros(1, 2, 8, 16).half()),
        dict(q=torch.zeros(1, 8, 2, 16).transpose(1, 2)),
        dict(q=BASE[1:257].view(1, 2, 8, 16)),
        dict(q=BASE[4:260].view(1, 2, 8, 16)),
        dict(q=QTensor(CODES, 1.0)),
        dict(q=QTensor(CODES, torch.ones(2), "head")),
        dict(q=QTensor(CODES, 1.0, bits=4)),
        dict(k=None),
        dict(attn_mask=torch.ones(8, 8)),
        dict(scale=0.5),
        dict(is_causal=True),
        dict(recipe=Recipe()),
        dict(recipe=Recipe(q_scale=0.5)),
        dict(recipe=Recipe(q_scale=torch.tensor(0.5))),
        dict(recipe=Recipe(q="head", q_scale=torch.ones(2))),
        dict(recipe=Recipe(q="head", q_scale=torch.ones(1, 2, 1, 1))),
    ],
    ids=str,
)
def test_what_a_launch_may_depend_on_makes_another_signature(change):
    changed = [key for key, _ in (plans.signature(arguments()), plans.signature(arguments(**change)))]
    assert changed[0] != changed[1]


RECIPES = dict(
    q="tensor", k="tensor", v="tensor", bits=4, block_size=64, smooth_k=True, rotate=True, rule="divide", q_scale=0.5,
    k_scale=0.5, v_scale=0.5,
)  # fmt: skip


@pytest.mark.parametrize("name", Recipe.__dataclass_fields__)
def test_every_field_of_a_recipe_makes_another_signature(name):
    keys = [plans.signature(arguments(recipe=r))[0] for r in (Recipe(), Recipe(**{name: RECIPES[name]}))]
    assert keys[0] != keys[1]


@pytest.mark.parametrize("name", plans.NAMES)
def test_every_argument_makes_another_signature(name):
    other = torch.ones(2, 3) if name in plans._TENSORS else Recipe() if name == "recipe" else "other"
    assert plans.signature(arguments())[0] != plans.signature(arguments(**{name: other}))[0]


def test_granularity_blocks_alignment_and_device_make_another_signature():
    def key(q):
        return plans.signature(arguments(q=q))[0]

    one = torch.zeros(1, 1, 8, 16, dtype=torch.int8)
    assert key(QTensor(one, torch.ones(1, 1, 1, 1), "head")) != key(QTensor(one, torch.ones(1, 1, 1, 1)))
    assert len({key(QTensor(CODES, torch.ones(1, 2, 1, 1), "block", n)) for n in (8, 16)}) == 2
    q = torch.zeros(1, 2, 8, 16)
    unaligned = torch.zeros(257)[1:].view(1, 2, 8, 16)  # as many bytes from it to the storage's end
    assert key(q) not in (key(unaligned), key(q.to("meta")))


def test_values_and_addresses_do_not():
    def key(value):
        codes = torch.full((1, 2, 8, 16), value, dtype=torch.int8)
        recipe = Recipe(q_scale=torch.tensor(float(value)))
        return plans.signature(arguments(q=QTensor(codes, float(value)), recipe=recipe))[0]

    kept = [key(i) for i in range(1, 5)]
    assert len(set(kept)) == 1


def test_a_recipe_is_known_as_long_as_its_scales_lie_where_they_lay():
    def key(recipe):
        return plans.signature(arguments(recipe=recipe))[0]

    scale = torch.ones(1, 2, 1, 1)
    recipe = Recipe(q="head", q_scale=scale)
    first = key(recipe)
    assert key(recipe) == first == key(Recipe(q="head", q_scale=scale.clone()))
    scale.data = torch.ones(2)
    assert key(recipe) != first
    numbers = [key(Recipe(k_scale=float(i))) for i in range(1, 9)]  # one may take the place of another that is gone
    assert len(set(numbers)) == 8


def test_one_tensor_in_two_places_is_a_signature_of_its_own():
    x = torch.zeros(1, 2, 8, 16)
    keys = [plans.signature(arguments(**two))[0] for two in (dict(q=x, k=x), dict(q=x, v=x), dict(k=x, v=x), {})]
    assert len(set(keys)) == 4


def test_tensors_of_other_classes_have_no_signature():
    class Own(torch.Tensor):
        pass

    own = torch.zeros(1, 2, 8, 16).as_subclass(Own)
    for changed in (dict(q=own), dict(bias=own), dict(recipe=Recipe(v_scale=own))):
        assert plans.signature(arguments(**changed)) is None
    assert plans.signature(arguments(q=torch.nn.Parameter(torch.zeros(1, 2, 8, 16)))) is not None
    assert plans.signature(arguments(q=torch.zeros(1, 2, 8, 16).to_sparse())) is None


def test_a_nest_is_filled_in_the_order_of_its_leaves():
    x, y = pair()
    made = nest(((x, 1, 2), [3, (y, None)], "z"))
    assert made(iter("ab")) == (("a", 1, 2), [3, ("b", None)], "z")
    assert nest((1, [2, "z"])) is None


def test_what_no_later_step_needs_is_let_go():
    made = []

    def chain(a, b):
        for _ in range(3):
            a = a * 2
            made.append(weakref.ref(a))
        out = torch.empty(6)
        launch(out, a)
        return out

    plan = planned(chain, *pair())
    slots = list(pair()) + plan.others
    for step, done in plan.steps:
        step(slots)
        for i in done:
            slots[i] = None
    assert sum(x is not None for x in slots) == 2  # the argument that is not used, and the result
    a, b = pair()
    assert torch.equal(plan.run([a, b]), a * 16)


def test_reading_a_flag_from_a_tensor_leaves_no_plan():
    def flagged(a, b):
        out = torch.empty(6)
        launch(out, a if bool(b[0] > 0) else b)
        return out

    with torch.inference_mode():
        assert planned(flagged, *pair()) is None


def test_a_tape_does_not_import_dynamo():
    code = """
import sys, torch
from intflash.tape import Tape
with Tape([]): torch.zeros(2) + 1
print("torch._dynamo" in sys.modules)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
