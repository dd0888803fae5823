"""`intflash selfcheck` of the Triton backend in Triton's interpreter, with that interpreter's repairs for new NumPy.

python scripts/selfcheck_interpreter.py [the options of `intflash selfcheck`]
"""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[1] / "tests" / "backends" / "triton"))

import interpreter  # noqa: E402, F401  before any kernel

from intflash.cli import app  # noqa: E402

if __name__ == "__main__":
    app(["selfcheck", "--backend", "triton", *sys.argv[1:]])
