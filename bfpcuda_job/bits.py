"""Bits of one share of a kernel's cases: bits.py KERNEL METHOD SHARE OF SECONDS; a JSON line for each case."""
import importlib, json, os, sys, time, traceback
R = os.getcwd()
sys.path[:0] = [R, f"{R}/tests", f"{R}/tests/backends/cuda", f"{R}/tests/backends/triton"]
import pytest, torch
import cuda_checks as checks, integer_cases as ic
from intflash.backends.cuda import backend
kernel, method, share, of, seconds = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
torch.set_num_threads(1)
torch.manual_seed(0)
module = importlib.import_module(f"test_{kernel}")
mp = pytest.MonkeyPatch()
if hasattr(module, "only"):
    module.only(mp)
cases = list(module.cases(method))
end = time.time() + seconds
for name, p in cases[share::of]:
    if time.time() > end:
        print(json.dumps([kernel, method, name, "not run"]), flush=True)
        continue
    try:
        there = ic.on_device(p, "cuda")
        reason = backend.unsupported(there)
        found = f"unsupported: {reason}" if reason else checks.complaint(p, backend.run(there))
    except Exception as error:
        found = f"{type(error).__name__}: {str(error)[-1500:]}"
    print(json.dumps([kernel, method, name, found]), flush=True)
