"""`intflash selfcheck`: what it draws, what it finds, and what it reports."""

import json
import subprocess
import sys
from dataclasses import fields, replace

import pytest
import torch
from typer.testing import CliRunner

import intflash
from intflash import cli, selfcheck
from intflash.backends import backends
from intflash.methods import METHODS
from intflash.quant import QTensor
from intflash.selfcheck import cases, compare, session, shrink, source
from intflash.selfcheck.cases import Case, MaskCase, generate
from intflash.selfcheck.source import Place

TORCH = Place("torch", "cpu")
DRAWN = [generate(0, i) for i in range(4000)]


@pytest.fixture
def broken(monkeypatch):
    """Replaces the torch backend's computation, or the reason why it cannot serve a problem."""

    def replace_backend(run=None, unsupported=None):
        known = dict(backends())
        whole = known["torch"]
        known["torch"] = replace(whole, limits=unsupported or whole.limits, run=run or whole.run)
        monkeypatch.setattr("intflash.backends.backends", lambda: known)
        return whole

    return replace_backend


def test_a_case_depends_on_seed_and_index_only():
    assert DRAWN[:50] == [generate(0, i) for i in range(50)]
    assert DRAWN[:50] != [generate(1, i) for i in range(50)]
    assert len(set(DRAWN)) == len(DRAWN)
    assert generate(0, 7, ["qflash"]).method == "qflash"
    assert Case.from_dict(json.loads(json.dumps(DRAWN[3].as_dict()))) == DRAWN[3]


def test_the_first_case_stays_as_it_is():
    """A reported index must mean the same problem on another machine with the same random numbers of Python."""
    first = generate(0, 0)
    assert (first.values_seed, first.nq, first.nk, first.d) == (generate(0, 0).values_seed, first.nq, first.nk, first.d)
    code = "from intflash.selfcheck import generate; print(generate(5, 11))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == str(generate(5, 11))


def test_values_repeat_per_call_and_differ_between_calls():
    case = replace(DRAWN[0], fault=None)
    once, again, other = (compare.tensors(source.build(case, turn)) for turn in (0, 0, 1))
    assert all(map(compare._same, once, again)) and not all(map(compare._same, once, other))


WANTED = {  # dimension -> values that must occur
    "inputs": ("float32", "float16", "bfloat16", "codes"),
    "cache": ("True", "False"),
    "axes": ("2", "3", "4", "5"),
    "gqa": ("1", "2", "3", "4"),
    "tokens": ("equal", "unequal"),
    "aligned": ("True", "False"),
    "layout": cases.LAYOUTS,
    "values": cases.VALUES,
    "causal": ("None", "top_left", "bottom_right"),
    "mask_kind": ("none", "bool", "float32", "float16", "bfloat16", "float64"),
    "bias_kind": ("none", "float32", "float16", "bfloat16", "int32"),
    "mask_causal": ("bool True", "bool False", "float32 True"),
    "mask": tuple(f"bool {axes}" for axes in ("f", "ff", "fff", "ffff", "ooo", "foo", "ofo", "fffp", "fofo")),
    "packed": ("True", "False"),
    "recipe": ("own", "chosen"),
    "q_granularity": ("tensor", "head", "token", "block", "none", "channel"),
    "k_granularity": ("tensor", "head", "token", "block", "none", "channel"),
    "v_granularity": ("tensor", "head", "token", "block", "none", "channel"),
    "static": ("None", "number", "tensor"),
    "bits": ("8", "4"),
    "smooth_k": ("True", "False"),
    "rotate": ("True", "False"),
    "rule": ("exact", "divide"),
    "out": ("default", "float32", "float16", "bfloat16", "int8", "int16"),
    "out_scale": ("None", *cases.OUT_SCALES),
    "lse": ("True", "False"),
    "check_finite": ("None", "True", "False"),
    "fault": ("None", *cases.FAULTS),
    "compiled": ("True", "False"),
    "threads": ("1", "2", "3"),
    "head_dim": ("1", "2", "3", "8..15", "128..255", "256..511"),
    "nq": ("1", "256..511", "1024..2047"),
    "nk": ("1", "256..511", "1024..2047"),
}


