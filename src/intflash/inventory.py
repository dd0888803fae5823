"""What there is: methods, backends, and what each backend serves on this machine."""

from __future__ import annotations

from typing import Any

import torch

from intflash.backends import backends, why_not
from intflash.call import prepare
from intflash.methods import METHODS


def info() -> dict[str, Any]:
    """Return every method and every backend, and why a backend does not serve a method on this machine.

    Returns:
        ``methods``: name -> summary, source, integer_only, granularities (q, k, v), out_dtypes;
        ``backends``: name -> available (None, or why not) and methods: name -> None if served, else
        the reason. A backend for CUDA is asked about CUDA tensors where there is a device.

    Example:
        >>> import intflash
        >>> intflash.info()["backends"]["reference"]["methods"]["intflash"] is None
        True
    """
    methods = {
        m.name: {
            "summary": m.summary,
            "source": m.source,
            "integer_only": m.integer_only,
            "granularities": m.granularities,
            "out_dtypes": [str(t).removeprefix("torch.") for t in m.out_dtypes],
        }
        for m in METHODS.values()
    }
    device = "cuda" if torch.cuda.is_available() else "cpu"
    table = {}
    for name, backend in backends().items():
        missing = backend.unavailable()
        on = "cpu" if name == "cpu" else device
        table[name] = {
            "available": missing,
            "methods": {m: missing or why_not(backend, _sample(m, on)) for m in METHODS},
        }
    return {"methods": methods, "backends": table}


def _sample(method: str, device: str) -> Any:
    x = torch.ones(1, 1, 16, 32, device=device)
    return prepare(x, x, x, method=method, check_finite=False)[0]
