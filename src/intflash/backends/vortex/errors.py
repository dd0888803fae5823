"""Errors of the Vortex backend: a missing part of the install, a failed build, a failed run."""

from __future__ import annotations

from intflash.errors import BackendError


class VortexError(BackendError):
    """Vortex is not set up, or refused a kernel; the message names the part and what to do."""