@pytest.mark.parametrize("dimension", WANTED)
def test_every_option_value_is_drawn(dimension):
    seen = {session.dimensions(case)[dimension] for case in DRAWN}
    assert set(WANTED[dimension]) <= seen, set(WANTED[dimension]) - seen


def test_every_method_and_every_head_dim_is_drawn():
    assert {case.method for case in DRAWN} == set(METHODS)
    assert {case.d for case in DRAWN} == set(range(1, 257))
    assert {case.turns for case in DRAWN} == {(0, 1, 2, 3)}


def test_cases_are_possible_and_within_the_time_of_the_reference():
    for case in DRAWN:
        assert shrink.possible(case), case
        assert case.scores <= cases.MOST_SCORES and case.products <= cases.MOST_PRODUCTS
    small = [generate(0, i, small=True) for i in range(300)]
    assert all(case.products <= cases.SMALL_PRODUCTS and case.turns == (0, 3) for case in small)


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 3, 4, 5), (2, 2, 3, 4, 5)], ids=str)
def test_laid_out_values_are_the_values(layout, shape):
    x = torch.arange(float(torch.tensor(shape).prod())).reshape(shape)
    strides = source.strides(layout, shape)
    y = source.lay_out(x, strides, 3, "cpu")
    expected = x[(0,) * max(len(shape) - 2, 0)].expand(shape) if layout == "shared" else x
    assert torch.equal(y, expected) and y.stride() == strides and y.storage_offset() == 3
    if layout not in ("contiguous", "shared") and len(shape) > 2:
        assert not y.is_contiguous()


@pytest.mark.parametrize("index", range(0, 4000, 160))
def test_backends_of_this_machine_equal_the_reference(index):
    case = replace(DRAWN[index], compiled=False)
    for place in selfcheck.places()[0]:
        assert selfcheck.check(case, place).failure is None


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, 2000, 100))
def test_backends_of_this_machine_equal_the_reference_on_many(first):
    found = selfcheck.run(selfcheck.places()[0], seed=32, only=range(first, first + 100))
    assert found.cases == 100 and [f.failure for f in found.findings] == []


def test_every_fault_is_refused_by_the_reference():
    """A call with a wrong form or wrong values. Wrong values are drawn only for cases that have the tensors for it."""
    case = Case(0, "intflash", nq=3, nk=4, d=8, dv=8, hq=2, hk=1, gqa_flag=True, batch=(2,))
    for fault in cases.FAULTS:
        with pytest.raises(intflash.InputError):
            intflash.attention(**source.build(replace(case, fault=fault), 0), backend="reference")


def off_by_one(whole, when=lambda problem: True):
    def run(problem):
        result = whole.run(problem)
        if when(problem):
            result.out.view(-1)[0] += 1
        return result

    return run


CASE = Case(
    1, "intflash", batch=(3,), hq=4, hk=2, nq=30, nk=40, d=24, dv=16, causal="top_left", lse=True, offsets=(1, 2, 3),
    mask=MaskCase("bool", ("full", "full", "one", "full")), gqa_flag=True, out_dtype="int16",
    layouts=("tokens_first", "columns", "padded"),
)  # fmt: skip


def test_a_wrong_bit_is_caught_and_shrunk_to_the_least(broken):
    whole = backends()["torch"]
    broken(off_by_one(whole))
    assert selfcheck.check(CASE, TORCH).failure.kind == "bits"
    smallest = shrink.shrink(CASE, lambda c: selfcheck.check(c, TORCH).failure is not None)
    assert (smallest.nq, smallest.nk, smallest.d, smallest.dv, smallest.hq, smallest.hk) == (1, 1, 1, 1, 1, 1)
    assert smallest.mask is None and smallest.causal is None and smallest.offsets == (0, 0, 0) and not smallest.lse
    assert smallest.layouts == ("contiguous",) * 3 and len(smallest.turns) == 1


