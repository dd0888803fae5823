"""timm models: which layers are replaced, how close the logits are, and that nothing else changes."""

import copy
import json
import pickle
import re
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import intflash
from intflash import cli
from intflash.bench import models as bench
from intflash.errors import InputError
from intflash.models.patch import layers_of
from oracle import sqnr
from peaked_models import run, sharpen

timm = pytest.importorskip("timm")
import intflash.models.timm as adapter  # noqa: E402

FULL_SIZE = ["deit_tiny_patch16_224", "vit_small_patch16_224", "swin_tiny_patch4_window7_224"]
OTHER_SIZES = [
    "deit_small_patch16_224",
    "deit_base_patch16_224",
    "vit_base_patch16_224",
    "swin_small_patch4_window7_224",
]
LAYERS = {"swin_small_patch4_window7_224": 24}  # others: 12


@pytest.fixture(scope="module", params=FULL_SIZE + [pytest.param(name, marks=pytest.mark.full) for name in OTHER_SIZES])
def full_size(request):
    """Returns (name, model, image, float logits, calibrated scales)."""
    torch.manual_seed(0)
    model = sharpen(timm.create_model(request.param))
    image = torch.randn(1, 3, 224, 224)
    scales = intflash.calibrate(model, [torch.randn(2, 3, 224, 224), image])
    return request.param, model, image, run(model, image), scales


@pytest.mark.parametrize(
    "method, static, worst_db",
    [("intflash", False, 36), ("intflash", True, 36), ("intflash_p8", True, 35), ("intflash_online", False, 34)],
)
def test_full_size_models(full_size, method, static, worst_db):
    name, model, image, reference, scales = full_size
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with intflash.patch(model, method, scales if static else None) as report:
        logits = run(model, image)
        assert list(model.state_dict()) == list(before)
    assert len(report.replaced) == LAYERS.get(name, 12) and not report.left
    assert set(report.replaced.values()) == {"WindowAttention" if "swin" in name else "Attention"}
    assert worst_db < sqnr(reference, logits) < 100
    assert logits.argmax() == reference.argmax()
    assert torch.equal(run(model, image), reference)  # unpatched: the float model again
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    "name, options, layers",
    [
        ("vit_base_patch16_224", {"qk_norm": True, "norm_layer": torch.nn.LayerNorm}, 2),
        ("vit_base_patch16_rope_224", {}, 2),
        ("eva02_tiny_patch14_224", {}, 2),
        ("vit_relpos_small_patch16_224", {}, 2),
    ],
)
def test_other_attention_keeps_norms_rotations_and_biases(name, options, layers):
    model = sharpen(timm.create_model(name, depth=2, img_size=112, num_classes=10, **options))
    image = torch.randn(1, 3, 112, 112)
    reference = run(model, image)
    with intflash.patch(model) as report:
        logits = run(model, image)
    assert len(report.replaced) == layers
    assert 25 < sqnr(reference, logits) < 100


@pytest.mark.parametrize("qkv_bias", [True, False])
def test_swin_v2(qkv_bias):
    from timm.models.swin_transformer_v2 import SwinTransformerV2

    torch.manual_seed(0)
    options = dict(img_size=64, window_size=8, embed_dim=24, depths=(2, 2), num_heads=(2, 4), num_classes=10)
    model = sharpen(SwinTransformerV2(**options, qkv_bias=qkv_bias))
    image = torch.randn(2, 3, 64, 64)
    reference = run(model, image)
    with intflash.patch(model) as report:
        logits = run(model, image)
    assert len(report.replaced) == 4 and not report.left
    assert 28 < sqnr(reference, logits) < 100


def test_gated_attention():
    from timm.models.vision_transformer import Attention

    layer = Attention(64, num_heads=2, gated=True, qk_norm=True, scale_norm=True, norm_layer=torch.nn.LayerNorm).eval()
    x = torch.randn(2, 17, 64)
    mask = torch.rand(2, 1, 17, 17) > 0.3
    for arguments in ((x,), (x, mask), (x, None, True)):
        reference = run(layer, *arguments)
        with intflash.patch(layer):
            assert 28 < sqnr(reference, run(layer, *arguments)) < 60


def test_attention_of_a_timm_without_output_norm():
    torch.manual_seed(0)
    layer = timm.models.vision_transformer.Attention(64, num_heads=2).eval()
    x = torch.randn(2, 17, 64)
    reference = run(layer, x)
    layer._modules.pop("norm", None)  # timm 1.0.15 has none
    with intflash.patch(layer):
        assert 28 < sqnr(reference, run(layer, x)) < 60


