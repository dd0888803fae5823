"""`patch` and `unpatch` on the digit models: refusals, failures, and the cores."""

import functools
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import intflash
import intflash.models.bias as bias_codes
from intflash.digits import load_model
from intflash.models.base import FloatCore, IntegerCore, _Redirect
from intflash.models.patch import attach, layers_of
from oracle import randn, sqnr
from peaked_models import run


def test_an_unknown_backend_is_refused_at_once():
    with pytest.raises(intflash.InputError, match="unknown backend 'nope'"):
        intflash.patch(load_model("vit"), backend="nope")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(model="vit"), "takes an nn.Module and a Recipe, got str"),
        (dict(recipe={"q": "head"}), "takes an nn.Module and a Recipe, got DigitsViT, dict"),
        (dict(scales=3), "Scales or the path of their file, got int"),
        (dict(scales="/nope.json"), "the scales file /nope.json cannot be read: No such file"),
    ],
)
def test_arguments_of_other_kinds_are_refused(arguments, message):
    with pytest.raises(intflash.InputError, match=message):
        intflash.patch(arguments.pop("model", None) or load_model("vit"), **arguments)


def test_a_patch_that_fails_midway_changes_nothing():
    model, image = load_model("swin"), torch.rand(2, 1, 8, 8)
    reference, made = run(model, image), []

    def make(name):
        if len(made) == 2:
            raise intflash.InputError(f"no core for {name}")
        made.append(IntegerCore("intflash", None))
        return made[-1]

    with pytest.raises(intflash.InputError, match="no core for"):
        attach(model, make)
    assert not layers_of(model) and torch.equal(run(model, image), reference)
    assert len(intflash.patch(model).replaced) == 4


@pytest.mark.parametrize("name", ["vit", "swin"])
def test_a_pickled_model_stays_patched(name):
    model, image = load_model(name), torch.rand(2, 1, 8, 8)
    reference = run(model, image)
    intflash.patch(model)
    twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(run(twin, image), run(model, image))
    twin.load_state_dict(model.state_dict())  # its hooks work
    intflash.unpatch(twin)
    assert torch.equal(run(twin, image), reference)


@pytest.mark.parametrize("shape", [(4, 4), (2, 4, 4), (1, 2, 4, 4), (2, 1, 4, 4), (8, 1, 1, 4)])
def test_float_and_integer_cores_take_the_same_masks(shape):
    torch.manual_seed(0)
    q, mask = torch.randn(8, 2, 4, 8), torch.rand(shape) > 0.4
    mask[..., 0] = True
    core = IntegerCore("fp32", None).eval()
    assert torch.allclose(FloatCore()(q, q, q, mask), core(q, q, q, mask), atol=1e-5)


def test_a_redirected_call_keeps_every_argument():
    q, k, v = randn(2, 4, 20, 16)
    core, mask = IntegerCore("fp32", None).eval(), torch.rand(20, 20, generator=torch.Generator().manual_seed(0)) > 0.3
    cases = (4, dict(scale=0.7)), (4, dict(is_causal=True)), (4, dict(attn_mask=mask)), (2, dict(enable_gqa=True))
    for heads, options in cases:
        want = F.scaled_dot_product_attention(q, k[:, :heads], v[:, :heads], **options)
        with _Redirect(core):
            got = F.scaled_dot_product_attention(q, k[:, :heads], v[:, :heads], **options)
        assert torch.allclose(got, want, atol=1e-5)
    with _Redirect(core), pytest.raises(intflash.InputError, match="dropout_p must be 0"):
        F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)


def test_an_unpatched_model_loads_weights():
    model = load_model("swin")
    intflash.patch(model)
    intflash.unpatch(model)
    model.load_state_dict(model.state_dict())


def test_patch_passes_its_options_to_every_layer():
    model, recipe, image = load_model("vit"), intflash.Recipe(q="head", k="head", v="head"), torch.rand(2, 1, 8, 8)
    with intflash.patch(model, recipe=recipe, backend="torch", check_finite=True):
        assert all(m.intflash_attention.recipe == recipe for m in layers_of(model).values())
        with pytest.raises(intflash.InputError, match="must be finite"):
            run(model, image * float("nan"))
    with intflash.patch(model, backend="vortex"), pytest.raises(intflash.BackendError, match="vortex"):
        run(model, image)


