"""Runs cases of the CUDA kernels on the CPU, in the PTX emulator.

`python emulated_cases.py KERNEL METHOD FIXED [NAME...]` prints the failures of each case as JSON; without names, of all
cases. FIXED is a JSON object of choices that plans do not make, often {}.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path += map(str, (HERE.parents[1] / "machines" / "ptx", HERE.parent / "triton", HERE.parents[1], HERE.parents[2]))

import pytest  # noqa: E402
import torch  # noqa: E402

if __name__ == "__main__":
    import cuda_checks as checks
    import emulate
    import translate

    from intflash.backends.cuda import backend, plans, program

    program.CudaLaunch.run = emulate.run
    kernel, method, fixed, *names = sys.argv[1:]
    torch.manual_seed(0)
    torch.set_num_threads(1)
    wrong = {}
    module = importlib.import_module(f"test_{kernel}")
    if hasattr(module, "only"):
        module.only(pytest.MonkeyPatch())
    for choice, value in json.loads(fixed).items():
        plans.FIXED[choice] = tuple(value) if isinstance(value, list) else value
    for name, p in module.cases(method):
        if not names or name in names:
            try:
                wrong[name] = checks.complaint(p, backend.run(p))
            except (emulate.EmulationError, translate.Untranslated) as error:
                wrong[name] = str(error)
    print(json.dumps(wrong))
