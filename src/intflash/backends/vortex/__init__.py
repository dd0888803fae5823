"""Attention kernels for the Vortex GPGPU, and the driver that compiles and runs them (docs/design/vortex.md)."""

from intflash.backends.vortex.backend import BACKEND

__all__ = ["BACKEND"]