def test_calibrate_and_unpatch_refuse_other_objects():
    with pytest.raises(intflash.InputError, match="unpatch takes an nn.Module, got NoneType"):
        intflash.unpatch(None)
    with pytest.raises(intflash.InputError, match="calibrate takes an nn.Module, got NoneType"):
        intflash.calibrate(None, [torch.rand(1, 1, 8, 8)])


class Direct(nn.Module):
    """A layer of no known library: self-attention by torch's call, and one more call with the keys of a second
    input.
    """

    def __init__(self, is_causal=False):
        super().__init__()
        self.qkv, self.kv = nn.Linear(32, 96), nn.Linear(32, 64)
        self.causal = is_causal

    def forward(self, x, other=None):
        q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = self._attend(q, k, v)
        if other is not None:
            k, v = (z.unflatten(-1, (4, 8)).transpose(1, 2) for z in self.kv(other).chunk(2, -1))
            y = y + F.scaled_dot_product_attention(q, k, 50 * v)
        return y.transpose(1, 2).flatten(2)

    def _attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


class Softmax(nn.Module):
    """An attention layer that cannot be patched."""

    def forward(self, x):
        return torch.softmax(x @ x.mT, -1) @ x


class SelfAttention(Softmax):
    pass


def direct(**options) -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleList([Direct(**options)]).eval()


def test_a_layer_that_calls_sdpa_itself_is_served():
    model, x = direct(), torch.randn(2, 9, 32)
    reference = run(model[0], x)
    with intflash.patch(model, "fp32") as report:
        assert report.replaced == {"0": "Direct"}
        assert sqnr(reference, run(model[0], x)) > 100
    with intflash.patch(model):
        assert 25 < sqnr(reference, run(model[0], x)) < 100
        assert 25 < sqnr(reference, run(pickle.loads(pickle.dumps(model))[0], x)) < 100
    assert torch.equal(run(model[0], x), reference) and type(model[0]) is Direct


def test_a_layer_that_cannot_be_served_is_pointed_to_sdpa():
    with pytest.raises(intflash.InputError, match=r"no adapter for .*SelfAttention(.|\n)*can call intflash.sdpa"):
        intflash.patch(nn.Sequential(SelfAttention()))


def test_each_call_in_a_forward_has_its_own_static_scales():
    """The second call's values are 50 times larger. One scale for both would cost the first call 34 dB."""
    model, x, other = direct(), torch.randn(2, 9, 32), torch.randn(2, 5, 32)
    alone = run(model[0], x)
    reference = run(model[0], x, other)
    scales = intflash.calibrate(model, [(x, other)], forward=lambda model, batch: model[0](*batch))
    assert list(scales.layers) == ["0", "0#1"]
    first, second = scales.layers["0"], scales.layers["0#1"]
    assert first.q == second.q and second.v[0] > 20 * first.v[0]
    core = None
    with intflash.patch(model, scales=scales):
        assert 30 < sqnr(reference, run(model[0], x, other)) < 100
        core = model[0].intflash_attention
        assert core.recipe.v_scale == first.v[0] and core.others[0].recipe.v_scale == second.v[0]
        with pytest.raises(intflash.InputError, match="static scales are for 2 attention calls .* it made 1"):
            run(model[0], x)
    with intflash.patch(model):
        assert 30 < sqnr(reference, run(model[0], x, other)) < 100 and 25 < sqnr(alone, run(model[0], x))
    with pytest.raises(intflash.InputError, match="called attention 2 times in one forward and 1 times in another"):
        intflash.calibrate(model, [(x, other), (x,)], forward=lambda model, batch: model[0](*batch))
    with pytest.raises(intflash.InputError, match="called attention 1 times in one forward and 2 times in another"):
        intflash.calibrate(model, [(x,), (x, other)], forward=lambda model, batch: model[0](*batch))


