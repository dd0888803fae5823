"""griffe extension: an "Example:" of a docstring is shown as code, as Google style shows "Examples:"."""

from __future__ import annotations

import re
from typing import Any

import griffe


class ExamplesAsCode(griffe.Extension):
    """Renames the section before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^(\s*)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
