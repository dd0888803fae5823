"""timm is imported on a CPU build of torch, too."""

from documents import allow_torchvision

allow_torchvision()
