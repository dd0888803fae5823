"""A run of the self-check: cases until the time is over, what they covered, and the smallest reproducer of a bug."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from intflash.selfcheck.cases import SMALL_PRODUCTS, Case, generate
from intflash.selfcheck.compare import Expected, Failure, check
from intflash.selfcheck.shrink import shrink, size
from intflash.selfcheck.source import Place, snippet

MOST_GROUPS = 12  # of failures that are shrunk
SHRINK_SECONDS = 15.0
MOST_SHRINK_SECONDS = 90.0  # of a whole run
TALLIES = ("checked", "refused", "bad input", "failed", "left out")


@dataclass
class Finding:
    """One group of failures: the first case and place of it, and what is left of that after shrinking."""

    index: int
    case: Case
    place: Place
    failure: Failure
    count: int = 1
    smallest: Case | None = None

    def reproducer(self) -> str:
        """A program that shows it."""
        return snippet(self.smallest or self.case, self.place, self.failure.stage, self.failure.said)


@dataclass
class Report:
    """What a run covered and found.

    Attributes:
        seed, methods: as asked for; with an index they give a case again.
        tallies: (place, method) -> a count of each of `TALLIES`.
        reasons: (place, reason) -> how many cases were refused or left out with it.
        dimensions: what the cases that ran were like: field -> value -> count.
    """

    seed: int
    methods: list[str] | None
    cases: int = 0
    seconds: float = 0.0
    tallies: dict[tuple[str, str], Counter] = field(default_factory=dict)
    reasons: Counter = field(default_factory=Counter)
    dimensions: dict[str, Counter] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    def tally(self, place: Place, method: str, what: str) -> None:
        self.tallies.setdefault((str(place), method), Counter())[what] += 1

    def describe(self, case: Case) -> None:
        """Count a case's values of every dimension."""
        for name, value in dimensions(case).items():
            self.dimensions.setdefault(name, Counter())[value] += 1

    def smallest(self) -> Finding | None:
        """The finding that takes least to look at."""
        return min(self.findings, key=lambda f: size(f.smallest or f.case), default=None)

    def command(self, finding: Finding) -> str:
        """The command that runs a finding's first case again."""
        only = "".join(f" --method {name}" for name in self.methods or ())
        return f"intflash selfcheck --seed {self.seed} --only {finding.index} --backend {finding.place.backend}{only}"

    def save(self, folder: Path) -> list[Path]:
        """Write the JSON, and the reproducers as Python files; returns their paths."""
        findings = [
            asdict(f.failure)
            | dict(
                index=f.index, place=str(f.place), method=f.case.method, count=f.count, command=self.command(f),
                case=f.case.as_dict(), smallest=f.smallest and f.smallest.as_dict(), reproducer=f.reproducer(),
            )
            for f in self.findings
        ]  # fmt: skip
        content = dict(
            environment=environment(), seed=self.seed, methods=self.methods, cases=self.cases,
            seconds=round(self.seconds, 1), missing=self.missing,
            covered=[dict(place=p, method=m, **counts) for (p, m), counts in self.tallies.items()],
            reasons=[dict(place=p, reason=reason, count=n) for (p, reason), n in self.reasons.most_common()],
            dimensions={name: dict(counts.most_common()) for name, counts in self.dimensions.items()},
            failures=findings,
        )  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("reproducer*.py"):
            old.unlink()
        paths = [folder / "selfcheck.json"]
        paths[0].write_text(json.dumps(content, indent=1, default=str) + "\n")
        for i, finding in enumerate(sorted(self.findings, key=lambda f: size(f.smallest or f.case))):
            paths.append(folder / f"reproducer{i}.py")
            paths[-1].write_text(finding.reproducer())
        return paths


def run(
    places: Sequence[Place],
    *,
    seed: int = 0,
    seconds: float = 60.0,
    only: Sequence[int] | None = None,
    methods: list[str] | None = None,
    on_case: Callable[[int, Case, float], None] = lambda index, case, elapsed: None,
    on_finding: Callable[[Finding], None] = lambda finding: None,
    on_shrink: Callable[[str], None] = lambda text: None,
) -> Report:
    """Check cases at places until the time is over, then shrink what failed.

    Args:
        places: where each case runs.
        seed: of the cases.
        seconds: for cases; shrinking failures takes at most 90 s more.
        only: these indices instead, whatever time they take.
        methods: those to draw from; None takes all.
        on_case: told the index, the case and the seconds so far, before each case.
        on_finding: told the first failure of each group.
        on_shrink: told in words which failure is being shrunk.
    """
    import torch._dynamo  # takes seconds, which are none of the run's

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for small operations; a case has its own count
    try:
        return _run(places, seed, seconds, only, methods, on_case, on_finding, on_shrink)
    finally:
        torch.set_num_threads(threads)