def future(model, x, **options):
    """Returns the outputs of the first tokens with two endings, of which the second is ten times larger."""
    ending = x.clone()
    ending[:, 6:] = 10 * torch.randn_like(ending[:, 6:])
    return run(model, x, **options)[:, :6], run(model, ending, **options)[:, :6]


def test_by_default_later_tokens_do_not_change_earlier_outputs():
    model, x = direct(is_causal=True), torch.randn(2, 9, 32)
    reference = run(model[0], x)
    with intflash.patch(model):
        a, b = future(model[0], x)
        assert torch.equal(a, b) and 30 < sqnr(reference, run(model[0], x)) < 100
    scales = intflash.calibrate(model, [x], forward=lambda model, batch: model[0](batch))
    with intflash.patch(model, scales=scales):
        a, b = future(model[0], x)
        assert torch.equal(a, b)
    with intflash.patch(model, recipe=intflash.Recipe()):  # asked for: the recipe is taken as it is
        a, b = future(model[0], x)
        assert not torch.equal(a, b)
    with intflash.patch(model, "intflash"), pytest.raises(intflash.InputError, match="later tokens would change"):
        run(model[0], x)


@pytest.mark.parametrize("name", intflash.info()["methods"])
def test_methods_are_refused_in_causal_layers_or_keep_them_causal(name):
    model, x = direct(is_causal=True), torch.randn(2, 9, 32)
    with intflash.patch(model, name):
        try:
            a, b = future(model[0], x)
        except intflash.InputError as error:
            assert "later tokens would change earlier outputs" in str(error)
        else:
            assert torch.equal(a, b)


def wrap(module, skip=lambda: False):
    """Wraps a layer as accelerate and diffusers do: `forward` becomes an attribute that calls the original."""
    inner = module.forward

    def forward(module, *args, **kwargs):
        return args[0] * 0 if skip() else inner(*args, **kwargs)

    module.forward = functools.update_wrapper(functools.partial(forward, module), inner)


def test_a_layer_with_a_wrapped_forward_is_reached():
    model, x = direct(), torch.randn(2, 9, 32)
    reference, skipping = run(model[0], x), []
    wrap(model[0], lambda: bool(skipping))
    wrapper = model[0].forward
    with intflash.patch(model) as report:
        assert report.ran == [] and "not reached" not in str(report)
        assert 25 < sqnr(reference, run(model[0], x)) < 100
        assert report.ran == ["0"]
        skipping.append(True)  # a cache that returns what it has
        assert not run(model[0], x).any()
    skipping.clear()
    assert model[0].forward is wrapper and torch.equal(run(model[0], x), reference)


def test_a_wrapper_added_after_patch_survives_unpatch():
    model, x = direct(), torch.randn(2, 9, 32)
    reference = run(model[0], x)
    intflash.patch(model)
    wrap(model[0])
    assert 25 < sqnr(reference, run(model[0], x)) < 100
    intflash.unpatch(model)
    assert torch.equal(run(model[0], x), reference)


def test_the_report_says_which_layers_ran():
    model = nn.ModuleList([Direct(), Direct()]).eval()
    report = intflash.patch(model)
    run(model[0], torch.randn(2, 9, 32))
    assert report.ran == ["0"] and "not reached by any forward so far: 1" in str(report)


