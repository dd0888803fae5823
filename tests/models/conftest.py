"""Fixtures of the model tests; a library that is not installed skips its tests with the reason."""

import numpy as np
import pytest
import torch
from PIL import Image


def _skip_torchvision_operators() -> None:
    """With a CPU build of torch, importing torchvision fails at the fake kernels of its C++ operators."""
    register = torch.library.register_fake

    def register_fake(op, *args, **kwargs):
        if isinstance(op, str) and op.startswith("torchvision::"):
            return lambda function: function
        return register(op, *args, **kwargs)

    torch.library.register_fake = register_fake


_skip_torchvision_operators()


@pytest.fixture
def image_folder(tmp_path):
    """Three classes of three PNG images each."""
    rng = np.random.default_rng(0)
    for name in ("ant", "bee", "cat"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(3):
            pixels = rng.integers(0, 256, (40, 52, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{i}.png")
    return tmp_path / "images"
