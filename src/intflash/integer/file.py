"""The file of an integer model: safetensors of its constants, with the program and its provenance as JSON metadata."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from intflash.errors import InputError
from intflash.integer.model import IntegerModel
from intflash.integer.program import OPERATIONS, VERSION, Buffer, Input, Operation, Output, Program
from intflash.outputs import check_file

FORMAT = "intflash-integer"
_KEYS = ("format", "version", "program", "provenance", "digest")
_MALFORMED = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
)  # of wrong types, sizes


def save(model: IntegerModel, path: str | Path) -> None:
    """Write the model's constants, program and provenance, with a digest of them all.

    Raises:
        InputError: the file cannot be written.
    """
    from safetensors.torch import save_file

    check_file(path)
    program = model.program
    tensors = {name: x.cpu().contiguous() for name, x in program.tensors.items()}
    text, provenance = json.dumps(_described(program)), json.dumps(model.provenance)
    metadata = {
        "format": FORMAT, "version": str(VERSION), "program": text, "provenance": provenance,
        "digest": _digest(text, provenance, tensors),
    }  # fmt: skip
    save_file(tensors, str(path), metadata)


def load(path: str | Path, *, backend: str | None = None) -> IntegerModel:
    """The integer model that `IntegerModel.save` wrote, on the CPU, without the float model.

    Args:
        path: the file.
        backend: as for `IntegerModel`.

    Raises:
        InputError: there is no such file, it is damaged, of another format or version, or its program is none.

    Example:
        >>> from intflash import integer
        >>> integer.load("no such file")
        Traceback (most recent call last):
        intflash.errors.InputError: the integer model no such file cannot be read: there is no such file
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            found = metadata.get("format")
            if found != FORMAT:
                raise InputError(f"{path} is no integer model: its format is {found!r}, expected {FORMAT!r}")
            if metadata.get("version") != str(VERSION):
                raise InputError(
                    f"{path} is of version {metadata.get('version')} of the definition, this library has {VERSION}: "
                    "convert the float model again"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise InputError(f"the integer model {path} cannot be read: there is no such file") from None
    except (OSError, SafetensorError) as error:
        raise InputError(f"the integer model {path} cannot be read: {error}") from None
    missing = [key for key in _KEYS if key not in metadata]
    if missing:
        raise InputError(f"{path} is damaged: it misses {', '.join(missing)}")
    if _digest(metadata["program"], metadata["provenance"], tensors) != metadata["digest"]:
        raise InputError(f"{path} is damaged: its program, constants and provenance are not those that were written")
    try:
        program = _read(json.loads(metadata["program"]), tensors).check()
        provenance = json.loads(metadata["provenance"])
    except (InputError, *_MALFORMED) as error:
        raise InputError(f"{path} holds no valid program: {error}") from None
    return IntegerModel(program, provenance, backend=backend)


def digest(model: IntegerModel) -> str:
    """Of the program, its provenance and its constants, in hexadecimal digits."""
    tensors = {name: x.cpu() for name, x in model.program.tensors.items()}
    return _digest(json.dumps(_described(model.program)), json.dumps(model.provenance), tensors)


def _described(program: Program) -> dict[str, Any]:
    """The program without its tensors, as JSON holds it."""
    return {
        "inputs": [asdict(x) for x in program.inputs],
        "buffers": {name: asdict(x) for name, x in program.buffers.items()},
        "operations": [{"kind": type(x).__name__} | asdict(x) for x in program.operations],
        "outputs": [asdict(x) for x in program.outputs],
        "result": program.result,
    }


def _read(content: dict[str, Any], tensors: dict[str, Tensor]) -> Program:
    return Program(
        tuple(_made(Input, x) for x in content["inputs"]),
        {name: _made(Buffer, x) for name, x in content["buffers"].items()},
        tuple(_operation(x) for x in content["operations"]),
        tuple(_made(Output, x) for x in content["outputs"]),
        tensors,
        content["result"],
    )


def _operation(content: dict[str, Any]) -> Operation:
    content = dict(content)
    kind = content.pop("kind")
    if kind not in OPERATIONS:
        raise InputError(f"operation {kind!r} is none of {', '.join(OPERATIONS)}")
    return _made(OPERATIONS[kind], content)


def _made(kind: type, content: dict[str, Any]) -> Any:
    """An instance of a dataclass from a JSON object with exactly its fields; lists become tuples."""
    names = {f.name for f in fields(kind)}
    if content.keys() != names:
        raise InputError(f"{kind.__name__} has the fields {sorted(names)}, got {sorted(content)}")
    return kind(**{name: tuple(x) if isinstance(x, list) else x for name, x in content.items()})


def _digest(program: str, provenance: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(f"{program}\n{provenance}".encode())
    for name in sorted(tensors):
        x = tensors[name]
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        digest.update(x.contiguous().view(torch.uint8).numpy() if x.ndim else bytes(1))
    return digest.hexdigest()
