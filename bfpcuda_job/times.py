"""Times in us of the kernels for int8 codes, replayed by CUDA graphs: rows of `bench attention`'s kinds."""
import csv, os, sys
import torch
R = os.environ["R"]
import intflash
from intflash import QTensor
from intflash.backends.cuda import backend, window
hopper, windows = backend._hopper_only, window.unsupported
SHAPES = [  # batch, heads, key heads, nq, nk, d, causal
    (64, 12, 12, 197, 197, 64, False), (128, 6, 6, 49, 49, 32, False), (16, 16, 16, 577, 577, 64, False),
    (4, 16, 16, 1024, 1024, 64, False), (1, 16, 16, 4096, 4096, 64, False), (1, 16, 16, 4096, 4096, 128, False),
    (1, 16, 16, 4096, 4096, 128, True), (1, 32, 32, 16384, 16384, 128, True), (8, 32, 8, 1, 4096, 128, False),
    (32, 32, 8, 1, 8192, 128, False), (64, 12, 12, 64, 64, 64, False), (256, 3, 3, 144, 144, 32, False)]
def codes(b, h, n, d):
    x = torch.randint(-127, 128, (b, h, n, d), dtype=torch.int8, device="cuda")
    return QTensor(x, torch.full((1, 1, 1, 1), 0.01, device="cuda"), "tensor")
def time(f):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        f(); f()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g): f()
    g.replay()
    torch.cuda.synchronize()
    best = []
    for _ in range(5):
        a, b = torch.cuda.Event(True), torch.cuda.Event(True)
        a.record()
        for _ in range(10): g.replay()
        b.record(); torch.cuda.synchronize()
        best.append(a.elapsed_time(b) * 100)
    return sorted(best)[2]
rows = []
out = csv.writer(open(f"{R}/times_{sys.argv[1]}.csv", "w"))
out.writerow("kernels b h hk nq nk d causal method us".split())
for shape in SHAPES:
    b, h, hk, nq, nk, d, causal = shape
    q, k, v = codes(b, h, nq, d), codes(b, hk, nk, d), codes(b, hk, nk, d)
    for kernels in ("chosen", "sm80"):
        backend._hopper_only = hopper if kernels == "chosen" else lambda p: "not tested"
        window.unsupported = windows if kernels == "chosen" else lambda p: "not tested"
        for method in ("intflash", "intflash_p8", "intflash_bfp", "intflash_bfp8"):
            p = None
            try:
                from intflash.problem import Problem
                p = Problem(method, q, k, v, d**-0.5, out_dtype=torch.int8, causal=0 if causal else None)
                f = lambda: backend.run(p)
                if sys.argv[1] == "warm": f(); us = 0
                else: us = round(time(f), 2)
            except Exception as e:
                us = repr(e)[:200]
            out.writerow([kernels, *shape, method, us])
