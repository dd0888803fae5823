"""One static page of everything that was measured: tables, figures, machine, versions, commit.

It reads the JSON files of the demo and the experiments and embeds their figures, so that the page opens from a file,
without a server or a network.
"""

from __future__ import annotations

import base64
import contextlib
import html
import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from intflash.errors import InputError

Json = dict[str, Any]

STYLE = """
:root { color-scheme: light dark; --line: #8885; --ours: #0b6e4f; --quiet: #667; --stopped: #b00020; }
@media (prefers-color-scheme: dark) { :root { --ours: #5fd3a8; --quiet: #aab; --stopped: #ff8a80; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 62rem; overflow-wrap: anywhere; }
h1 { line-height: 1.2; margin: .5rem 0; } h2 { margin: 2.5rem 0 .2rem; line-height: 1.25; }
p, ul { margin: .4rem 0 .8rem; } .quiet { color: var(--quiet); font-size: .9rem; }
nav ul { columns: 18rem; padding-left: 1.2rem; }
.scroll { overflow-x: auto; margin: .6rem 0 1rem; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; white-space: nowrap; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .6rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: Canvas; }
tr.ours td { color: var(--ours); font-weight: 600; }
.stopped { color: var(--stopped); } .paper { color: var(--quiet); font-weight: 400; }
thead th { white-space: normal; min-width: 4.2rem; vertical-align: bottom; }
img { width: 100%; min-width: 34rem; height: auto; background: white; border-radius: 4px; }
details { margin: .5rem 0; } summary { cursor: pointer; color: var(--quiet); }
"""

DEMO_COLUMNS = {
    "method": "method",
    "top1": "Top-1 %",
    "agreement": "agrees with float32 %",
    "worst_sqnr": "worst layer, dB",
    "mean_sqnr": "mean of layers, dB",
    "logits_sqnr": "logits, dB",
    "ms_per_image": "ms per image",
    "scaled_top1": "Top-1 %, queries scaled",
    "backend": "backend",
}
INTRODUCTION = """
IntFlash computes a transformer's attention, softmax(QK<sup>T</sup>)V, on 8-bit integers. This page shows how accurate
and how fast its methods (green, names that begin with intflash) are beside published integer methods and floating
point. SQNR is the signal-to-noise ratio of the output in dB: 6 dB more halve the error. A speedup of 2 means half the
time.
"""
PIVOT = {"series", "case", "metric"}
CASE_COLUMNS = 10  # with more cases than this, cases are lines


@dataclass(frozen=True)
class Section:
    """One results file and the folder of its figures."""

    path: Path
    content: Json

    @property
    def anchor(self) -> str:
        return self.path.with_suffix("").as_posix().strip("./").replace("/", "-")

    @property
    def what(self) -> tuple[str, str]:
        """What was measured, and on which machine. Results that agree in both are runs of the same experiment."""
        facts = self.content.get("environment", {})
        processor = f"{facts.get('cpu')}, {facts.get('cpu_cores')} cores, {facts.get('instruction_sets')}"
        return self.content.get("name") or self.title, machine(self.content) if facts.get("gpu") else processor

    @property
    def date(self) -> str:
        return self.content.get("environment", {}).get("date") or ""

    @property
    def title(self) -> str:
        if is_demo(self.content):
            return f"{self.content['images']} handwritten digits, model {self.content['model']}, by every method"
        return self.content.get("title") or self.path.stem.replace("_", " ")


def is_demo(content: Json) -> bool:
    return "float_top1" in content


def read_results(folders: Iterable[Path]) -> list[Section]:
    """Reads every result below the folders: a JSON object with "rows", or with the "error" that prevented them.

    Each experiment appears once for each machine, by its latest run. Demos come first, then the others in order of
    path.

    Raises:
        InputError: a file is not JSON.
    """
    sections: dict[tuple, Section] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*.json")):
            try:
                content = json.loads(path.read_text())
            except (ValueError, RecursionError) as error:
                raise InputError(f"expected JSON in {path}, got: {error}") from None
            rows = content.get("rows") if isinstance(content, dict) else None
            if not isinstance(rows, list) or not (rows or content.get("error")):
                continue
            section = Section(path, content)
            with _as_written_by_us(path):
                known = sections.get(section.what)
                if known is None or known.date <= section.date:
                    sections[section.what] = section
    return sorted(sections.values(), key=lambda section: (not is_demo(section.content), section.path))


