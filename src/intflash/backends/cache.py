"""Where compiled things are kept between processes."""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path


def cache_folder(*parts: str) -> Path:
    """``$XDG_CACHE_HOME/intflash/...`` or ``~/.cache/intflash/...``; not created here.

    A user without a home directory has a private folder for the life of the process.

    >>> cache_folder("vortex").name
    'vortex'
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or _home_cache()).joinpath("intflash", *parts)


def _home_cache() -> Path:
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # HOME is not set, and the user has no entry in the system's list
        return Path(_private_folder().name)


@functools.cache
def _private_folder() -> tempfile.TemporaryDirectory:
    """Not to be guessed by other users, because compiled code is loaded from it; removed at the end of the process."""
    return tempfile.TemporaryDirectory(prefix="intflash-cache-")
