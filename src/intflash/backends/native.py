"""The native module, `intflash._native`: the kernels of CPUs and the launcher of CUDA kernels."""

from __future__ import annotations

from typing import Any

module: Any = None
missing: str | None = None  # why there is none

try:
    from intflash import _native
except ImportError as error:
    if "cannot import name" in str(error):
        missing = (
            "intflash was installed without its native module, because there was no C++ compiler or the build was told "
            "to leave it out; install GCC or Clang and Python's headers, then intflash again"
        )
    else:
        missing = f"its native module does not load ({error}); install intflash again"
else:
    module = _native