class Shared(nn.Module):
    """Two layers that are given one float bias, or one float mask."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Biased(), Biased()])

    def forward(self, x, bias):
        for layer in self.layers:
            x = x + layer(x, bias)
        return x


class Biased(Direct):
    def forward(self, x, bias):
        q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(2)


@pytest.fixture
def quantized(monkeypatch):
    """The biases that were quantized."""
    seen = []
    codes = bias_codes.bias_codes
    monkeypatch.setattr(bias_codes, "bias_codes", lambda x, bits: seen.append(x) or codes(x, bits))
    return seen


@pytest.mark.parametrize("method", [None, "intflash", "intflash_bfp"])
def test_a_float_bias_is_quantized_once_until_it_changes(method, quantized):
    torch.manual_seed(0)
    model, x = Shared().eval(), torch.randn(2, 9, 32)
    biases = [torch.randn(1, 4, 9, 9), torch.randn(9, 9).masked_fill(torch.rand(9, 9) > 0.8, float("-inf"))]

    def outputs():
        return [run(model, x, bias) for bias in biases]

    with intflash.patch(model, method):
        first = outputs()
        assert len(quantized) == 2  # for two layers
        assert all(map(torch.equal, first, outputs())) and len(quantized) == 2
        for bias in biases:
            bias.mul_(2)
        second = outputs()
        assert len(quantized) == 4 and not any(map(torch.equal, first, second))
        assert all(torch.equal(a, run(model, x, b.clone())) for a, b in zip(second, biases, strict=True))
        with torch.inference_mode():  # whose tensors do not count their changes
            bias, count = biases[0].clone(), len(quantized)
            assert torch.equal(model(x, bias), second[0])
            bias.zero_()
            assert torch.equal(model(x, bias), run(model, x, torch.zeros(9, 9)))
            assert len(quantized) == count
    with intflash.patch(model, check_finite=True), pytest.raises(intflash.InputError, match="must not hold NaN"):
        run(model, x, torch.full((9, 9), float("nan")))


@pytest.mark.parametrize("method", ["intflash_bfp", "auto", "fp32", "int_flash_half"])
def test_a_bias_past_the_range_of_codes_stays_in_floats(method, quantized):
    torch.manual_seed(0)
    model, x, bias = Shared().eval(), torch.randn(2, 9, 32), 5000 * torch.randn(1, 4, 9, 9)
    reference = run(model, x, bias)
    with intflash.patch(model, method):
        assert sqnr(reference, run(model, x, bias)) > 20
        assert len(quantized) == (1 if "int_flash" not in method and method != "fp32" else 0)  # to find it out


@pytest.mark.parametrize("method", ["intflash", "intflash_bfp", "auto"])
def test_codes_give_the_bits_of_the_float_bias(method):
    """Up to the last value that codes hold, and held by a layer."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 9, 16) for _ in range(3))
    bits, bound = bias_codes.fraction_bits(method), 1419.5
    for largest in (1.0, 100.0, bound):
        bias = (torch.rand(1, 2, 9, 9) * 2 - 1) * largest
        bias[..., 0], bias[..., 4] = largest, float("-inf")
        codes = bias_codes.exact_codes(bias, bits)
        assert codes.dtype == torch.int32 and (codes == intflash.numerics.exp.ABSENT).sum() == 18
        for backend in ("cpu", "torch", "reference"):
            options = dict(method=method, backend=backend)
            expected = intflash.attention(q, k, v, bias=bias, **options)
            assert torch.equal(intflash.attention(q, k, v, bias=codes, **options), expected)
        core = IntegerCore(method, None).eval()
        core.hold(bias)
        assert core.bias.dtype == torch.int32
        assert torch.equal(core(q, k, v, bias=core.bias), intflash.attention(q, k, v, bias=bias, method=method))


def test_a_layer_holds_a_bias_past_the_range_of_codes_in_floats():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 9, 16) for _ in range(3))
    bias = torch.randn(1, 2, 9, 9) * 5000
    core = IntegerCore("auto", None).eval()
    core.hold(bias)
    assert core.bias.dtype == torch.float32
    assert torch.equal(core(q, k, v, bias=core.bias), intflash.attention(q, k, v, bias=bias))


@pytest.mark.gpu
def test_a_float_bias_in_a_cuda_graph_is_quantized_by_each_replay():
    torch.manual_seed(0)
    model, x, bias = Shared().eval().cuda(), torch.randn(2, 9, 32).cuda(), torch.randn(1, 4, 9, 9).cuda()
    with intflash.patch(model):
        before = run(model, x, bias)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            assert torch.equal(run(model, x, bias), before)  # a stream of its own, and the warm-up of the graph
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(model, x, bias)
        bias.mul_(2)
        graph.replay()
        changed = run(model, x, bias)
        assert torch.equal(out, changed) and not torch.equal(out, before)


