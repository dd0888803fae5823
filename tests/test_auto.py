"""`method="auto"`: one table decides, by the number of keys alone, on every way to a kernel."""

import math
from types import SimpleNamespace

import pytest
import torch

import intflash
from intflash import InputError, methods
from intflash.backends import backends
from intflash.call import prepare
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


def test_it_is_the_default_of_every_call_model_and_calibration():
    q, k, v = randn(1, 2, 9, 16)
    k *= 4
    expected = intflash.attention(q, k, v, method="auto")
    assert torch.equal(intflash.attention(q, k, v), expected) and torch.equal(intflash.sdpa(q, k, v), expected)
    assert torch.equal(torch.compile(intflash.sdpa, backend="aot_eager", fullgraph=True)(q, k, v), expected)
    assert torch.equal(expected, intflash.attention(q, k, v, method=AUTO_RULES[0].method, backend="reference"))
    assert intflash.which_method(q, k, v) == AUTO_RULES[0].method
    assert not torch.equal(expected, intflash.attention(q, k, v, method="intflash"))
    assert intflash.patch(load_model("vit")).method == "auto"
    scales = intflash.calibrate(load_model("vit"), [torch.rand(2, 1, 8, 8)])
    assert scales.method == "auto"  # all that it may be take these scales
    assert intflash.patch(load_model("vit"), scales=scales).method == "auto"


def test_more_keys_than_intflash_holds():
    q, k = randn(1, 1, 2, 8)[0], randn(1, 1, (1 << 16) + 1, 8)[0]
    assert torch.isfinite(intflash.sdpa(q, k, k)).all()
    with pytest.raises(InputError, match="at most 65536 keys"):
        intflash.attention(q, k, k, method="intflash")


def test_scales_of_another_method_stay_its_own(tmp_path):
    intflash.calibrate(load_model("vit"), [torch.rand(2, 1, 8, 8)], "intflash", path=tmp_path / "scales.json")
    assert intflash.patch(load_model("vit"), scales=tmp_path / "scales.json").method == "intflash"
    assert intflash.patch(load_model("vit"), "auto", tmp_path / "scales.json").method == "auto"


def test_a_backend_without_a_kernel_of_the_default_says_what_to_name():
    problem = prepare(*randn(1, 1, 4, 8))[0]
    reason = backends()["vortex"].unsupported(problem)
    assert reason == (
        "it has no kernel of this method, the default 'auto'; it has those of intflash, intflash_p8, fp32: pass one of "
        "them as method"
    )


@pytest.mark.parametrize("length, method", [(None, "intflash_bfp"), (20, "intflash")])
def test_sharded_calls_count_the_keys_of_all_ranks(length, method, monkeypatch):
    from intflash.distributed.plan import Placement, whole_keys

    monkeypatch.setattr(methods, "AUTO_RULES", RULES)
    ranks, k = SimpleNamespace(size=3), randn(1, 1, 7, 8)[0]
    keys = whole_keys(k, Placement("contiguous", "sharded", "sharded", length, length, None, None), ranks)
    assert methods.resolve("auto", keys) == method
    alone = Placement("contiguous", "sharded", "replicated", length, None, None, None)
    assert whole_keys(k, alone, ranks) == 7


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
