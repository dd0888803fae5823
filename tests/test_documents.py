"""README and guide: their code runs, their commands and links exist, and their numbers are those of the results."""

import ast
import csv
import importlib.util
import re

import pytest
import typer.main

import intflash
from documents import PAGES, ROOT, blocks
from intflash.cli import app

RESULTS = ROOT / "benchmarks" / "results"
PYTHON = [page for page in PAGES if blocks(page, "python") and "design" not in page.parts]
TEXT = {page: page.read_text(encoding="utf-8") for page in PAGES}


def _id(page):
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PYTHON, ids=_id)
def test_code_runs(page, tmp_path, monkeypatch):
    """Runs the code blocks of a page in order, as a reader would. Random weights stand for pretrained ones."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for text, reason in blocks(page, "python"):
        if reason is not None:
            ast.parse(text)
            continue
        for library in ("timm", "torchvision", "transformers", "diffusers"):
            if re.search(rf"^(import|from) {library}\b", text, re.M):
                pytest.importorskip(library)
        exec(compile(text.replace("pretrained=True", "pretrained=False"), _id(page), "exec"), names)


def _commands():
    for page in PAGES:
        for text, _ in blocks(page, "sh"):
            for line in text.splitlines():
                words = line.partition("#")[0].split()
                if "intflash.cli" in words:
                    words = ["intflash", *words[words.index("intflash.cli") + 1 :]]
                if words[:1] == ["intflash"]:
                    yield pytest.param(words[1:], id=" ".join(words))


@pytest.mark.parametrize("words", list(_commands()))
def test_command_exists(words):
    """Each command line of the documents uses an existing command and existing options."""
    command = typer.main.get_command(app)
    while words and hasattr(command, "commands"):
        assert words[0] in command.commands
        command, words = command.commands[words[0]], words[1:]
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    assert {word for word in words if word.startswith("--")} <= options


def test_readme_is_short_and_its_links_work_on_pypi():
    text = TEXT[ROOT / "README.md"]
    assert len(text.splitlines()) <= 150
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert target.startswith("https://"), target
        path = target.replace("/blob/", "/").replace("/tree/", "/")
        path = re.sub(r"^https://(github|raw\.githubusercontent)\.com/intflash/intflash/main/", "", path)
        assert (ROOT / path).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_relative_links_exist(page):
    """Also links that MkDocs does not check: to examples, results and the contributing page."""
    for target in re.findall(r"\]\(([^)\s]+)\)|^\[[^\]]+\]:\s*(\S+)", TEXT[page], re.M):
        target = "".join(target)
        if not re.match(r"[a-z]+:|#", target):
            assert (page.parent / target.partition("#")[0]).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_named_files_exist(page):
    """A path that a page names from the root of the repository, but for those with a NAME to fill in."""
    for path in re.findall(r"`((?:benchmarks|csrc|docs|examples|scripts|src|tests)/[\w./-]*)`", TEXT[page]):
        assert "NAME" in path or (ROOT / path).exists(), path


def test_readme_table_is_the_results():
    spec = importlib.util.spec_from_file_location("gain_figure", ROOT / "scripts" / "gain_figure.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = module.markdown(module.gains(RESULTS / "h200" / "attention.csv"))
    assert rows in TEXT[ROOT / "README.md"]


def _sqnr(name):
    """The rows of a result of benchmarks/results/accuracy in dB, by series and case: (measured, the paper's or "")."""
    with (RESULTS / "accuracy" / f"{name}.csv").open(newline="") as file:
        rows = [r for r in csv.DictReader(file) if r["metric"] == "SQNR dB"]
    return {(r["series"], r["case"]): (float(r["value"]), r["paper"]) for r in rows}


def test_specification_table_is_the_results():
    rows, page = _sqnr("specification"), TEXT[ROOT / "docs" / "numerics.md"]
    for case in dict.fromkeys(case for _, case in rows):
        cells = [f"{rows['ceiling', case][0]:.2f}"]
        for method in ("intflash", "intflash_bfp", "intflash_p8", "intflash_online"):
            cells.append(" / ".join(f"{rows[f'{method}, {out}', case][0]:.2f}" for out in ("float", "int16")))
        assert f"| {case} | {' | '.join(cells)} |" in page


def test_accuracy_tables_are_the_results():
    """Of results.md, with the papers' numbers in brackets, and of choose.md."""
    rows = _sqnr("qflash_table4")
    results, choose = (TEXT[ROOT / "docs" / "guide" / f"{name}.md"] for name in ("results", "choose"))
    for series in dict.fromkeys(series for series, _ in rows):
        cells = []
        for case in ("A2", "A7"):
            value, paper = rows[series, case]
            cells.append(f"{value:.1f}" + (f" ({float(paper):.1f})" if paper else ""))
        label = "ceiling of int8 inputs" if series == "ceiling" else f"`{series}`"
        assert f"| {label} | {' | '.join(cells)} |" in results
        if row := re.search(rf"^\| `{series}` \| .* ([\d.]+) dB", choose, re.M):
            assert row[1] == f"{rows[series, 'A2'][0]:.1f}"


def test_digits_table_is_the_results():
    with (RESULTS / "accuracy" / "digits_static.csv").open(newline="") as file:
        rows = {(r["series"], r["case"], r["metric"]): float(r["value"]) for r in csv.DictReader(file)}
    for case, label in (("vit", "ViT"), ("swin", "Swin")):
        cells = [f"{rows['float', case, 'Top-1, %']:.2f}"]
        for series in ("dynamic", "static absmax", "static mse", "static absmax, per head"):
            cells.append(f"{rows[series, case, 'Top-1, %']:.2f} ({rows[series, case, 'SQNR of the logits, dB']:.1f})")
        assert f"| digits {label} | {' | '.join(cells)} |" in TEXT[ROOT / "docs" / "guide" / "evaluate.md"]


def test_integer_models_table_is_the_results():
    with (RESULTS / "accuracy" / "integer_digits.csv").open(newline="") as file:
        rows = {(r["series"], r["case"], r["metric"]): float(r["value"]) for r in csv.DictReader(file)}
    page = TEXT[ROOT / "docs" / "guide" / "integer-models.md"]
    for series in dict.fromkeys(series for series, _, _ in rows):
        cells = []
        for case in ("vit", "swin"):
            sqnr = rows.get((series, case, "SQNR of the logits, dB"))
            cells += [f"{rows[series, case, 'Top-1, %']:.2f}", "" if sqnr is None else f"{sqnr:.1f}"]
        assert f"| {series} | {' | '.join(cells)} |" in page


def test_antiberty_tables_are_the_results():
    page = TEXT[ROOT / "docs" / "guide" / "integer-models.md"]
    for name in ("integer_antiberty", "integer_antiberty_ablations"):
        rows: dict[str, dict[str, float]] = {}
        with (RESULTS / "accuracy" / f"{name}.csv").open(newline="") as file:
            for r in csv.DictReader(file):
                option = name.endswith("ablations") and "float64" not in r["series"]
                rows.setdefault(f"integer, {r['series']}" if option else r["series"], {})[r["metric"]] = float(
                    r["value"]
                )
        for series, found in rows.items():
            perplexity, same, right = (
                found[x]
                for x in ("perplexity of masked residues", "predictions as float32's, %", "residues recovered, %")
            )
            assert f"| {series} | {perplexity:.4f} | {same:.2f} | {right:.2f} |" in page


def test_every_public_name_is_in_the_reference():
    listed = re.findall(r"^::: (\S+)", TEXT[ROOT / "docs" / "api" / "python.md"], re.M)
    assert [name for name in intflash.__all__ if f"intflash.{name}" not in listed] == []


def test_troubleshooting_quotes_what_the_library_says():
    """Each message in the tables occurs in the source, so that a reader who searches for it finds it."""
    source = "\n".join(path.read_text() for path in (ROOT / "src" / "intflash").rglob("*.py"))
    source = re.sub(r"\{[^{}]*\}", "…", source)  # an f-string's values
    source += "\n".join(path.read_text() for path in (ROOT / "csrc" / "host").rglob("*.cpp"))
    source = re.sub(r"[\"']\s*\n\s*f?[\"']", "", source)  # a string of several pieces
    page = TEXT[ROOT / "docs" / "guide" / "troubleshooting.md"].partition("## Wrong or poor results")[0]
    foreign = ("operator torchvision", "Could not import module", "VORTEX_HOME", "report.left")  # of others
    for row in re.findall(r"^\| (`.+?) \| ", page, re.M):
        for message in re.findall(r"`([^`]+)`", row):
            longest = max(message.split("…"), key=len).strip("( )")
            assert longest in source or message.startswith(foreign), message


def test_words():
    """Speedups are written in one form."""
    assert [_id(page) for page, text in TEXT.items() if "as fast" in text] == []
