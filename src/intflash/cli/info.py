"""The command `info`."""

from __future__ import annotations

from rich import box
from rich.markup import escape
from rich.table import Table

from intflash.cli.console import console
from intflash.cli.options import methods_in_order


def info() -> None:
    """Show what every backend serves on this machine, and the reason for what it does not serve."""
    import torch

    import intflash
    from intflash.methods import AUTO, AUTO_RULES

    found = intflash.info()
    console.print(
        f"intflash {intflash.__version__}, torch {torch.__version__}, "
        + (torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device")
    )
    methods = methods_in_order()
    what = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("method", "integers only", "what it is", "source"):
        what.add_column(heading, no_wrap=heading == "method")
    served = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("method", *found["backends"]):
        served.add_column(heading, no_wrap=True)
    for name in methods:
        method = found["methods"][name]
        what.add_row(name, "yes" if method["integer_only"] else "no", method["summary"], method["source"])
        reasons = (backend["methods"][name] for backend in found["backends"].values())
        served.add_row(name, *("[green]yes[/]" if reason is None else "[dim]no[/]" for reason in reasons))
    console.print(what)
    console.print(f"The default method is {AUTO}, which is {' or '.join(rule.method for rule in AUTO_RULES)}.")
    console.print(served)
    for name, backend in found["backends"].items():
        for reason, methods in _reasons(backend).items():
            console.print(f"[bold]{name}[/] does not serve {methods}: {escape(reason)}")


def _reasons(backend: dict) -> dict[str, str]:
    """Reason -> the methods it holds for."""
    if backend["available"] is not None:
        return {backend["available"]: "any method"}
    grouped: dict[str, list[str]] = {}
    for method, reason in backend["methods"].items():
        if reason is not None:
            grouped.setdefault(reason, []).append(method)
    return {reason: ", ".join(methods) for reason, methods in grouped.items()}