def test_swin_v2_under_autocast():
    """The logit scale is float32, so that Q is float32 where K and V are not."""
    torch.manual_seed(0)
    layer = timm.models.swin_transformer_v2.WindowAttention(32, (4, 4), num_heads=2).eval()
    x = torch.randn(3, 16, 32)
    with torch.autocast("cpu", torch.bfloat16):
        reference = run(layer, x)
        with intflash.patch(layer):
            out = run(layer, x)
    assert out.dtype == reference.dtype and 25 < sqnr(reference, out) < 60


@pytest.mark.parametrize("scale", [2.0, 9.0])
def test_swin_v2_clamps_its_logit_scale(scale):
    torch.manual_seed(0)
    layer = timm.models.swin_transformer_v2.WindowAttention(32, (4, 4), num_heads=2).eval()
    layer.logit_scale.data.fill_(scale)
    x = torch.randn(3, 16, 32)
    reference = run(layer, x)
    with intflash.patch(layer, "fp32"):
        assert sqnr(reference, run(layer, x)) > 80


def test_masks_that_a_block_makes_for_another_size():
    core = SimpleNamespace(keep=torch.ones(4, 1, 3, 3, dtype=torch.bool))
    mask = torch.zeros(9, 3, 3)
    mask[:, 0, 1] = -100.0
    assert adapter._window_mask(core, mask[:4]) is core.keep and adapter._window_mask(core, None) is None
    assert torch.equal(adapter._window_mask(core, mask), (mask == 0)[:, None])


def test_a_model_patched_in_inference_mode_holds_ordinary_tensors():
    model = timm.models.swin_transformer.WindowAttention(32, num_heads=2, window_size=(4, 4)).eval()
    with torch.inference_mode():
        intflash.patch(model)
    held = [b for m in layers_of(model).values() for b in m.intflash_attention.buffers()]
    assert held and not any(b.is_inference() for b in held)


def test_multi_query_attention():
    """The layer gives torch one K/V head for all query heads, which torch broadcasts."""
    from timm.layers import MultiQueryAttention2d

    torch.manual_seed(0)
    layer = MultiQueryAttention2d(64, num_heads=4).eval()
    x = torch.randn(2, 64, 7, 7)
    reference = run(layer, x)
    scales = intflash.calibrate(layer, [x], granularity={"k": "head"})
    assert scales.layers[""].kv_heads == 1
    for chosen in (None, scales):
        with intflash.patch(layer, scales=chosen):
            assert 28 < sqnr(reference, run(layer, x)) < 60


def test_calibrating_with_a_mask_smaller_than_the_batch():
    torch.manual_seed(0)
    layer = timm.models.vision_transformer.Attention(64, num_heads=2).eval()
    x, mask = torch.randn(8, 4, 64), torch.ones(4, 4, dtype=torch.bool).tril()
    reference = run(layer, x, mask)
    scales = intflash.calibrate(layer, [(x, mask)])
    with intflash.patch(layer, scales=scales):
        assert 28 < sqnr(reference, run(layer, x, mask)) < 60


def test_swin_bias_and_shift_mask_are_small():
    model = timm.create_model("swin_tiny_patch4_window7_224", depths=(2, 1, 1, 1), num_classes=10).eval()
    with intflash.patch(model):
        held = [
            (tuple(m.intflash_attention.bias.shape), m.intflash_attention.keep)
            for m in model.modules()
            if hasattr(m, "intflash_attention")
        ]
    assert [shape for shape, _ in held[:2]] == [(1, 3, 49, 49)] * 2
    assert held[0][1] is None and tuple(held[1][1].shape) == (64, 1, 49, 49) and held[1][1].dtype == torch.bool


def test_bias_follows_loaded_weights():
    options = {"depths": (2,), "num_heads": (3,), "num_classes": 10, "img_size": 56}
    torch.manual_seed(0)
    a, b = (sharpen(timm.create_model("swin_tiny_patch4_window7_224", **options)) for _ in range(2))
    with torch.no_grad():
        for parameter in b.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    image = torch.randn(1, 3, 56, 56)
    intflash.patch(a)
    a.load_state_dict(b.state_dict())
    with intflash.patch(b):
        assert torch.equal(run(a, image), run(b, image))


@pytest.mark.parametrize("name, size", [("swin_tiny_patch4_window7_224", 56), ("eva02_tiny_patch14_224", 28)])
def test_pickled_models_stay_patched(name, size):
    options = {"depths": (2,), "num_heads": (3,)} if "swin" in name else {"depth": 1}
    model = sharpen(timm.create_model(name, img_size=size, num_classes=10, **options))
    image = torch.randn(1, 3, size, size)
    reference = run(model, image)
    intflash.patch(model)
    twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(run(twin, image), run(model, image)) and not torch.equal(run(twin, image), reference)
    intflash.unpatch(twin)
    assert torch.equal(run(twin, image), reference)