def test_shrinking_keeps_what_the_failure_needs(broken):
    whole = backends()["torch"]
    broken(off_by_one(whole, lambda p: p.keep is not None and p.causal is not None and p.k.shape[2] > 20))
    smallest = shrink.shrink(CASE, lambda c: selfcheck.check(c, TORCH).failure is not None)
    assert smallest.mask is not None and smallest.causal == "top_left" and smallest.nk == 21 and smallest.nq == 1
    assert smallest.mask.axes == ("one",)


def test_a_fault_of_repeated_calls_is_found_and_keeps_its_calls(broken):
    whole, seen = backends()["torch"], []

    def stale(problem):  # as a cache that is too coarse: the first result of a shape is given again
        key = tuple(problem.q.shape)
        result = next((r for k, r in seen if k == key), None) or whole.run(problem)
        seen.append((key, result))
        return result

    broken(stale)
    case = Case(1, "intflash", nq=3, nk=3, d=4, dv=4)
    failure = selfcheck.check(case, TORCH).failure
    assert failure.kind == "bits" and failure.turn == 1


def test_one_wrong_row_exceeds_the_tolerance_of_float_methods(broken):
    whole = backends()["torch"]
    case = Case(2, "fp16", nq=100, nk=120, d=32, dv=32)
    assert selfcheck.check(case, TORCH).failure is None

    def run(problem):
        result = whole.run(problem)
        result.out[..., -1, :] = 0
        return result

    broken(run)
    assert selfcheck.check(case, TORCH).failure.kind == "tolerance"


def test_errors_that_are_not_ours_are_failures(broken):
    def run(problem):
        raise IndexError("out of range")

    broken(run)
    failure = selfcheck.check(CASE, TORCH).failure
    assert failure.kind == "error" and failure.said == "raises IndexError: out of range"


def test_a_refusal_is_counted_and_needs_a_reason(broken):
    broken(unsupported=lambda problem: f"it takes at most 3 heads, got {problem.q.shape[1]}")
    assert selfcheck.check(CASE, TORCH).refusal == "it takes at most N heads, got N"
    broken(unsupported=lambda problem: "no")
    assert selfcheck.check(CASE, TORCH).failure.kind == "unexplained"


def test_an_input_error_on_what_the_reference_accepts_is_a_failure(broken):
    def run(problem):
        raise intflash.InputError("expected something else, got this")

    broken(run)
    assert selfcheck.check(CASE, TORCH).failure.kind == "refuses"


def test_serving_what_the_reference_refuses_is_a_failure():
    case = Case(1, "qflash", d=4, dv=4, amplitude=1000.0, values="outlier")
    arguments = source.build(case, 0)
    with pytest.raises(intflash.InputError):
        intflash.attention(**arguments, backend="reference")
    assert selfcheck.check(case, TORCH).failure is None
    wrong = intflash.attention(**(arguments | dict(method="intflash")))
    want = intflash.InputError("refused")
    assert compare.compare(case, TORCH, want, (wrong, None), 1.0)[0] == "accepts"
    unchecked = replace(case, check_finite=False)  # nobody asked for a look at the scales
    assert compare.compare(unchecked, TORCH, want, (wrong, None), 1.0) is None
    formal = replace(unchecked, fault="causal_align")
    assert compare.compare(formal, TORCH, want, (wrong, None), 1.0)[0] == "accepts"


def test_a_changed_input_is_a_failure(broken):
    whole = backends()["torch"]

    def run(problem):
        result = whole.run(problem)
        problem.q.zero_()
        return result

    broken(run)
    assert selfcheck.check(Case(1, "intflash", nq=3, nk=3, d=4, dv=4), TORCH).failure.kind == "changed"


def test_compiled_code_that_fails_is_a_failure(monkeypatch):
    case = Case(1, "intflash", nq=3, nk=3, d=4, dv=4, compiled=True, turns=(0,))
    assert selfcheck.check(case, TORCH).failure is None

    def compiled(*given, **options):
        raise RuntimeError("no graph")

    monkeypatch.setattr(torch, "compile", compiled)
    failure = selfcheck.check(case, TORCH).failure
    assert (failure.stage, failure.said) == ("compiled", "compiled code raises RuntimeError: no graph")


