"""`method="auto"`: one table decides, by the number of keys alone, on every way to a kernel."""

import math

import pytest
import torch

import intflash
from intflash import InputError, methods
from intflash.digits import load_model
from intflash.methods import AUTO_RULES, METHODS, Rule
from oracle import randn

RULES = (Rule(20, "intflash"), Rule(math.inf, "intflash_bfp"))  # methods of one recipe, to see the number of keys


def test_rules_end_and_share_what_depends_on_no_shape():
    assert AUTO_RULES[-1].keys == math.inf and sorted(r.keys for r in AUTO_RULES) == [r.keys for r in AUTO_RULES]
    of = [METHODS[rule.method] for rule in AUTO_RULES]
    assert all(
        (m.recipe, m.granularities, m.bias_fraction_bits, m.out_dtypes)
        == (of[0].recipe, of[0].granularities, of[0].bias_fraction_bits, of[0].out_dtypes)
        for m in of
    )
    assert methods.AUTO not in METHODS


@pytest.mark.parametrize("keys, method", [(20, "intflash"), (21, "intflash_bfp")])
def test_every_way_computes_the_method_of_the_table(keys, method, monkeypatch):
    monkeypatch.setattr(methods, "AUTO_RULES", RULES)
    torch._dynamo.reset()
    (q,), (k, v) = randn(1, 2, 9, 16)[:1], randn(1, 2, keys, 16)[1:]
    k *= 4  # weights below those that `intflash` holds tell the two methods apart
    assert intflash.which_method(q, k, v, method="auto") == method
    expected = intflash.attention(q, k, v, method=method, backend="reference", return_lse=True)
    other = intflash.attention(q, k, v, method=next(r.method for r in RULES if r.method != method))

    def call(q, k, v, **options):
        return intflash.attention(q, k, v, method="auto", return_lse=True, **options)

    ways = [call(q, k, v), call(q, k, v, backend="reference"), call(q, k, v, backend="torch")]
    ways.append(torch.compile(call, backend="aot_eager", fullgraph=True)(q, k, v))
    with torch.autograd.profiler.profile():  # nothing depends on how torch sees the call
        ways.append(call(*(x[0] for x in (q, k, v))))
    for out, lse in ways:
        assert torch.equal(out.view_as(expected[0]), expected[0]) and not torch.equal(out.view_as(other), other)
        assert torch.allclose(lse.view_as(expected[1]), expected[1])


def test_auto_is_refused_where_the_whole_number_of_keys_is_not_known():
    from intflash.distributed.plan import METHODS as SHARDED

    assert "auto" not in SHARDED


def test_bad_keys_get_their_own_error():
    q = randn(1, 1, 4, 8)[0]
    with pytest.raises(InputError, match="all float tensors, all QTensors, or .*, got"):
        intflash.attention(q, None, q, method="auto")
    with pytest.raises(InputError, match="unknown method 'automatic'; there are: auto, "):
        intflash.which_method(q, q, q, method="automatic")


def test_patched_models_and_calibration_take_it():
    x = torch.rand(2, 1, 8, 8)
    expected, found = (load_model("vit") for _ in range(2))
    intflash.patch(expected, AUTO_RULES[0].method)
    assert "auto (dynamic scales)" in str(intflash.patch(found, "auto"))
    with torch.inference_mode():
        assert torch.equal(found(x), expected(x))
    scales = intflash.calibrate(load_model("vit"), [x], "auto")
    model = load_model("vit")
    assert intflash.patch(model, scales=scales).method == "auto"
    with torch.inference_mode():
        assert torch.isfinite(model(x)).all()