def test_unknown_attention_is_reported():
    model = sharpen(timm.create_model("cait_xxs24_224", depth=1, num_classes=10))
    report = intflash.patch(model)
    assert set(report.replaced.values()) == {"ClassAttn"}
    assert "TalkingHeadAttn" in report.left["blocks.0.attn"] and "TalkingHeadAttn" in str(report)
    intflash.unpatch(model)
    with pytest.raises(InputError, match="no attention layer of ResNet can be replaced"):
        intflash.patch(timm.create_model("resnet18"))


def test_patch_twice_and_training_are_refused():
    model = timm.create_model("deit_tiny_patch16_224", depth=1, num_classes=10)
    with intflash.patch(model):
        with pytest.raises(InputError, match="patched already"):
            intflash.patch(model)
        with pytest.raises(InputError, match="model.eval"):
            model.train()(torch.zeros(1, 3, 224, 224))
    intflash.unpatch(model)  # nothing to undo: nothing happens


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "eva02_tiny_patch14_224"])
def test_compiled_in_one_graph_with_static_scales(name):
    options = {"depths": (2,), "num_heads": (3,)} if "swin" in name else {"depth": 1}
    model = sharpen(timm.create_model(name, img_size=112, num_classes=10, **options))
    image = torch.randn(1, 3, 112, 112)
    scales = intflash.calibrate(model, [image], granularity={"k": "head", "v": "channel"})
    reference = run(model, image)
    with intflash.patch(model, scales=scales) as report:
        eager = run(model, image)
        torch._dynamo.reset()
        compiled = run(torch.compile(model, fullgraph=True, backend="aot_eager"), image)
    assert len(report.replaced) == (2 if "swin" in name else 1)
    assert torch.equal(eager, compiled)
    assert 28 < sqnr(reference, compiled) < 100


def test_half_precision_and_copies_keep_float32_scales():
    model = sharpen(timm.create_model("deit_tiny_patch16_224", depth=2, img_size=112, num_classes=10))
    image = torch.randn(1, 3, 112, 112)
    reference = run(model, image)
    scales = intflash.calibrate(model, [image], granularity={"q": "head", "k": "head", "v": "head"})
    intflash.patch(model, scales=scales)
    twin = copy.deepcopy(model).to(torch.bfloat16)
    assert twin.blocks[0].attn.intflash_attention.recipe.q_scale.dtype == torch.float32
    assert 20 < sqnr(reference, run(twin, image.bfloat16())) < 60
    intflash.unpatch(twin)
    assert 30 < sqnr(reference, run(model, image)) < 100  # the original is still patched


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Runs `intflash bench models` in an empty folder, with given results of its workers."""
    monkeypatch.chdir(tmp_path)

    def run_command(*arguments, outcomes=()):
        monkeypatch.setattr(bench, "run_all", lambda *given: list(outcomes))
        return CliRunner().invoke(cli.app, ["bench", "models", "--device", "cpu", *arguments])

    return run_command


@pytest.mark.parametrize(
    "arguments, said",
    [
        ("--model deit_small_patch16_224 --model nosuch", "as vit_base_patch16_224, .*, got nosuch\n"),
        ("--device cuda", "torch finds no CUDA device here"),
        ("--out /proc/x/models", "expected a file that can be written, got /proc/x/models.json"),
    ],
)
def test_throughput_refuses_before_any_worker_starts(tmp_path, monkeypatch, measured, arguments, said):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    ended = measured(*arguments.split(), outcomes=[None])
    assert ended.exit_code == 2 and re.search(said, " ".join(ended.output.split(" ")))
    assert not list(tmp_path.iterdir())


def test_throughput_writes_results_and_reports_failures(tmp_path, measured):
    good = bench.ModelOutcome("vit", 1, [bench.Timing("fp32", 1.0, 1.0, 1.0)], {}, 12, 30.0)
    bad = bench.ModelOutcome("swin", 8, [], {}, 0, 0.0, error="its process ended with 1")
    ended = measured(outcomes=[bad])
    assert ended.exit_code == 1 and "not measured: swin batch 8" in ended.output
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    ended = measured(outcomes=[good, bad])
    assert ended.exit_code == 1 and "not measured: swin batch 8" in ended.output
    assert len(json.loads((tmp_path / "results" / "models.json").read_text())["outcomes"]) == 2
    assert measured("--out", "there/models", outcomes=[good]).exit_code == 0
    assert (tmp_path / "there" / "models.md").read_text().startswith("# Whole models")
