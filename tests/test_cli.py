"""The `intflash` command: its output, its files, and its error messages."""

import io
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import __main__ as benchmarks
from intflash import BackendError, InputError, cli
from intflash.bench.demo import DemoResult, MethodResult
from intflash.bench.experiments import Experiment, Row
from intflash.cli.console import console
from intflash.cli.tables import demo_table

runner = CliRunner()


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setattr(console, "_width", 160)


def run(*arguments, code=0):
    app, arguments = (benchmarks.app, arguments[1:]) if arguments[0] == "benchmarks" else (cli.app, arguments)
    result = runner.invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.parametrize("model", ["vit", "swin"])
def test_demo_prints_and_writes(tmp_path, model):
    methods = ("intflash", "intflash_p8", "qflash", "fp16")
    options = [x for name in methods for x in ("--method", name)]
    printed = run("demo", "--model", model, "--images", 20, "--out", tmp_path, *options)
    assert all(name in printed for name in methods) and "Top-1" in printed
    content = json.loads((tmp_path / f"demo-{model}.json").read_text())
    assert [row["method"] for row in content["rows"]] == list(methods) and content["images"] == 20
    first = content["rows"][0]
    assert first["agreement"] >= 95 and first["worst_sqnr"] > 30 and first["backend"] and first["ms_per_image"] > 0
    assert (tmp_path / f"demo-{model}.png").stat().st_size > 10_000


def test_demo_shows_a_refusal(tmp_path):
    printed = run("demo", "--images", 5, "--out", tmp_path, "--method", "fp8", "--backend", "vortex", code=1)
    assert "refused" in printed and "vortex" in printed


def test_demo_prints_progress_without_a_terminal(tmp_path):
    printed = run("demo", "--images", 5, "--out", tmp_path, "--method", "intflash", "--method", "qflash")
    told = [line.split()[0] for line in printed.splitlines() if "ms an image" in line]
    assert told == ["intflash", "qflash"] and printed.index("ms an image") < printed.index("held-out")


