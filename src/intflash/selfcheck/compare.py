"""One case on one backend beside the reference: what is equal, what is refused, what is wrong."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import intflash
from intflash.errors import BackendError, InputError
from intflash.methods import METHODS
from intflash.quant import QTensor, Recipe
from intflash.selfcheck.cases import Case
from intflash.selfcheck.source import Place, build

# A float method sums in another order than the reference and rounds P against another tile's maximum. Its SQNR
# against the reference is at least this, in dB, over all outputs; that of the tests, less 6 dB for harder values.
LEAST_DB = {
    "int_flash_full": 34, "int_flash_half": 60, "lite": 44, "qattn": 44, "fp16": 54, "bf16": 40, "fp32": 84, "fp8": 22,
    "fp8_head": 22,
}  # fmt: skip
OTHER_DB = 22  # of a float method that the table does not name
ROW_DB = 15  # one row may be so much worse than all of them
# Where values cancel, the noise is measured against what rows of such values usually give (`Expected.usual`) instead.
# Noise below these shares of max|V| counts as none: the rounding of the output's own format.
FORMAT_STEP = {torch.float32: 2.0**-22, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
LSE_EXACT = dict(rtol=1e-6, atol=1e-6)  # logarithms of equal integers on two devices
LSE_FLOAT = dict(rtol=1e-3, atol=2e-3)
LSE_FP8 = dict(rtol=1e-3, atol=0.05)
WORDS = 3  # at least, of a refusal's reason


@dataclass(frozen=True)
class Failure:
    """What is wrong.

    Attributes:
        stage: "call", "compiled" or "graph".
        kind: "bits", "tolerance", "log-sum-exp", "form", "refuses", "accepts", "unexplained", "error", "changed".
        said: a sentence with the numbers.
        turn: of the case's turns.
    """

    stage: str
    kind: str
    said: str
    turn: int

    @property
    def group(self) -> tuple[str, str]:
        """Failures of one group are likely of one cause; an error's class and first words belong to it."""
        return self.stage, self.kind if self.kind != "error" else reason_of(self.said)[:60]


@dataclass(frozen=True)
class Outcome:
    """How a case went at a place: a failure, or the reason of a refusal, or neither."""

    failure: Failure | None = None
    refusal: str | None = None
    refused_input: bool = False


class Expected:
    """What the reference says to each turn of a case, computed when it is asked for."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._known: dict[int, Any] = {}
        self._usual: dict[int, float] = {}

    def __call__(self, turn: int) -> Any:
        """(output, lse), or the InputError."""
        if turn not in self._known:
            arguments = build(self.case, turn)
            self._known[turn] = _called(arguments, "reference")
            v = arguments["v"]
            v = v.dequantize() if isinstance(v, QTensor) else v
            self._usual[turn] = float(v.double().square().mean()) ** 0.5 / self.case.nk**0.5
        return self._known[turn]

    def usual(self, turn: int) -> float:
        """The root mean square of outputs where every key has the same weight and values are independent."""
        self(turn)
        return self._usual[turn]


def check(case: Case, place: Place, expected: Expected | None = None) -> Outcome:
    """Run a case at a place: all its turns, compiled, and in a CUDA graph where it has one."""
    expected = expected or Expected(case)
    refused_input = False
    for turn in case.turns:
        want = expected(turn)
        if isinstance(want, Exception) and not isinstance(want, InputError):
            return Outcome(Failure("call", "error", f"the reference raises {_words(want)}", turn))
        arguments = build(case, turn, place.device)
        before = [x.clone() for x in tensors(arguments)]
        got = _called(arguments, place.backend, case.threads if place.device == "cpu" else 1)
        if isinstance(got, BackendError):
            reason = str(got).partition(": ")[2] or str(got)
            if len(reason.split()) < WORDS:
                return Outcome(Failure("call", "unexplained", f"refused with no reason but {str(got)!r}", turn))
            return Outcome(refusal=reason_of(reason))
        said = compare(case, place, want, got, expected.usual(turn))
        if said is None and not all(map(_same, before, tensors(arguments))):
            said = "changed", "the call changed its inputs"
        if said is not None:
            return Outcome(Failure("call", *said, turn))
        refused_input = isinstance(want, InputError)
    if refused_input:
        return Outcome(refused_input=True)
    if case.compiled:
        failure = _check_compiled(case, place, expected)
        if failure is not None:
            return Outcome(failure)
    if case.graphed and place.device == "cuda" and place.backend not in ("torch", "reference"):
        failure = _check_graph(case, place, expected)
        if failure is not None:
            return Outcome(failure)
    return Outcome()


def _called(arguments: dict[str, Any], backend: str, threads: int = 1) -> Any:
    """(output, lse or None), or the exception."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = intflash.attention(**arguments, backend=backend)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except Exception as error:  # what is not our own error is a finding
        return error
    finally:
        torch.set_num_threads(before)
    return found if isinstance(found, tuple) else (found, None)


