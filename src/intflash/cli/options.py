"""What the commands share: options checked before any work, and errors as one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from intflash.errors import BackendError, InputError

MOST_SEED = (1 << 62) - 1  # torch takes 64 bits, and cases add small numbers


class Commands(TyperGroup):
    """Commands that an InputError, BackendError or OSError ends with its sentence and exit code 2, no traceback."""

    def invoke(self, ctx: typer.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # who read the output has gone: click ends quietly
            raise
        except ModuleNotFoundError as error:
            if error.name not in ("matplotlib", "sklearn"):
                raise
            typer.echo(f"Error: this command needs {error.name}: pip install 'intflash[demo]'", err=True)
            raise typer.Exit(2) from None
        except (InputError, BackendError, OSError) as error:
            typer.echo(f"Error: {error}", err=True)
            raise typer.Exit(2) from None


def one_of(*known: str) -> Callable[[str], str]:
    """A callback that takes these values of an option only."""

    def check(value: str) -> str:
        if value not in known:
            raise typer.BadParameter(f"expected {', '.join(known[:-1])} or {known[-1]}, got {value!r}")
        return value

    return check


def methods_in_order() -> list[str]:
    """Ours first, then the published integer methods, then mixed precision and floats."""
    import intflash

    methods = intflash.info()["methods"]
    return sorted(methods, key=lambda name: (not name.startswith("intflash"), not methods[name]["integer_only"]))


def _device(value: str | None) -> str:
    import torch

    there = torch.cuda.is_available()
    device = one_of("cpu", "cuda")(value or ("cuda" if there else "cpu"))
    if device == "cuda" and not there:
        raise typer.BadParameter("torch finds no CUDA device here; there is: cpu")
    return device


def _methods(names: list[str] | None) -> list[str] | None:
    from intflash.methods import get_method

    return names and [get_method(name).name for name in dict.fromkeys(names)]


def _method(name: str) -> str:
    from intflash.methods import AUTO

    return name if name == AUTO else _methods([name])[0]


def backend_name(name: str | None) -> str | None:
    """The name of a backend that there is."""
    from intflash.backends import get_backend

    return name and get_backend(name).name


Device = Annotated[str, typer.Option(help="The device: cpu or cuda.", callback=_device)]
BestDevice = Annotated[
    str | None,
    typer.Option("--device", help="The device: cpu or cuda (default: cuda where there is one).", callback=_device),
]
Methods = Annotated[
    list[str] | None,
    typer.Option("--method", help="Use only this method; may be repeated (default: all).", callback=_methods),
]
Method = Annotated[str, typer.Option(help="The method that the scales are for.", callback=_method)]
Backend = Annotated[
    str | None,
    typer.Option(help="Use only this backend (default: the fastest that serves the call).", callback=backend_name),
]
Seed = Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Seed of the random inputs.")]