@contextlib.contextmanager
def _as_written_by_us(path: Path) -> Iterator[None]:
    """Converts errors of a result with other fields or types than ours to an InputError that names the file."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"expected a result as intflash writes it in {path}, got {error!r}") from None


def build(sections: Sequence[Section]) -> str:
    """Returns the page.

    Raises:
        InputError: a result has other fields or types than intflash writes.
    """
    links = body = ""
    for s in sections:
        with _as_written_by_us(s.path):
            links += f'<li><a href="#{_text(s.anchor)}">{_text(s.title)}</a> '
            links += f'<span class="quiet">{_text(machine(s.content))}</span>{_incomplete(s.content)}</li>'
            body += _section(s)
            _summary([s])
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>IntFlash: what was measured</title><style>{STYLE}</style></head><body>"
        "<h1>IntFlash: what was measured</h1>"
        f"<p>{INTRODUCTION}</p>"
        f"{_summary(sections)}"
        '<p class="quiet">Numbers in brackets are the papers\'. Each section names its machine and commit.</p>'
        f"<nav><ul>{links}</ul></nav>{body}</body></html>\n"
    )


def _summary(sections: Sequence[Section]) -> str:
    """Summarizes the demos and the comparisons with torch's attention."""
    lines, speedups = [], []
    for section in sections:
        content = section.content
        if is_demo(content):
            ours = next((row for row in content["rows"] if row["method"] == "intflash" and row.get("top1")), None)
            if ours:
                lines.append(
                    f"{content['images']} handwritten digits, model {content['model']}: {ours['top1']:.1f} % right "
                    f"with attention by intflash, {content['float_top1']:.1f} % in float32."
                )
        elif section.path.stem == "attention":
            speedups += _speedups(content)
    said = "<ul>" + "".join(f"<li>{_text(line)}</li>" for line in lines) + "</ul>" if lines else ""
    caption = "Speedup of the best of our methods over torch's attention: least, median and largest of the workloads"
    head = ("machine", "our inputs and outputs", "over", "least", "median", "largest", "workloads")
    return said + (_table(caption, head, speedups) if speedups else "")


def _speedups(content: Json) -> list[list[str]]:
    """Returns the cells of the summary's table: a line for each way to call our methods."""
    best: dict[str, dict[str, float]] = {}
    for row in content["rows"]:
        name, ratio = row.get("method") or row.get("series") or "", row.get("ratio")
        if not name.startswith("intflash") or not ratio or row.get("threads", 1) != 1:
            continue
        way = row.get("variant") or name.partition(", ")[2]
        mine = best.setdefault(way, {})
        mine[row["workload"]] = max(mine.get(row["workload"], 0.0), ratio)
    peer = "FP16 (cuDNN or FlashAttention)" if content.get("device") == "cuda" else "torch float32"
    lines = []
    for way, found in best.items():
        values = sorted(found.values())
        numbers = (f"{x:.2f}" for x in (values[0], statistics.median(values), values[-1]))
        lines.append([_text(machine(content)), _text(way or "attention"), _text(peer), *numbers, str(len(values))])
    return lines


def machine(content: Json) -> str:
    """Returns the GPU or processor on which a result was measured."""
    facts = content.get("environment", {})
    on_gpu = content.get("device") == "cuda" and facts.get("gpu")
    sets = facts.get("instruction_sets") or ()
    return str(facts["gpu"] if on_gpu else facts.get("cpu") or "") + (f" ({sets[0]})" if sets else "")


def _incomplete(content: Json) -> str:
    return ' <span class="stopped">did not finish</span>' if content.get("error") else ""


def _section(section: Section) -> str:
    content = section.content
    parts = [f'<section id="{_text(section.anchor)}"><h2>{_text(section.title)}</h2>']
    parts.append(f'<p class="quiet">{_text(" · ".join(_provenance(content)))}</p>')
    if content.get("notes"):
        parts.append(f"<p>{_text(content['notes'])}</p>")
    if content.get("error"):
        parts.append(f'<p class="stopped">Did not finish: {_text(content["error"])}</p>')
    if content.get("conclusions"):
        parts.append("<ul>" + "".join(f"<li>{_text(line)}</li>" for line in content["conclusions"]) + "</ul>")
    parts.extend(_image(path, section.title) for path in _figures(section))
    tables = _tables(content) if content["rows"] else [""]
    parts.append(tables[0])
    parts.append(_refusals(content["rows"]))
    if len(tables) > 1:
        parts.append(f"<details><summary>{len(tables) - 1} more tables</summary>{''.join(tables[1:])}</details>")
    parts.append(_environment(content.get("environment", {}) | {"file": section.path.as_posix()}))
    return "".join(parts) + "</section>"


