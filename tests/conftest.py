"""Settings of every test: one torch thread per worker, since pytest-xdist already uses every core."""

import torch

torch.set_num_threads(1)
