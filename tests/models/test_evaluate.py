"""Evaluation on a folder of images: counts, resuming, the papers' numbers, the commands."""

import io
import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import intflash
from intflash import integer
from intflash.cli import app
from intflash.cli.models import evaluation_tables
from intflash.digits import load_model, load_split
from intflash.errors import InputError
from intflash.methods import METHODS as METHODS_THERE_ARE
from intflash.models import calibrate
from intflash.models.data import ImageFolder, load_classifier
from intflash.models.evaluate import (
    FLOAT,
    Evaluation,
    Tally,
    Variant,
    VariantRow,
    _row,
    _weights_digest,
    batches,
    evaluate,
)
from intflash.models.papers import QFLASH_MODELS, paper_row
from intflash.quant.calibrate import Scales

METHODS = [Variant(name) for name in ("intflash", "qflash", "fp16")]


@pytest.fixture(scope="module")
def digits():
    held_out = load_split()[1].take(24)
    return torch.utils.data.TensorDataset(held_out.images, held_out.labels)


def test_counts_and_sqnr(digits):
    seen = []
    result = evaluate(load_model("vit"), digits, METHODS, batch_size=10, on_batch=lambda *at: seen.append(at))
    assert seen == [(10, 24), (20, 24), (24, 24)]
    rows = {row.name: row for row in result.rows}
    assert list(rows) == [FLOAT, "intflash", "qflash", "fp16"]
    model, (images, labels) = load_model("vit"), digits.tensors
    with torch.no_grad():
        expected = float((model(images).argmax(1) == labels).float().mean()) * 100
    assert rows[FLOAT].top1 == pytest.approx(expected)
    assert all(row.images == 24 and row.replaced == 4 for name, row in rows.items() if name != FLOAT)
    assert rows["fp16"].logits_sqnr > rows["intflash"].logits_sqnr > rows["qflash"].logits_sqnr > 5
    assert rows["intflash"].integer_only and not rows["fp16"].integer_only
    assert rows["intflash"].gbops == pytest.approx(192 * 4 * 4 * 65 * 65 * 16 / 1e9)


def test_a_tally_on_a_worked_example():
    """The first image's float logits are twice as large; the second's are in the opposite order."""
    logits = torch.arange(6.0, 0.0, -1.0).repeat(4, 1)
    floats = logits.clone()
    floats[0] *= 2
    floats[1] = floats[1].flip(0)
    tally = Tally()
    tally.add(logits, floats, torch.tensor([0, 4, 5, 3]), 0.5)
    assert (tally.images, tally.top1, tally.top5, tally.agree, tally.seconds) == (4, 1, 3, 3, 0.5)
    assert tally.signal == 7 * 91 and tally.noise == 70 + 91


def test_rows_are_percentages_milliseconds_and_bit_operations():
    tally = Tally(images=4, top1=1, top5=3, agree=2, signal=100.0, noise=1.0, seconds=0.5)
    counts = {"macs": [3e9, 1e9], "replaced": 7, "left": {}}
    names = "intflash", "int_flash_half", "qattn"
    row, half, qattn = (_row(name, Variant(name), tally, counts, "any model") for name in names)
    assert (row.top1, row.top5, row.agreement, row.ms_per_image, row.replaced) == (25, 75, 50, 125, 7)
    assert row.logits_sqnr == pytest.approx(20) and half.gbops == qattn.gbops == 2 * row.gbops


def test_batches_are_spread_over_the_dataset():
    data = torch.utils.data.TensorDataset(torch.arange(100.0), torch.zeros(100))
    assert torch.cat(list(batches(data, 4, 3, "cpu", torch.float32))).tolist() == [0, 25, 50, 75]


def test_weight_digests_depend_on_names_shapes_and_buffers():
    def digest(buffer, **parameters):
        module = torch.nn.Module()
        for name, x in parameters.items():
            module.register_parameter(name, torch.nn.Parameter(x))
        module.register_buffer("buffer", buffer)
        return _weights_digest(module)

    x = torch.arange(6.0)
    others = digest(x + 1, a=x), digest(x.view(2, 3), a=x), digest(x, b=x), digest(x, a=x + 1)
    assert len({digest(x, a=x), *others}) == 5 and digest(x.clone(), a=x.clone()) == digest(x, a=x)


