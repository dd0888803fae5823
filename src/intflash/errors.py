"""The errors IntFlash raises; each message shows what was expected and what came."""

from __future__ import annotations


class InputError(ValueError):
    """An argument that no backend could serve: a shape, dtype, scale or bound is wrong."""


class BackendError(RuntimeError):
    """The backend that was asked for, or every backend, cannot serve this call; the message says why."""


class DistributedError(RuntimeError):
    """A collective failed: a rank has ended, is stuck, or the network is gone; the message names the rank and what."""
