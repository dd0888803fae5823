"""`intflash bench models --integer`: rows and ratios from given answers of the workers. Nothing is measured."""

import contextlib
import json
import math
import re
import time
from dataclasses import asdict

import pytest
import torch
from typer.testing import CliRunner

from intflash import cli
from intflash.bench import integer_models as bench
from intflash.bench.experiments import Setting, run_experiment

COMPILED, GRAPH = f"{bench.FP16}, torch.compile reduce-overhead", f"{bench.FP16}, torch.compile, {bench.GRAPH}"
VIT = "vit_base_patch16_224"


@pytest.fixture
def workers(monkeypatch):
    """Makes workers answer with outcomes, or fail where there is none. Nothing is converted."""

    def set_answers(outcomes):
        def answers(commands, together):
            for name, batch in commands:
                found = outcomes.get((name, batch))
                yield (name, batch), None if found is None else json.loads(json.dumps(asdict(found))), 7

        monkeypatch.setattr(bench, "start_conversions", lambda files: [])
        monkeypatch.setattr(bench.models, "in_workers", answers)
        monkeypatch.setattr(bench, "product_rows", lambda: iter(()))

    return set_answers


def test_ratios_are_to_the_better_fp16(workers):
    seconds = {bench.OURS: 0.5, COMPILED: 2.0, GRAPH: 1.0, "torchao int8": 4.0}
    workers({(VIT, 8): bench.Outcome(VIT, 8, seconds, {"torchao float8": "no"}, {bench.ENERGY: {bench.OURS: 3.0}})})
    rows = list(bench.measure_all([VIT], [8], 1, Setting(device="cuda")))
    found = {(row.series, row.metric): row.value for row in rows}
    assert found[bench.OURS, bench.SPEED] == 16 and found[COMPILED, bench.SPEED] == 4
    assert found[bench.OURS, bench.RATIO] == 2 and found["torchao int8", bench.RATIO] == 0.25
    assert (GRAPH, bench.RATIO) not in found and found[bench.OURS, bench.ENERGY] == 3
    assert [row.note for row in rows if row.series == "torchao float8"] == ["no"]


def test_failed_workers_are_rows_with_a_reason(workers, tmp_path):
    workers({(VIT, 1): bench.Outcome(VIT, 1, {bench.OURS: 1.0, GRAPH: 2.0})})
    outcome = run_experiment(bench.experiment([VIT], [1, 8]), Setting(device="cuda"))
    assert [row.note for row in outcome.rows if row.value is None] == ["its process ended with 7"]
    names = {path.name for path in outcome.save(tmp_path)}
    assert {"integer_gpu.json", "integer_gpu.csv", "integer_gpu.png"} <= names


def test_large_batches_of_sequences_are_left_out(workers):
    workers({})
    rows = list(bench.measure_all(["bert_base"], bench.BATCHES, 1, Setting(device="cuda")))
    assert [row.case for row in rows] == ["bert_base, batch 1", "bert_base, batch 8", "bert_base, batch 64"]


def test_random_inputs():
    given = bench.inputs("bert_base", 3, 0, "cpu")
    assert given["input_ids"].shape == (3, bench.TOKENS) and bool((given["attention_mask"].sum(1) >= 256).all())
    assert torch.equal(bench.inputs(VIT, 2, 0, "cpu")["x"], bench.inputs(VIT, 2, 0, "cpu")["x"])


@pytest.mark.parametrize(
    "arguments, code, said",
    [
        ("--device cpu", 1, "needs cuda"),
        ("--device cpu --model nosuch", 2, "expected models among .*, got nosuch"),
    ],
)
def test_the_command_refuses(tmp_path, monkeypatch, arguments, code, said):
    monkeypatch.chdir(tmp_path)
    ended = CliRunner().invoke(cli.app, ["bench", "models", "--integer", *arguments.split()])
    assert ended.exit_code == code and re.search(said, re.sub(r"[\s│]+", " ", ended.output))


def test_a_failed_conversion_is_said_to_the_workers(monkeypatch, tmp_path):
    def fails(name):
        raise ValueError("no such model")

    monkeypatch.setattr(bench, "float_model", fails)
    file = tmp_path / "a.safetensors"
    with pytest.raises(ValueError):
        bench.convert("nosuch", file)
    with pytest.raises(RuntimeError, match="no such model"):
        bench.converted(file)
    file.touch()
    assert bench.converted(file) == file


def test_tuning_takes_turns_and_compilations_end(tmp_path, monkeypatch):
    file, made = tmp_path / "model", []
    makers = {
        label: lambda model, given, label=label: made.append(label) or (lambda: None) for label in bench.CONTENDERS
    }
    monkeypatch.setattr(bench, "CONTENDERS", makers)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with bench._alone(tmp_path / "tuning"):  # another process tunes
        built = dict(bench._built(VIT, 64, None, {}, file, time.time() + 0.3))
    assert "used up" in str(built[bench.TUNED]) and made == [x for x in makers if x != bench.TUNED]
    assert bench.TUNED not in dict(bench._built(VIT, 8, None, {}, file, math.inf))
    monkeypatch.setattr(bench, "CONTENDERS", {"endless": lambda model, given: time.sleep(60)})
    late = dict(bench._built(VIT, 8, None, {}, file, time.time() + 0.1))
    assert "used up" in str(late["endless"])
    late = dict(bench._built(VIT, 8, None, {}, file, 0.0))
    assert late and all("used up" in str(error) for error in late.values())


def test_static_int8_has_a_scale_for_each_linear():
    pytest.importorskip("torchao")
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.GELU(), torch.nn.Linear(32, 64)).bfloat16()
    x = torch.randn(40, 64, dtype=torch.bfloat16)
    expected = model(x)
    bench._static_int8(model, {"input": x})
    assert "Int8Tensor" in type(model[0].weight).__name__ and "Int8Tensor" in type(model[2].weight).__name__
    assert (model(x) - expected).abs().max() < 0.1 * expected.abs().max()


def test_compilations_that_catch_exceptions_end_in_time():
    with pytest.raises(TimeoutError), bench._no_later_than(time.time() + 0.05):
        for _ in range(2):
            with contextlib.suppress(TimeoutError):
                time.sleep(60)
        time.sleep(60)
    time.sleep(0.2)  # no alarm is left