def test_a_variant_that_cannot_run_is_a_row_with_its_reason(digits):
    result = evaluate(load_model("vit"), digits, METHODS[:1], batch_size=24, backend="triton")
    assert result.rows[0].images == 24 and "triton" in result.rows[1].error


def interrupted(model, digits, variants, state, **options):
    """Evaluates until 16 of the 24 images are done, with the sums saved after every batch."""

    class Stopped(Exception):
        pass

    def stop(done, total):
        if done >= 16:
            raise Stopped

    with pytest.raises(Stopped):
        evaluate(model, digits, variants, batch_size=8, state=state, on_batch=stop, **options)


@pytest.fixture
def save_always(monkeypatch):
    monkeypatch.setattr("intflash.models.evaluate.SAVE_SECONDS", 0.0)


def same(a, b):
    assert (a.images, a.top1, a.top5, a.agreement) == (b.images, b.top1, b.top5, b.agreement)
    assert a.logits_sqnr == pytest.approx(b.logits_sqnr)


def test_resuming_gives_the_same_sums(digits, tmp_path, save_always):
    state, seen = tmp_path / "state", []
    interrupted(load_model("vit"), digits, METHODS[:1], state)
    with pytest.raises(InputError, match="of another evaluation"):
        evaluate(load_model("vit"), digits, METHODS[1:], batch_size=8, state=state)
    options = dict(batch_size=8, state=state, on_batch=lambda *at: seen.append(at))
    resumed = evaluate(load_model("vit"), digits, METHODS[:1], **options)
    assert seen == [(24, 24)]
    for a, b in zip(resumed.rows, evaluate(load_model("vit"), digits, METHODS[:1], batch_size=8).rows, strict=True):
        same(a, b)


def test_a_finished_run_is_not_reused(digits, tmp_path):
    """Other weights and other scales under the same names give other results, and no file is left."""
    images, state = digits.tensors[0], tmp_path / "state"
    model, other = load_model("vit"), load_model("vit")
    with torch.no_grad():
        other.head.weight.mul_(-1)
    for network, shown in ((model, images), (model, images[:2] / 4), (other, images)):
        variants = [Variant("intflash", calibrate(network, [shown]))]
        kept = evaluate(network, digits, variants, batch_size=8, state=state)
        for a, b in zip(kept.rows, evaluate(network, digits, variants, batch_size=8).rows, strict=True):
            same(a, b)
        assert not list(tmp_path.iterdir())


def test_an_interrupted_run_resumes_with_the_same_weights_scales_and_backend_only(digits, tmp_path, save_always):
    images, state = digits.tensors[0], tmp_path / "state"
    model, other = load_model("vit"), load_model("vit")
    with torch.no_grad():
        other.head.weight[0, 0] += 1e-3
    static = [Variant("intflash", calibrate(model, [images]))]
    interrupted(model, digits, static, state)
    for changed in (
        dict(model=other),
        dict(variants=[Variant("intflash", calibrate(model, [images / 2]))]),
        dict(backend="reference"),
    ):
        options = dict(model=model, variants=static, backend=None) | changed
        with pytest.raises(InputError, match="of another evaluation"):
            evaluate(options.pop("model"), digits, batch_size=8, state=state, **options)
    assert evaluate(model, digits, static, batch_size=8, state=state).rows[1].images == 24


def test_a_resumed_run_still_knows_what_cannot_run(digits, tmp_path, save_always):
    options = dict(state=tmp_path / "state", backend="cuda")
    with pytest.raises(KeyboardInterrupt):  # all images are done, the run is not
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("intflash.models.evaluate._sum_over_processes", raise_interrupt)
            evaluate(load_model("vit"), digits, METHODS[:1], batch_size=24, **options)
    assert "cuda" in evaluate(load_model("vit"), digits, METHODS[:1], batch_size=24, **options).rows[1].error


def raise_interrupt(tallies):
    raise KeyboardInterrupt


def test_unknown_and_repeated_names_are_refused_before_any_image(digits):
    for variants, backend, said in (
        ([Variant("nope")], None, "unknown method 'nope'"),
        (METHODS[:1], "nope", "unknown backend 'nope'"),
        (METHODS[:1] * 2, None, "more than one 'intflash'"),
    ):
        with pytest.raises(InputError, match=said):
            evaluate(None, digits, variants, backend=backend)