def test_demo_suggests_faster_options(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert "fewer are quicker" in run("demo", "--help")


def test_demo_table_fits_a_pipe():
    numbers = dict(top1=100.0, agreement=100.0, worst_sqnr=-12.34, mean_sqnr=38.12, logits_sqnr=-45.67)
    row = MethodResult("intflash_online", **numbers, ms_per_image=1234.5, scaled_top1=100.0, backend="reference")
    console = Console(width=80, file=io.StringIO())
    console.print(demo_table(DemoResult("swin", 599, 99.0, 88.0, 123.45, [row]), 64.0))
    printed = console.file.getvalue()
    assert "…" not in printed and "backend" in printed and "1,234" in printed


REFUSED = {  # arguments -> what the sentence says
    "demo --model resnet": "expected vit or swin, got 'resnet'",
    "demo --images 0": "greater than or equal to 1",
    "demo --images -3": "greater than or equal to 1",
    "demo --method nope": "unknown method 'nope'; there are: auto, fp32",
    "demo --backend nope": "unknown backend 'nope'; there are: cpu",
    "accuracy --backend nope": "unknown backend 'nope'; there are: cpu",
    "benchmarks run --device tpu": "expected cpu or cuda, got 'tpu'",
    "benchmarks all --device foo": "expected cpu or cuda, got 'foo'",
    "bench attention --device tpu": "expected cpu or cuda, got 'tpu'",
    "eval --model nope --data . --method nope": "unknown method 'nope'",
    "eval --model nope --data . --backend nope": "unknown backend 'nope'",
    "eval --model nope --data . --limit 0": "greater than or equal to 1",
    "eval --model nope --data . --scales no.json": "'no.json' does not exist",
    "eval --model nope --data no/folder": "'no/folder' does not exist",
    "eval --model transformers:nope --data . --checkpoint .": "is a directory",
    "calibrate --model nope --data . --images 0": "greater than or equal to 1",
    "calibrate --model nope --data . --batch-size 0": "greater than or equal to 1",
    "calibrate --model nope --data . --dtype float33": "expected float32, float16 or bfloat16, got 'float33'",
    "calibrate --model nope --data . --observer median": "expected absmax, percentile or mse, got 'median'",
    "calibrate --model nope --data . --granularity head": "as q=head, got 'head'",
    "calibrate --model nope --data . --granularity x=head": "granularity is of q, k, v, out, got 'x'",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_bad_options_are_refused_in_a_sentence_before_any_work(tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    said = run(*arguments.split(), code=2)
    assert REFUSED[arguments] in said and "Traceback" not in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["demo", "accuracy", "benchmarks run", "benchmarks all", "bench attention"])
def test_cuda_without_a_device_is_refused(tmp_path, monkeypatch, command):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "no CUDA device" in run(*command.split(), "--device", "cuda", "--out", tmp_path / "out", code=2)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("error", [InputError, BackendError])
def test_an_error_inside_a_command_prints_its_message(tmp_path, monkeypatch, error):
    def measure(*given, **options):
        raise error("expected this, got [that]")

    monkeypatch.setattr("intflash.bench.cpu_attention.measure", measure)
    said = run("bench", "attention", "--out", tmp_path, code=2)
    assert said.splitlines()[-1] == "Error: expected this, got [that]"


def test_help_says_what_runs_without_vortex():
    said = " ".join(run("bench", "vortex", "--help").split())
    assert "Without Vortex" in said and "vortex_table" in said and "vortex_sweep" in said


def test_info_lists_methods_backends_and_reasons():
    printed = run("info")
    for word in ("intflash_online", "qflash", "reference", "torch", "QFlash, Algorithms 1 and 2"):
        assert word in printed
    assert "does not serve" in printed
    assert "The default method is auto, which is intflash_bfp." in " ".join(printed.split())


def test_accuracy_quick(tmp_path):
    printed = run("accuracy", "--quick", "-e", "iflash_sqnr", "--out", tmp_path)
    assert "33.3" in printed and "ceiling" in printed
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".csv", ".png"}


def test_unknown_experiment_lists_those_there_are():
    printed = run("accuracy", "-e", "figure99", code=2)
    assert "figure99" in printed and "qflash_table4" in printed


def test_bench_list_has_every_figure():
    printed = run("benchmarks", "list")
    for name in ("qflash_table4", "qflash_figure3_batch8", "qflash_figure5", "int_flash_table1", "iflash_figure2"):
        assert name in printed


def test_bench_run_times_and_report_assembles(tmp_path):
    options = ("--quick", "--budget", 0.01, "--out", tmp_path / "bench")
    printed = run("benchmarks", "run", "-e", "qflash_figure6_cpu", "-e", "int_flash_figure2", *options, code=1)
    assert "multiply and shift" in printed and "int_flash_figure2 needs cuda: left out" in printed
    assert "wrote" in run("report", tmp_path, "--out", tmp_path / "report.html")
    assert "Division by a constant" in (tmp_path / "report.html").read_text()


@pytest.mark.full
def test_bench_all_measures_and_assembles(tmp_path, monkeypatch):
    from benchmarks import suite

    whole = suite.plan

    def small(*given, **options):
        found = whole(*given, **options)
        return suite.JobPlan(found.together[:1], [job for job in found.alone if job.name == "matrix_peak"])

    monkeypatch.setattr(suite, "plan", small)
    printed = run("benchmarks", "all", "--quick", "--jobs", 1, "--out", tmp_path)
    assert "together qflash_table4: done" in printed and "alone    matrix_peak: done" in printed
    page = (tmp_path / "report.html").read_text()
    assert "SQNR and MSE on A2 and A7" in page and "int8 beside float matrix products" in page


def test_a_failed_experiment_is_reported_and_saved(tmp_path, monkeypatch):
    def measure(setting):
        raise RuntimeError("no luck")
        yield

    monkeypatch.setattr(benchmarks, "EXPERIMENTS", (Experiment("toy", "Toy", "nowhere", measure),))
    assert "toy did not finish: RuntimeError: no luck" in run("benchmarks", "run", "--out", tmp_path, code=1)
    assert json.loads((tmp_path / "toy.json").read_text())["error"] == "RuntimeError: no luck"


def test_an_experiment_asked_for_by_name_must_give_a_number(tmp_path, monkeypatch):
    def measure(setting):
        yield Row("a", "b", "us", None, paper=3.0, note="no device of that kind")

    monkeypatch.setattr(benchmarks, "EXPERIMENTS", (Experiment("toy", "Toy", "nowhere", measure),))
    said = run("benchmarks", "run", "-e", "toy", "--out", tmp_path, code=1)
    assert said.splitlines()[-1] == "toy gave no number: no device of that kind"
    assert "refused" in run("benchmarks", "run", "--out", tmp_path)


def test_a_rehearsal_needs_no_number(tmp_path, monkeypatch):
    toy = Experiment("toy", "Toy", "nowhere", lambda setting: iter(()))
    monkeypatch.setattr(benchmarks, "EXPERIMENTS", (toy,))
    assert "gave no number" not in run("benchmarks", "run", "-e", "toy", "--rehearse", "--out", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_vortex_by_name_without_vortex(tmp_path, monkeypatch):
    monkeypatch.delenv("VORTEX_HOME", raising=False)
    said = run("bench", "vortex", "-e", "vortex_table", "--out", tmp_path, code=1)
    assert "vortex_table gave no number" in said and "VORTEX_HOME" in said


@pytest.mark.parametrize(
    "command",
    [
        "demo --method intflash",
        "accuracy -e qflash_table4 --quick",
        "benchmarks run -e qflash_figure6_cpu",
        "benchmarks all",
        "bench attention",
        "bench vortex",
    ],
)
def test_an_unwritable_folder_is_reported_before_the_work(tmp_path, monkeypatch, command):
    work = ("demo.run_demo", "experiments.run_experiment", "cpu_attention.measure")
    for name in (*(f"intflash.bench.{name}" for name in work), "benchmarks.suite.plan"):
        monkeypatch.setattr(name, None)
    (tmp_path / "file").touch()
    for out, why in ((tmp_path / "file", "File exists"), ("/proc/x", "No such file or directory")):
        said = run(*command.split(), "--out", out, code=2)
        assert said == f"Error: expected a folder that can be written, got {out}: {why}\n"


@pytest.mark.parametrize("command", ["report folder", "calibrate --model any --data .", "eval --model any --data ."])
def test_an_unwritable_file_is_reported_before_the_work(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("intflash.bench.report.read_results", lambda places: [None])
    (tmp_path / "folder").mkdir()
    for out, why in (("folder", "Is a directory"), ("/proc/x/file.json", "No such file or directory")):
        said = run(*command.split(), "--out", out, code=2)
        assert said == f"Error: expected a file that can be written, got {out}: {why}\n"


def test_a_system_error_prints_its_message(tmp_path, monkeypatch):
    def full(*given, **options):
        raise OSError(28, "No space left on device", "results.json")

    monkeypatch.setattr("intflash.bench.cpu_attention.measure", full)
    said = run("bench", "attention", "--out", tmp_path, code=2)
    assert said.splitlines()[-1] == "Error: [Errno 28] No space left on device: 'results.json'"


def test_report_without_results(tmp_path):
    assert "no results in" in run("report", tmp_path, code=2)


def test_a_missing_extra_is_named(tmp_path, monkeypatch):
    def missing(*given, **options):
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")

    monkeypatch.setattr("intflash.bench.cpu_attention.measure", missing)
    said = run("bench", "attention", "--out", tmp_path, code=2)
    assert said.splitlines()[-1] == "Error: this command needs matplotlib: pip install 'intflash[demo]'"
