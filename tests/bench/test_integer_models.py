"""`intflash bench models --integer`: rows and ratios from given answers of the workers. Nothing is measured."""

import gc
import json
import re
import weakref
from dataclasses import asdict
from types import SimpleNamespace

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
    rows = list(bench.measure_all([VIT], [8], 1, False, Setting(device="cuda")))
    found = {(row.series, row.metric): row.value for row in rows}
    assert found[bench.OURS, bench.SPEED] == 16 and found[COMPILED, bench.SPEED] == 4
    assert found[bench.OURS, bench.RATIO] == 2 and found["torchao int8", bench.RATIO] == 0.25
    assert (GRAPH, bench.RATIO) not in found and found[bench.OURS, bench.ENERGY] == 3
    assert [row.note for row in rows if row.series == "torchao float8"] == ["no"]


def test_loops_of_their_own_are_compared_with_the_best_fp16():
    found = bench._alone_in_a_loop({bench.OURS: (2.0, 0.5), GRAPH: (8.0, 1.0)}, GRAPH, 4)
    assert found[bench.ENERGY] == {bench.OURS: 500, GRAPH: 2000}
    assert found[bench.SUSTAINED] == {bench.OURS: 8, GRAPH: 4} and found[bench.SUSTAINED_RATIO] == {bench.OURS: 2}


def test_failed_workers_are_rows_with_a_reason(workers, tmp_path):
    workers({(VIT, 1): bench.Outcome(VIT, 1, {bench.OURS: 1.0, GRAPH: 2.0})})
    outcome = run_experiment(bench.experiment([VIT], [1, 8]), Setting(device="cuda"))
    assert [row.note for row in outcome.rows if row.value is None] == ["its process ended with 7"]
    names = {path.name for path in outcome.save(tmp_path)}
    assert {"integer_gpu.json", "integer_gpu.csv", "integer_gpu.png"} <= names


def test_large_batches_of_sequences_are_left_out(workers):
    workers({})
    rows = list(bench.measure_all(["bert_base"], bench.BATCHES, 1, False, Setting(device="cuda")))
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
        bench.converted(file, "intflash_p8")
    written = tmp_path / "a.intflash_p8.safetensors"
    written.touch()
    assert bench.converted(file, "intflash_p8") == written


def test_contenders_of_a_batch(tmp_path, monkeypatch):
    def fails(model, given):
        raise RuntimeError("no kernel")

    labels = [*bench.CONTENDERS]
    monkeypatch.setattr(
        bench, "CONTENDERS", {x: fails if x == labels[0] else lambda model, given: lambda: None for x in labels}
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    built = dict(bench._built(True, None, {}, tmp_path / "model"))
    assert [*built] == labels and "no kernel" in str(built[labels[0]]) and callable(built[bench.TUNED])
    assert [*bench._built(False, None, {}, tmp_path / "model")][-1][0] == labels[-2]


def test_a_captured_contender_keeps_what_its_graph_reads(monkeypatch):
    graph = SimpleNamespace(replay=lambda: None)
    monkeypatch.setattr(bench.gpu_timing, "capture", lambda call, repeats: graph)
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)
    model, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    kept = weakref.ref(model), weakref.ref(x)
    call = bench._in_graph(model, {"input": x})
    del model, x
    gc.collect()
    assert all(of() is not None for of in kept)
    call()
    del call
    gc.collect()
    assert all(of() is None for of in kept)


def test_one_process_tunes_at_a_time(tmp_path):
    fcntl = pytest.importorskip("fcntl")
    file = tmp_path / "tuning"
    with bench._alone(file), file.open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with file.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_torchao_quantizes_linears_of_enough_rows(monkeypatch):
    pytest.importorskip("torchao")
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.GELU(), torch.nn.Linear(32, 64)).half()
    x = torch.randn(40, 64, dtype=torch.float16)
    expected = model(x).float()
    monkeypatch.setattr(bench, "_in_graph", lambda model, given: model)
    for least, kind in ((17, "Int8Tensor"), (41, "Parameter")):
        made = bench._torchao(bench._int8_static, least, model, {"input": x})
        assert all(kind in type(made[i].weight).__name__ for i in (0, 2)) and model[0].weight.dtype == torch.float16
        assert (made(x.bfloat16()).float() - expected).abs().max() < 0.1 * expected.abs().max()
