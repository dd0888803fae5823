"""`python -m intflash.cli` is the command `intflash`."""

from intflash.cli import app

app()
