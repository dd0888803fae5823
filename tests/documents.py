"""What the tests of README, guide and examples share: the repository's root, code blocks, and running code."""

import re
import runpy
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
_FENCE = re.compile(
    r"(?P<unrun><!-- not run: (?P<reason>[^\n]+) -->\n)?^```(?P<language>\w+)[^\n]*\n(?P<text>.*?)^```$", re.M | re.S
)


def blocks(page: Path, language: str) -> list[tuple[str, str | None]]:
    """Yields (text, the reason why it is not run or None) of each fenced block of a language."""
    found = _FENCE.finditer(page.read_text(encoding="utf-8"))
    return [(match["text"], match["reason"]) for match in found if match["language"] == language]


def allow_torchvision() -> None:
    """Lets torchvision be imported with a CPU build of torch, where the fake kernels of its C++ operators would
    fail.
    """
    register = torch.library.register_fake

    def register_fake(op, *args, **kwargs):
        if isinstance(op, str) and op.startswith("torchvision::"):
            return lambda function: function
        return register(op, *args, **kwargs)

    torch.library.register_fake = register_fake


def run_script(path: Path) -> None:
    """Runs a script as `python PATH` does, but in this process, so that libraries are imported once."""
    runpy.run_path(str(path), run_name="__main__")
