"""The Triton backend in the self-check, in Triton's interpreter."""

import json
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("triton")

HERE = pathlib.Path(__file__).parent


def interpreted(*arguments, code=0):
    """Returns the output of `selfcheck_cases.py`, run in a separate process, because Triton decides at import
    whether it interprets.
    """
    command = [sys.executable, "-W", "ignore", str(HERE / "selfcheck_cases.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE)
    assert done.returncode == code, done.stdout + done.stderr[-2000:]
    return done.stdout


def test_regressions():
    found = json.loads(interpreted().splitlines()[-1])
    assert len(found) >= 9 and {name: said for name, said in found.items() if said} == {}


@pytest.mark.full
def test_random_cases(tmp_path):
    interpreted("--backend", "triton", "--seconds", "60", "--seed", "32", "--out", str(tmp_path))