def test_image_folder(image_folder):
    folder = ImageFolder(image_folder.parent / "images", lambda image: torch.zeros(3, 4, 4))
    assert folder.classes == ["ant", "bee", "cat"] and [label for _, label in folder] == [0] * 3 + [1] * 3 + [2] * 3
    with pytest.raises(InputError, match="not a folder"):
        ImageFolder(image_folder / "none", lambda image: image)
    with pytest.raises(InputError, match="no images"):
        ImageFolder(image_folder / "ant", lambda image: image)


def test_papers_numbers():
    assert len(QFLASH_MODELS) == 7
    assert paper_row("swin_tiny_patch4_window7_224.ms_in1k", "qflash").top1 == 80.06
    assert paper_row("deit_base_patch16_224", "int_flash_half").bops == pytest.approx(137.4)
    assert paper_row("deit_base_patch16_224", "fp32").top1 == 81.85
    assert paper_row("resnet50", "qflash") is None and paper_row("deit_base_patch16_224", "intflash") is None


def test_commands(image_folder, tmp_path):
    pytest.importorskip("timm")
    model = ["--model", "deit-t", "--no-pretrained", "--data", str(image_folder), "--device", "cpu"]
    scales, out = tmp_path / "scales.json", tmp_path / "eval.json"
    runner = CliRunner()
    done = runner.invoke(app, ["calibrate", *model, "--images", "2", "--out", str(scales)])
    assert done.exit_code == 0 and "12 layers of VisionTransformer from 2 images" in done.output
    arguments = ["--limit", "3", "--workers", "0", "--method", "intflash", "--scales", str(scales), "--out", str(out)]
    done = runner.invoke(app, ["eval", *model, *arguments], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == [FLOAT, "intflash", "auto (static, absmax, scales.json)"]
    assert [row["granularity"] for row in rows.values()] == ["", "head", "tensor"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["eval.json", "images", "scales.json"]
    assert rows[FLOAT]["paper"]["top1"] == 72.21
    for name in list(rows)[1:]:
        assert rows[name]["replaced"] == 12 and rows[name]["images"] == 3 and rows[name]["logits_sqnr"] > 35
    assert rows["intflash"]["gbops"] == pytest.approx(17.2, abs=0.05)  # as the paper prints for DeiT-T


def test_scales_add_variants_to_every_method(image_folder, tmp_path, monkeypatch):
    scales, seen = tmp_path / "scales.json", []
    calibrate(load_model("vit"), [torch.rand(4, 1, 8, 8)], path=scales)

    def evaluate(network, dataset, variants, **options):
        seen.extend(variant.name for variant in variants)
        raise InputError("enough")

    monkeypatch.setattr("intflash.models.evaluate.evaluate", evaluate)
    monkeypatch.setattr("intflash.models.data.load_classifier", lambda *a, **k: (None, None))
    out = str(tmp_path / "eval.json")
    given = ["eval", "--model", "any", "--data", str(image_folder), "--device", "cpu", "--out", out]
    done = CliRunner().invoke(app, [*given, "--scales", str(scales)])
    assert done.exit_code == 2 and "Error: enough" in done.output
    assert seen == [*METHODS_THERE_ARE, "auto (static, absmax, scales.json)"]
    seen.clear()
    (tmp_path / "other").mkdir()
    other = scales.rename(tmp_path / "other" / "scales.json")
    replace(Scales.load(other), observer="mse").save(scales)
    CliRunner().invoke(app, [*given, "--scales", str(scales), "--scales", str(other)])
    assert seen[-2:] == [f"auto (static, mse, {scales})", f"auto (static, absmax, {other})"]


def test_a_scales_file_of_an_unknown_method_is_refused_before_the_model(image_folder, tmp_path):
    scales = calibrate(load_model("vit"), [torch.rand(4, 1, 8, 8)])
    replace(scales, method="nope").save(tmp_path / "scales.json")
    arguments = ["eval", "--model", "any", "--data", str(image_folder), "--scales", str(tmp_path / "scales.json")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2 and "Error: unknown method 'nope'" in done.output


def test_models_that_cannot_be_made_are_refused():
    pytest.importorskip("timm")
    with pytest.raises(InputError, match="timm cannot make 'nope': Unknown model"):
        load_classifier("nope")
    with pytest.raises(InputError, match="a checkpoint is for a timm model"):
        load_classifier("transformers:nope", checkpoint="weights.pt")


class RunsCode:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_checkpoint_is_loaded_as_weights_only(tmp_path, monkeypatch):
    """A pickled call is refused, also by versions of timm whose loader would run it by default."""
    timm = pytest.importorskip("timm")
    load = timm.models._helpers.load_checkpoint

    def load_as_in_1_0_15(model, checkpoint_path, *args, weights_only=False, **kwargs):
        return load(model, checkpoint_path, *args, weights_only=weights_only, **kwargs)

    monkeypatch.setattr(timm.models._factory, "load_checkpoint", load_as_in_1_0_15)
    monkeypatch.setattr(timm.models, "load_checkpoint", load_as_in_1_0_15)
    name = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    torch.save(timm.create_model(name).state_dict(), tmp_path / "good.pt")
    torch.save({"state_dict": RunsCode(tmp_path / "ran")}, tmp_path / "bad.pt")
    load_classifier(name, checkpoint=tmp_path / "good.pt")
    with pytest.raises(InputError, match="timm cannot make 'vit_tiny"):
        load_classifier(name, checkpoint=tmp_path / "bad.pt")
    assert not (tmp_path / "ran").exists()


def test_a_missing_library_is_named_with_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(InputError, match=r"timm cannot be imported .*pip install '\.\[models\]' in a clone"):
        load_classifier("deit_tiny_patch16_224")


def test_transformers_classifier_from_a_folder(image_folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32)
    config = transformers.ViTConfig(**sizes, patch_size=8, num_labels=3)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "model")
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "model")
    model, transform = load_classifier(f"transformers:{tmp_path / 'model'}")
    result = evaluate(model, ImageFolder(image_folder, transform), METHODS[:1], batch_size=4)
    assert result.rows[1].replaced == 2 and result.rows[1].images == 9
    assert result.rows[1].logits_sqnr > 30


WORKER = """
import sys, torch
from intflash.digits import load_model, load_split
from intflash.models.evaluate import Variant, evaluate
torch.distributed.init_process_group("gloo")
held_out = load_split()[1].take(11)
data = torch.utils.data.TensorDataset(held_out.images, held_out.labels)
result = evaluate(load_model("vit"), data, [Variant("intflash")], batch_size=3)
if torch.distributed.get_rank() == 0:
    result.save(sys.argv[1])
torch.distributed.destroy_process_group()
"""


def test_the_table_truncates_no_number():
    names = ["int_flash_full", "intflash_online", "intflash (static, percentile, deit-small.json)"]
    paper = paper_row("deit_base_patch16_224", "qflash")
    row = VariantRow("", 9, 100.0, 100.0, 100.0, -12.3, 1234.5, True, "", 12, 17.2, paper)
    kinds = ["token/token/head", "tensor", "tensor/tensor/channel"]
    rows = [replace(row, name=name, granularity=kind) for name, kind in zip(names, kinds, strict=True)]
    for width, count in ((80, 3), (200, 1)):
        console = Console(width=width, file=io.StringIO())
        found = list(evaluation_tables(Evaluation("deit-b", "imagenet/val", 9, rows), width))
        for table in found:
            console.print(table)
        printed = console.file.getvalue()
        assert len(found) == count and max(map(len, printed.splitlines())) <= width
        assert "…" not in printed and all(kind in printed for kind in kinds) and "deit-small.json)" in printed
        assert all(number in printed for number in ("100.00", "1234.50", "-12.3", "68.7"))


def test_processes_share_the_images(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    subprocess.run([*launch, str(tmp_path / "worker.py"), str(tmp_path / "out.json")], check=True, timeout=300)
    shared = json.loads((tmp_path / "out.json").read_text())["rows"]
    held_out = load_split()[1].take(11)
    data = torch.utils.data.TensorDataset(held_out.images, held_out.labels)
    alone = evaluate(load_model("vit"), data, [Variant("intflash")], batch_size=3)
    for a, b in zip(shared, alone.rows, strict=True):
        assert (a["images"], a["top1"], a["agreement"]) == (11, b.top1, b.agreement)


def test_integer_models_of_the_digits(tmp_path):
    """`convert` and `eval --integer`, with the digits' own images: a row beside float and attention alone."""
    runner, file, out = CliRunner(), tmp_path / "digits.safetensors", tmp_path / "eval.json"
    model = ["--model", "digits:vit", "--device", "cpu"]
    done = runner.invoke(app, ["convert", *model, "--images", "32", "--scales", "tensor", "--out", str(file)])
    assert done.exit_code == 0 and "DigitsViT in 32 integer operations" in done.output
    arguments = ["--method", "intflash", "--integer", str(file), "--limit", "64", "--workers", "0", "--out", str(out)]
    done = runner.invoke(app, ["eval", *model, *arguments], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    row = rows["integer model (intflash, digits.safetensors)"]
    assert list(rows)[:2] == [FLOAT, "intflash"] and len(rows) == 3
    assert row["top1"] >= rows[FLOAT]["top1"] - 2 and row["agreement"] >= 96 and row["logits_sqnr"] > 35
    assert row["integer_only"] and row["replaced"] == 32 and row["granularity"] == "tensor" and row["paper"] is None
    done = runner.invoke(app, ["eval", *model, "--integer", str(out), "--out", str(out)])
    assert done.exit_code == 2 and "cannot be read" in done.output
    for more, message in (
        (["--data", str(tmp_path)], "have data of their own"),
        (["--no-pretrained"], "come with their weights"),
        (["--image", "uint8"], "need the mean and std"),
        (["--activation-bits", "9"], "activation_bits must be one of"),
    ):
        done = runner.invoke(app, ["convert", *model, *more, "--out", str(file)])
        assert done.exit_code == 2 and message in done.output, done.output
    done = runner.invoke(app, ["convert", "--model", "resnet18", "--no-pretrained", "--out", str(file)])
    assert done.exit_code == 2 and "ResNet has no converter" in done.output


def test_scales_and_integer_models_of_transformers(image_folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    folder, file, out = tmp_path / "model", tmp_path / "vit.safetensors", tmp_path / "eval.json"
    sizes = {"image_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.ViTConfig(**sizes, intermediate_size=64, patch_size=8, num_labels=3)
    torch.manual_seed(0)
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    arguments = ["--model", f"transformers:{folder}", "--data", str(image_folder), "--device", "cpu"]
    done = CliRunner().invoke(app, ["convert", *arguments, "--images", "4", "--out", str(file)])
    assert done.exit_code == 0 and "ViTForImageClassification in " in done.output, done.output
    more = ["--method", "intflash", "--integer", str(file), "--workers", "0", "--out", str(out)]
    done = CliRunner().invoke(app, ["eval", *arguments, *more])
    assert done.exit_code == 0, done.output
    row = json.loads(out.read_text())["rows"][-1]
    assert row["name"].startswith("integer model") and row["error"] is None and row["logits_sqnr"] > 20
    scales = tmp_path / "scales.json"
    done = CliRunner().invoke(app, ["calibrate", *arguments, "--images", "4", "--out", str(scales)])
    assert done.exit_code == 0 and "2 layers of ViTForImageClassification" in done.output, done.output
    intflash.patch(transformers.ViTForImageClassification.from_pretrained(folder).eval(), scales=scales)
    more = ["--scales", str(scales), "--workers", "0", "--out", str(out)]
    done = CliRunner().invoke(app, ["eval", *arguments, *more])
    assert done.exit_code == 0 and json.loads(out.read_text())["rows"][-1]["error"] is None, done.output


def test_convert_raw_images(image_folder, tmp_path):
    pytest.importorskip("timm")
    file, out = tmp_path / "deit.safetensors", tmp_path / "eval.json"
    arguments = ["--model", "deit-t", "--no-pretrained", "--data", str(image_folder), "--device", "cpu"]
    torch.manual_seed(0)
    done = CliRunner().invoke(app, ["convert", *arguments, "--images", "4", "--image", "uint8", "--out", str(file)])
    assert done.exit_code == 0, done.output
    torch.manual_seed(0)  # the same random weights
    more = ["--method", "intflash", "--integer", str(file), "--workers", "0", "--out", str(out)]
    done = CliRunner().invoke(app, ["eval", *arguments, *more])
    assert done.exit_code == 0, done.output
    row = json.loads(out.read_text())["rows"][-1]
    assert row["name"].startswith("integer model") and row["error"] is None and row["logits_sqnr"] > 20
    made = integer.load(file)
    assert made.provenance["options"]["mean"] == pytest.approx([0.485, 0.456, 0.406])
    assert made(torch.zeros(1, 3, 224, 224, dtype=torch.uint8)).shape == (1, 1000)