def _check_compiled(case: Case, place: Place, expected: Expected) -> Failure | None:
    """The call inside torch.compile, without a break in its graph."""
    turn = case.turns[-1]
    arguments = build(case, turn, place.device)
    torch._dynamo.reset()

    def call() -> tuple:
        found = intflash.attention(**arguments, backend=place.backend)
        out, lse = found if isinstance(found, tuple) else (found, None)
        return (out.data, out.scale, lse) if isinstance(out, QTensor) else (out, None, lse)

    try:
        out, scale, lse = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=False)()
    except Exception as error:
        return Failure("compiled", "error", f"compiled code raises {_words(error)}", turn)
    want = expected(turn)
    if scale is not None:
        kind = want[0] if isinstance(want[0], QTensor) else None
        out = QTensor.unchecked(out, scale, kind.granularity if kind else "tensor", kind.bits if kind else 8)
    said = compare(case, place, want, (out, lse), expected.usual(turn))
    return None if said is None else Failure("compiled", *said, turn)


def _check_graph(case: Case, place: Place, expected: Expected) -> Failure | None:
    """The call captured in a CUDA graph, replayed with the values of another turn."""
    first, other = case.turns[0], case.turns[0 if len(case.turns) < 3 else 1]
    arguments = build(case, first, place.device) | {"check_finite": False}
    try:
        for _ in range(3):  # compiled, recorded, replayed: a capture must find nothing new
            intflash.attention(**arguments, backend=place.backend)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = intflash.attention(**arguments, backend=place.backend)
        for there, new in zip(tensors(arguments), tensors(build(case, other, place.device)), strict=True):
            _once(there).copy_(_once(new))
        graph.replay()
        torch.cuda.synchronize()
    except Exception as error:
        return Failure("graph", "error", f"in a CUDA graph: {_words(error)}", first)
    found = found if isinstance(found, tuple) else (found, None)
    said = compare(case, place, expected(other), found, expected.usual(other))
    return None if said is None else Failure("graph", *said, other)


def _once(x: Tensor) -> Tensor:
    """A view that has each element of memory once."""
    return x[tuple(slice(0, 1) if step == 0 else slice(None) for step in x.stride())]


def tensors(arguments: dict[str, Any]) -> list[Tensor]:
    """Every tensor of a call, those of quantized tensors and recipes too."""
    found: list[Tensor] = []
    for x in arguments.values():
        if isinstance(x, QTensor):
            found += x.data, x.scale
        elif isinstance(x, Recipe):
            found += [s for s in x.scales if isinstance(s, Tensor)]
        elif isinstance(x, Tensor):
            found.append(x)
    return found


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) if not a.is_floating_point() else torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


def compare(case: Case, place: Place, want: Any, got: Any, usual: float) -> tuple[str, str] | None:
    """What differs between the reference's result or error and a backend's, as a kind and a sentence.

    Args:
        usual: how large outputs of such values are, see `Expected.usual`.
    """
    if isinstance(got, InputError):
        if not isinstance(want, InputError):
            return "refuses", f"refuses what the reference accepts: {got}"
        return None if len(str(got).split()) >= WORDS else ("unexplained", f"InputError with no words but {str(got)!r}")
    if isinstance(got, Exception):
        return "error", f"raises {_words(got)}"
    if isinstance(want, InputError):
        if not _reads(case, place) and not _of_form(case):
            return None  # nobody asked for a look at the values
        return "accepts", f"accepts what the reference refuses: {want}"
    (out, lse), (expected, expected_lse) = got, want
    if wrong := _form(out, expected, place) or _form(lse, expected_lse, place):
        return "form", wrong
    exact = METHODS[case.method].integer_only
    if isinstance(expected, QTensor):
        wrong = _scales(out, expected, exact)
        if wrong is None and not exact:
            wrong = _tolerance(case, out.dequantize().cpu(), expected.dequantize(), expected.scale, usual)
        out, expected = out.data, expected.data
    else:
        wrong = None if exact else _tolerance(case, out.cpu(), expected, None, usual)
    if wrong is not None:
        return "tolerance", wrong
    out = out.cpu()
    if exact and not _same(out, expected):
        differ = out != expected
        return "bits", f"{int(differ.sum())} of {differ.numel()} outputs differ, by {_most(out, expected):.4g} at most"
    if lse is None:
        return None
    lse = lse.cpu()
    limits = LSE_EXACT if exact else LSE_FP8 if case.method.startswith("fp8") else LSE_FLOAT
    if case.smooth_k and place.device != "cpu":
        limits = dict(rtol=1e-4, atol=1e-4 * max(1.0, case.amplitude**2))  # K's mean times Q, in another order
    if not torch.allclose(lse, expected_lse, **limits, equal_nan=True):
        return "log-sum-exp", f"log-sum-exp is off by {_most(lse, expected_lse):.3g}, {limits} is allowed"
    return None


