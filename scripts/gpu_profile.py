"""A few kernels once each, for `ncu --clock-control none --set full python scripts/gpu_profile.py`."""

import torch
from gpu_sweep import build

for shape, method, kind, tile in (
    ((4, 32, 4096, 64), "intflash_p8", "stream", (64, 128, 4, 2)),
    ((4, 32, 4096, 64), "intflash_online", "stream", (64, 128, 4, 3)),
    ((1024, 6, 197, 64), "intflash_p8", "row", (64, 4, 4)),
    ((8192, 3, 49, 32), "intflash_p8", "row", (64, 1, 4)),
):
    launch = build(shape, method, kind, tile)
    launch.run()
    torch.cuda.synchronize()
