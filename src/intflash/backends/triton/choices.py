"""Tile choices: a small measured table per architecture and shape class (scripts/gpu_sweep.py --write).

No tuning at a first call: a class that was not measured takes the nearest one that was, an architecture without a
table the one of sm_90. Tiles never change a bit; masks and wide heads take tiles that leave registers for them.
"""

from __future__ import annotations

import functools
import json
import pathlib

import torch

_TABLE = pathlib.Path(__file__).parent / "tile_table.json"
_FEW, _SOME = 132, 528  # tiles of 64 rows: one, and four, for each multiprocessor of an H200


@functools.cache
def table() -> dict[str, dict[str, list[int]]]:
    return json.loads(_TABLE.read_text())


@functools.cache
def architecture(device: torch.device) -> str:
    """The table's key for a device: its compute capability, or 90."""
    if device.type != "cuda":
        return "90"
    major, minor = torch.cuda.get_device_capability(device)
    found = f"{major}{minor}"
    return found if found in table() else "90"


def row_class(heads: int, rows: int, keys: int, head_dim: int, bits: int, fused: bool) -> str:
    """heads: of all batches."""
    tiles = heads * -(-rows // 64)
    amount = "few" if tiles <= _FEW else "some" if tiles <= _SOME else "many"
    width = 64 if keys <= 64 else 256
    return f"row {'float' if fused else 'int8'} keys{width} p{bits} {amount}"


def stream_class(method_keys: int | None, head_dim: int, bits: int) -> str:
    kind = "online" if method_keys else f"p{bits}"
    return f"stream {kind} d{64 if head_dim <= 64 else 128}"


def choose(device: torch.device, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(table()[architecture(device)].get(name, default))