def _reads(case: Case, place: Place) -> bool:
    """Whether the values of the call are looked at: where it asks for that, and on a CPU unless it says no."""
    asked = build(case, case.turns[0]).get("check_finite")
    return place.device == "cpu" if asked is None else asked


def _of_form(case: Case) -> bool:
    """Whether the call is refused for its arguments' form, with no look at values."""
    arguments = build(case, case.turns[0]) | {"check_finite": False}
    try:
        intflash.which_backend(**arguments, backend="reference")
    except InputError:
        return True
    return False


def _form(got: Any, want: Any, place: Place) -> str | None:
    """What differs in type, shape, dtype or device."""
    if type(got) is not type(want):
        return f"gives {type(got).__name__}, the reference {type(want).__name__}"
    if want is None:
        return None
    if isinstance(want, QTensor):
        if (got.granularity, got.bits) != (want.granularity, want.bits):
            return f"gives {got.granularity} scales, {got.bits} bits; the reference {want.granularity}, {want.bits}"
        got, want = got.data, want.data
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"gives {got.dtype} {list(got.shape)}, the reference {want.dtype} {list(want.shape)}"
    return None if got.device.type == place.device else f"the output is on {got.device}, its inputs on {place.device}"


def _scales(got: QTensor, want: QTensor, exact: bool) -> str | None:
    have = got.scale.cpu()
    if have.shape != want.scale.shape:
        return f"the output's scale has shape {list(have.shape)}, the reference's {list(want.scale.shape)}"
    if torch.equal(have, want.scale) or not exact and torch.allclose(have, want.scale, rtol=0.1, atol=0):
        return None
    return f"the output's scale is off by {_most(have, want.scale):.3g}"


def _tolerance(case: Case, got: Tensor, want: Tensor, step: Tensor | None, usual: float) -> str | None:
    """Why a float method's output is too far from the reference's, or None."""
    a, b = want.double(), got.double()
    if not torch.equal(a.isnan(), b.isnan()):
        return f"{int((a.isnan() != b.isnan()).sum())} outputs are NaN on one side only"
    noise = (a - b).nan_to_num(0.0)
    grain = float(step.max()) if step is not None else FORMAT_STEP[want.dtype] * float(a.nan_to_num(0.0).abs().max())
    noise = torch.where(noise.abs() <= 1.01 * grain, 0.0, noise)  # one code or unit may round the other way
    least = LEAST_DB.get(case.method, OTHER_DB)
    rows, signal = noise.norm(dim=-1), a.nan_to_num(0.0).norm(dim=-1)
    floor = usual * a.shape[-1] ** 0.5  # of a row
    whole = max(float(signal.norm()), floor * signal.numel() ** 0.5)
    if rows.norm() > 10 ** (-least / 20) * whole:
        return f"{_decibels(whole, rows.norm()):.1f} dB from the reference, at least {least} is asked for"
    mean = signal.square().mean().sqrt().clamp_min(max(floor, 1e-300))
    worst = (rows / torch.maximum(signal, mean)).max()
    if worst > 10 ** (-(least - ROW_DB) / 20):
        return f"a row {_decibels(1.0, worst):.1f} dB from the reference's, at least {least - ROW_DB} is asked for"
    return None


def _decibels(signal: Any, noise: Any) -> float:
    return float(20 * torch.log10(torch.as_tensor(signal) / torch.as_tensor(noise)))


def _most(a: Tensor, b: Tensor) -> float:
    distance = (a.double() - b.double()).abs().nan_to_num(float("inf"))
    return float(distance.max())


def _words(error: BaseException) -> str:
    first = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first[0][:300]}"


def reason_of(text: str) -> str:
    """A reason with its numbers replaced, so that equal reasons are counted together."""
    return re.sub(r"(?<![\w.])\d+(\.\d+)?(e[+-]?\d+)?", "N", text)


def places(names: list[str] | None = None) -> tuple[list[Place], dict[str, str]]:
    """Where cases can run on this machine, and why the other backends cannot.

    Args:
        names: backends by name; None takes all but the reference, and Vortex, whose simulator takes minutes a call.
    """
    from intflash.backends import backends, get_backend

    chosen = names or [name for name in backends() if name not in ("reference", "vortex")]
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    found, missing = [], {}
    for name in dict.fromkeys(chosen):
        reason = get_backend(name).unavailable()
        here = [Place(name, device) for device in devices if reason is None and _serves(name, device)]
        found += here
        if not here:
            missing[name] = reason or "it serves none of the methods here"
    return found, missing


def _serves(backend: str, device: str) -> bool:
    x = torch.ones(1, 1, 16, 32, device=device)
    for method in METHODS:
        try:
            intflash.which_backend(x, x, x, method=method, backend=backend)
            return True
        except BackendError:
            continue
    return False
