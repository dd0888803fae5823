"""Triton's interpreter for tests. Import this before `intflash`, in a separate process (see conftest)."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime import interpreter  # noqa: E402

_patch = interpreter._patch_lang_tensor


def _patch_lang_tensor(tensor, scope) -> None:
    """Replaces the conversion of a one-element array by `int`, which Triton 3.6 does and NumPy 2.4 refuses."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_lang_tensor
