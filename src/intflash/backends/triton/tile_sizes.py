"""Chooses tile sizes from a small measured table per architecture and class of shapes (scripts/tune_tiles.py --write).

Nothing is tuned at a first call. An architecture without its own entry uses that of sm_90; architectures that were not
measured have entries only where sm_90's tile would spill. Tile sizes never change a bit. Masks and large head_dim
use tiles that leave registers for them.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
import pathlib
from collections.abc import Iterator

import torch

_TABLE = pathlib.Path(__file__).parent / "tile_sizes.json"
_FEW, _SOME = 132, 528  # number of 64-row tiles: one, and four, for each multiprocessor of an H200


@functools.cache
def table() -> dict[str, dict[str, list[int]]]:
    return json.loads(_TABLE.read_text())


_compiling_for: contextvars.ContextVar[int | None] = contextvars.ContextVar("compiling_for", default=None)


@contextlib.contextmanager
def compiling_for(arch: int) -> Iterator[None]:
    """Chooses as on a GPU of this architecture, without one present."""
    token = _compiling_for.set(arch)
    try:
        yield
    finally:
        _compiling_for.reset(token)


@functools.cache
def _capability(device: torch.device) -> int:
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def short_rows_class(heads: int, rows: int, keys: int, head_dim: int, bits: int, fused: bool) -> str:
    """Returns the class of a short-rows problem. heads: number of heads of all batches."""
    tiles = heads * -(-rows // 64)
    amount = "few" if tiles <= _FEW else "some" if tiles <= _SOME else "many"
    width = 64 if keys <= 64 else 256
    return f"row {'float' if fused else 'int8'} keys{width} p{bits} {amount}"


def tile_loop_class(method_keys: int | None, head_dim: int, bits: int) -> str:
    kind = "online" if method_keys else f"p{bits}"
    return f"stream {kind} d{64 if head_dim <= 64 else 128}"


def choose(device: torch.device, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the tile of a class: the architecture's own, or sm_90's, or the default."""
    arch = str(_compiling_for.get() or _capability(device))
    return tuple(table().get(arch, {}).get(name) or table()["90"].get(name, default))
