"""The terminal that every command writes to."""

from rich.console import Console

console = Console()
