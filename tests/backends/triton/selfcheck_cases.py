"""The self-check in Triton's interpreter. `python selfcheck_cases.py` prints the failures among earlier failing
cases as JSON; with arguments it is `intflash selfcheck` of the Triton backend.
"""

from __future__ import annotations

import json
import sys

if __name__ == "__main__":
    import interpreter  # noqa: F401  sets TRITON_INTERPRET before Triton is imported

from intflash.selfcheck import Case, Place, check

HUGE = dict(d=8, dv=8, nq=3, nk=5, values="outlier", amplitude=1000.0)
TINY = dict(d=45, dv=4, nq=3, nk=5, amplitude=1e-4)
COARSE = dict(inputs="codes", granularity=("tensor",) * 3, d=43, dv=3, nq=5, nk=9, scale=20.0)
CASES = {
    "qflash, scales past its unit": Case(1, "qflash", **HUGE),
    "iflash, scales past its unit": Case(2, "iflash", **HUGE, check_finite=True),
    "qflash, codes past its unit": Case(3, "qflash", **COARSE | dict(amplitude=1000.0)),
    "ibert, unit below 2^-30": Case(4, "ibert", **TINY),
    "fqvit, unit below 2^-30": Case(5, "fqvit", **TINY | dict(amplitude=1e-6)),
    "ivit, unit below 2^-30": Case(6, "ivit", **TINY | dict(amplitude=1e-6)),
    "ibert, a unit past its polynomial": Case(7, "ibert", **COARSE | dict(amplitude=50.0)),
    "fqvit, a unit past its polynomial": Case(8, "fqvit", **COARSE),
    "ivit, a coarse unit": Case(9, "ivit", **COARSE),
}
REFUSED = [name for name in CASES if "scales past" in name or "codes past" in name or "below" in name]


def report() -> dict[str, str | None]:
    """Returns the failure of each case, or None."""
    found = {}
    for name, case in CASES.items():
        outcome = check(case, Place("triton", "cpu"))
        found[name] = outcome.failure.said if outcome.failure else outcome.refusal
        if found[name] is None and outcome.refused_input != (name in REFUSED):
            found[name] = "refused" if outcome.refused_input else "served"
    return found


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(json.dumps(report()))
    else:
        from intflash.cli import app

        app(["selfcheck", *sys.argv[1:]])