def _refusals(rows: Sequence[Json]) -> str:
    """Lists why cells are empty, each reason once with its cells, because phones show no tooltips."""
    where: dict[str, list[str]] = {}
    for row in rows:
        if row.get("note") and row.get("value") is None and row.get("us") is None:
            cell = " on ".join(str(row[key]) for key in ("series", "method", "case", "workload") if row.get(key))
            where.setdefault(str(row["note"]), []).append(cell)
    lines = "".join(f"<li>{_text(', '.join(dict.fromkeys(c)))}: {_text(reason)}</li>" for reason, c in where.items())
    return f'<ul class="quiet">{lines}</ul>' if lines else ""


def _provenance(content: Json) -> list[str]:
    facts = content.get("environment", {})
    found = [content.get("source"), machine(content) if facts else None]
    found += [f"commit {facts['commit']}" if facts.get("commit") else None, (facts.get("date") or "")[:10]]
    found.append("quick subset" if content.get("quick") else None)
    return [str(part) for part in found if part]


def _figures(section: Section) -> list[Path]:
    names = section.content.get("figures")
    if names is None:
        names = [section.path.with_suffix(".png").name]
    return [path for name in names if (path := section.path.parent / name).exists()]


def _image(path: Path, title: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<div class="scroll"><img alt="{_text(title)}" loading="lazy" src="data:image/png;base64,{data}"></div>'


def _tables(content: Json) -> list[str]:
    rows = content["rows"]
    if is_demo(content):
        return [_demo_table(content)]
    if all(row.keys() >= PIVOT for row in rows):
        return [_pivot(rows, metric) for metric in dict.fromkeys(row["metric"] for row in rows)]
    keys = list(dict.fromkeys(key for row in rows for key in row))
    return [_table("", keys, [[_number(row.get(key)) for key in keys] for row in rows])]


def _demo_table(content: Json) -> str:
    baseline = {
        "method": "float32 (torch)",
        "top1": content["float_top1"],
        "ms_per_image": content["float_ms_per_image"],
        "scaled_top1": content["float_scaled_top1"],
    }
    lines = [[_number(row.get(key)) for key in DEMO_COLUMNS] for row in (baseline, *content["rows"])]
    caption = f"queries scaled: multiplied by {content['query_factor']:g}"
    return _table(caption, list(DEMO_COLUMNS.values()), lines)


def _pivot(rows: Sequence[Json], metric: str) -> str:
    rows = [row for row in rows if row["metric"] == metric]
    cases, series = (list(dict.fromkeys(row[key] for row in rows)) for key in ("case", "series"))
    cells = {(row["series"], row["case"]): row for row in rows}
    if len(cases) <= CASE_COLUMNS:
        lines = [[_text(s), *(_cell(cells.get((s, c))) for c in cases)] for s in series]
        return _table(metric, ["", *cases], lines)
    lines = [[_text(c), *(_cell(cells.get((s, c))) for s in series)] for c in cases]
    return _table(metric, ["", *series], lines)


def _cell(row: Json | None) -> str:
    if row is None:
        return ""
    if row.get("value") is None:
        return f'<span title="{_text(row.get("note", ""))}">refused</span>'
    paper = f' <span class="paper">({_number(row["paper"])})</span>' if row.get("paper") is not None else ""
    return _number(row["value"]) + paper


def _table(caption: str, head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Returns a table. `lines` are HTML already, `caption` and `head` are not."""
    top = "".join(f"<th>{_text(name)}</th>" for name in head)
    body = "".join(f"<tr{_ours(line[0])}>" + "".join(f"<td>{cell}</td>" for cell in line) + "</tr>" for line in lines)
    title = f"<caption>{_text(caption)}</caption>" if caption else ""
    return f'<div class="scroll"><table>{title}<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _ours(name: str) -> str:
    return ' class="ours"' if name.startswith("intflash") else ""


def _environment(facts: Json) -> str:
    flat = {k: v for k, v in facts.items() if not isinstance(v, dict)} | facts.get("versions", {})
    lines = "".join(f"<li>{_text(key)}: {_text(value)}</li>" for key, value in flat.items() if value is not None)
    return f"<details><summary>machine and versions</summary><ul>{lines}</ul></details>"


def _number(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _text(value)
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:,.2f}" if 10 <= abs(value) < 1000 else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:.2e}"


def _text(value: Any) -> str:
    return html.escape(str(value))
