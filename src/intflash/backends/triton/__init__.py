"""Integer attention for NVIDIA GPUs in Triton: the same bits as the reference."""

from intflash.backends.triton.backend import BACKEND

__all__ = ["BACKEND"]
