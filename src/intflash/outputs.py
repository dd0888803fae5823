"""Where results go, looked at before the work they come from: a folder or file that cannot be written costs nothing."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from intflash.errors import InputError


def check_folder(path: str | Path) -> None:
    """Make a folder, and try to write in it: what permissions say is not what every file system does.

    Raises:
        InputError: it cannot be made or written.
    """
    with _refused("folder", path):
        Path(path).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()


def check_file(path: str | Path) -> None:
    """Make the folder of a file that will be written, and leave the file as it is.

    Raises:
        InputError: it cannot be written.
    """
    path = Path(path)
    with _refused("file", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.open("ab") if path.exists() else tempfile.TemporaryFile(dir=path.parent)).close()


@contextmanager
def _refused(what: str, path: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"expected a {what} that can be written, got {path}: {error.strerror or error}") from None
