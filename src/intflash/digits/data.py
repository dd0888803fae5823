"""scikit-learn's 1,797 handwritten digits and their fixed split: every third image is held out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

IMAGES = 1797
HELD_OUT = 599


@dataclass(frozen=True)
class Split:
    """Images float32 ``[n, 1, 8, 8]`` in [0, 1] and their labels int64 ``[n]``."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, count: int) -> Split:
        return Split(self.images[:count], self.labels[:count])

    def to(self, device: str) -> Split:
        return Split(self.images.to(device), self.labels.to(device))


def load_split() -> tuple[Split, Split]:
    """``(train, held_out)``: 1,198 and 599 images; image i is held out when ``i % 3 == 2``.

    Example:
        >>> from intflash.digits import load_split
        >>> train, held_out = load_split()
        >>> len(train), len(held_out), tuple(held_out.images.shape)
        (1198, 599, (599, 1, 8, 8))
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(digits.target).long()
    held_out = torch.arange(IMAGES) % 3 == 2
    return Split(images[~held_out], labels[~held_out]), Split(images[held_out], labels[held_out])
