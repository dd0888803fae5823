"""Fixtures of the model tests; a library that is not installed skips its tests with the reason."""

import numpy as np
import pytest
from PIL import Image


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
