"""Settings of every test: one torch thread per worker, and one skipped entry for each GPU test where there is no
GPU.
"""

import collections

import pytest
import torch

from documents import allow_torchvision

torch.set_num_threads(1)
allow_torchvision()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a CUDA device, keeps one skipped item of each `gpu` test, with the number of its cases."""
    if torch.cuda.is_available():
        return
    cases = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("gpu"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for first, *others in cases.values():
        reason = f"no CUDA device: scripts/gpu_check.sh runs its {1 + len(others)} cases on one"
        first.add_marker(pytest.mark.skip(reason=reason), append=False)
        for item in others:
            items.remove(item)