def _run(places, seed, seconds, only, methods, on_case, on_finding, on_shrink) -> Report:
    report, start = Report(seed, methods), time.monotonic()
    groups: dict[tuple, Finding] = {}
    small = all(map(interpreted, places))
    broken = False
    for index in _indices(only, start + seconds):
        case = generate(seed, index, methods, small)
        report.cases += 1
        on_case(index, case, time.monotonic() - start)
        report.describe(case)
        expected = Expected(case)
        for place in places:
            if reason := left_out(case, place):
                report.tally(place, case.method, "left out")
                report.reasons[str(place), reason] += 1
                continue
            outcome = check(case, place, expected)
            report.tally(place, case.method, _tally(outcome))
            if outcome.refusal is not None:
                report.reasons[str(place), outcome.refusal] += 1
            if outcome.failure is None:
                continue
            key = (place, case.method, *outcome.failure.group)
            if key in groups:
                groups[key].count += 1
                continue
            groups[key] = Finding(index, case, place, outcome.failure)
            on_finding(groups[key])
            broken = broken or not device_works(place)
        if broken:
            break
    report.seconds = time.monotonic() - start
    report.findings = list(groups.values())
    if not broken:
        _shrink_all(report.findings, on_shrink)
    return report


def _indices(only: Sequence[int] | None, end: float) -> Iterator[int]:
    if only:
        yield from only
        return
    index = 0
    while time.monotonic() < end:
        yield index
        index += 1


def _tally(outcome: Any) -> str:
    if outcome.failure is not None:
        return "failed"
    if outcome.refusal is not None:
        return "refused"
    return "bad input" if outcome.refused_input else "checked"


def interpreted(place: Place) -> bool:
    """Whether a place is Triton's interpreter, which is slow and rounds some formats in its own way."""
    return place.backend == "triton" and place.device == "cpu"


def left_out(case: Case, place: Place) -> str | None:
    """Why a case cannot be compared at a place, or None."""
    if not interpreted(place):
        return None
    if case.products > SMALL_PRODUCTS:
        return "too large for Triton's interpreter"
    if case.out_dtype == "bfloat16" or case.out_dtype is None and case.inputs == "bfloat16":
        return "Triton's interpreter truncates to bfloat16 where hardware rounds"
    if case.method.startswith("fp8"):
        return "Triton's interpreter rounds some carries of e4m3 wrongly"
    return None


def device_works(place: Place) -> bool:
    """Whether a failed call left the device usable: after an illegal access every CUDA call fails."""
    if place.device != "cuda":
        return True
    try:
        torch.ones(1, device="cuda").item()
    except RuntimeError:
        return False
    return True


def _shrink_all(findings: list[Finding], tell: Callable[[str], None]) -> None:
    """Shrink the first findings, and repeat what each one's smallest case says."""
    end = time.monotonic() + MOST_SHRINK_SECONDS
    for finding in findings[:MOST_GROUPS]:
        left = min(SHRINK_SECONDS, end - time.monotonic())
        if left <= 0:
            return
        tell(f"shrinking problem {finding.index}")
        finding.smallest = shrink(finding.case, _fails_like(finding), left)
        again = check(finding.smallest, finding.place).failure
        if again is not None:
            finding.failure = again


def _fails_like(finding: Finding) -> Callable[[Case], bool]:
    def fails(case: Case) -> bool:
        found = check(case, finding.place).failure
        return found is not None and found.group == finding.failure.group

    return fails


def dimensions(case: Case) -> dict[str, str]:
    """What a case is like, in the values of each dimension of the surface."""
    masks = {name: getattr(case, name) for name in ("mask", "bias")}
    broadcast = {n: "none" if m is None else f"{m.kind} {''.join(a[0] for a in m.axes)}" for n, m in masks.items()}
    kinds = {f"{name}_kind": "none" if m is None else m.kind for name, m in masks.items()}
    numbers = {"nq": case.nq, "nk": case.nk, "head_dim": case.d, "value_dim": case.dv}
    aligned = all(offset * 2 % 16 == 0 for offset in case.offsets) and case.d % 16 == 0
    return (
        {name: _bucket(n) for name, n in numbers.items()}
        | broadcast
        | kinds
        | dict(
            inputs=case.inputs, cache=str(case.cache), axes=str(len(case.sizes()["q"])), gqa=str(case.hq // case.hk),
            values=case.values, tokens="equal" if case.nq == case.nk else "unequal", aligned=str(aligned),
            layout=case.layouts[0],
            causal=str(case.causal), window=str(case.window is not None),
            mask_causal=f"{kinds['mask_kind']} {case.causal is not None}",
            packed=str(case.packed is not None), recipe="own" if case.granularity is None else "chosen",
            q_granularity=str(case.granularity and case.granularity[0]),
            k_granularity=str(case.granularity and case.granularity[1]),
            v_granularity=str(case.granularity and case.granularity[2]),
            static=str(case.static[0]), bits=str(case.bits), smooth_k=str(case.smooth_k), rotate=str(case.rotate),
            rule=case.rule, out=case.out_dtype or "default", out_scale=str(case.out_scale), lse=str(case.lse),
            check_finite=str(case.check_finite), fault=str(case.fault), compiled=str(case.compiled),
            threads=str(case.threads),
        )
    )  # fmt: skip


def _bucket(n: int) -> str:
    low = 1 << (n.bit_length() - 1)
    return str(n) if n < 4 else f"{low}..{2 * low - 1}"


def environment() -> dict[str, str]:
    """The versions and the machine that a report is about."""
    import platform

    import intflash

    found = dict(
        intflash=intflash.__version__, torch=torch.__version__, python=platform.python_version(),
        machine=platform.machine(), gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    )  # fmt: skip
    try:
        import triton
    except ImportError:
        return found
    return found | dict(triton=triton.__version__)