class Windows(nn.Module):
    """Self-attention of windows. order: how the axes after the first of [batch, windows, tokens, heads, channels] are
    permuted for torch's attention.
    """

    def __init__(self, order):
        super().__init__()
        self.qkv, self.order, self.num_heads = nn.Linear(32, 96), order, 4

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (4, 8)).unflatten(1, (4, -1)) for y in self.qkv(x).chunk(3, -1))
        order = (0, *self.order)
        y = F.scaled_dot_product_attention(*(z.permute(order) for z in (q, k, v)))
        return y.permute([order.index(i) for i in range(5)]).flatten(3).flatten(1, 2)


def test_calls_of_five_axes_have_scales_of_their_heads():
    torch.manual_seed(0)
    model, x = nn.Sequential(Windows((1, 3, 2, 4))).eval(), torch.randn(2, 32, 32)
    x[:, :8] *= 0.01  # the first window's scales would not do for the first head
    reference = run(model, x)
    for granularity in ({}, dict(q="head", k="head", v="head"), dict(v="channel")):
        scales = intflash.calibrate(model, [x], granularity=granularity)
        assert (scales.layers["0"].heads, scales.layers["0"].head_dim) == (4, 8)
        with intflash.patch(model, scales=scales):
            assert sqnr(reference, run(model, x)) > 35


def test_heads_on_another_axis_have_scales_of_tensors_only():
    torch.manual_seed(0)
    model, x = nn.Sequential(Windows((3, 1, 2, 4))).eval(), torch.randn(2, 64, 32)
    model[0].num_heads = 16  # another number than the windows, which are on the axis of heads
    with pytest.raises(
        intflash.InputError, match="has 16 heads, but axis -3 of its attention's tensors has 4: calibrate"
    ):
        intflash.calibrate(model, [x], granularity=dict(q="head"))
    reference = run(model, x)
    with intflash.patch(model, scales=intflash.calibrate(model, [x])):
        assert sqnr(reference, run(model, x)) > 30


class Holder(Direct):
    """A layer that calls torch's attention itself and holds another patched layer."""

    def __init__(self):
        super().__init__()
        self.cross = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x):
        y = super().forward(x)
        return y + self.cross(y, y, y, need_weights=False)[0]


def test_a_layer_does_not_count_the_calls_of_a_layer_inside():
    torch.manual_seed(0)
    model, x = nn.Sequential(Holder()).eval(), torch.randn(2, 9, 32)
    reference = run(model, x)
    scales = intflash.calibrate(model, [x])
    assert list(scales.layers) == ["0", "0.cross"]
    with intflash.patch(model, scales=scales):
        assert sqnr(reference, run(model, x)) > 30


def test_calls_of_two_axes_are_one_head():
    class OneHead(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x)

    model, x = nn.Sequential(OneHead()).eval(), torch.randn(5, 8)
    reference = run(model, x)
    with intflash.patch(model, "fp32"):
        assert run(model, x).shape == (5, 8) and sqnr(reference, run(model, x)) > 100


def test_a_subclass_of_torchs_attention_is_reported_as_left():
    class Mixer(nn.MultiheadAttention):
        pass

    model = nn.Sequential(Mixer(32, 4), nn.MultiheadAttention(32, 4)).eval()
    assert "Mixer" in intflash.patch(model).left["0"]


def test_scales_of_weights_that_are_not_there_are_refused():
    model = direct()
    scales = intflash.calibrate(model, [torch.randn(2, 9, 32)], forward=lambda model, x: model[0](x))
    with pytest.raises(intflash.InputError, match="those of Direct are on device meta"):
        intflash.patch(model.to("meta"), scales=scales)


def test_calibration_takes_batches_of_any_kind_with_forward():
    model, x = direct(), torch.randn(3, 9, 32)

    def images(*batches):
        return intflash.calibrate(model, batches, forward=lambda model, _: model[0](x)).images

    assert images(0, 1) == 2 and images("", "a prompt") == 2 and images({"flag": True, "x": x}) == 3
    for batches in (None, 5):
        with pytest.raises(intflash.InputError, match="batches must be an iterable of inputs"):
            intflash.calibrate(model, batches)