def run_command(*arguments, code=0):
    done = CliRunner().invoke(cli.app, ["selfcheck", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done.output


def test_the_command_covers_and_writes(tmp_path):
    given = ("--only", 3, "--only", 4, "--only", 6, "--backend", "torch", "--out", tmp_path)
    printed = run_command(*given)
    assert "no failure" in printed and "3 problems" in printed
    found = json.loads((tmp_path / "selfcheck.json").read_text())
    assert found["cases"] == 3 and not found["failures"] and found["environment"]["torch"] == torch.__version__
    assert sum(row.get("checked", 0) + row.get("bad input", 0) for row in found["covered"]) == 3
    assert not (tmp_path / "running.txt").exists()
    again = tmp_path / "again"
    assert run_command(*given[:-1], again).splitlines()[2:-1] == printed.splitlines()[2:-1]


def test_the_command_ends_at_its_time(tmp_path):
    run_command("--seconds", 0.5, "--method", "intflash_p8", "--backend", "torch", "--out", tmp_path)
    found = json.loads((tmp_path / "selfcheck.json").read_text())
    assert found["cases"] >= 1 and {row["method"] for row in found["covered"]} == {"intflash_p8"}


def test_a_failure_exits_with_1_and_prints_a_program_that_runs(broken, tmp_path):
    whole = backends()["torch"]
    broken(off_by_one(whole, lambda p: p.k.shape[2] > 4))
    given = ("--backend", "torch", "--method", "intflash", "--out", tmp_path)
    indices = [x for i in range(3) for x in ("--only", i)]
    printed = run_command(*indices, *given, code=1)
    found = json.loads((tmp_path / "selfcheck.json").read_text())["failures"]
    assert found[0]["smallest"]["nk"] == 5 and found[0]["smallest"]["nq"] == 1
    assert found[0]["command"] == "intflash selfcheck --seed 0 --only 0 --backend torch --method intflash"
    program = tmp_path / "reproducer0.py"
    assert program.read_text() == found[0]["reproducer"] and found[0]["reproducer"].splitlines()[-1] in printed
    done = subprocess.run([sys.executable, program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tensor(") == 2  # here the backend is not broken: both results are shown
    assert run_command("--only", 0, *given, code=1)


def test_a_reproducer_of_every_kind_of_case_runs():
    """The printed program is what was run, and runs alone with its imports."""
    kinds = [CASE, *(c for c in DRAWN[:60] if c.compiled or c.packed or c.bias)][:12]
    for case in kinds:
        for stage in ("call", "compiled", "graph"):
            text = source.snippet(replace(case, turns=(0,)), TORCH, stage, "what was found")
            compile(text, "reproducer.py", "exec")
            assert text.startswith("# what was found\nimport torch")


def test_no_backend_to_check(tmp_path):
    printed = run_command("--backend", "vortex", "--out", tmp_path, code=1)
    assert "vortex is not checked" in printed and "no backend to check" in printed


def test_bad_options(tmp_path):
    for given in (("--seed", 1 << 64), ("--seed", -1), ("--seconds", 0), ("--method", "nope"), ("--backend", "nope")):
        assert "Traceback" not in run_command(*given, "--out", tmp_path / "none", code=2)
    assert not (tmp_path / "none").exists()


def test_fields_have_one_default_to_shrink_to():
    usual = Case(0, "intflash")
    assert all(getattr(usual, f.name) == f.default for f in fields(Case) if f.name not in ("values_seed", "method"))
    assert shrink.size(usual) < shrink.size(CASE)


def test_quantized_tensors_count_as_their_tensors():
    q = QTensor(torch.ones(1, 1, 2, 2, dtype=torch.int8), 1.0)
    recipe = intflash.Recipe(q_scale=torch.ones(()))
    assert len(compare.tensors(dict(q=q, recipe=recipe, bias=None))) == 3
