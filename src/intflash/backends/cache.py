"""Where compiled things are kept between processes."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(*parts: str) -> Path:
    """``$XDG_CACHE_HOME/intflash/...`` or ``~/.cache/intflash/...``; not created here.

    >>> cache_folder("vortex").name
    'vortex'
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").joinpath("intflash", *parts)
