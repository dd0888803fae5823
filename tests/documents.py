"""What the tests of README, guide and examples share: the repository's root, code blocks, and running code in place."""

import re
import runpy
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(
    r"(?P<unrun><!-- not run: (?P<reason>[^\n]+) -->\n)?^```(?P<language>\w+)[^\n]*\n(?P<text>.*?)^```$", re.M | re.S
)


def blocks(page: Path, language: str) -> list[tuple[str, str | None]]:
    """(text, why it is not run or None) of each fenced block of that language."""
    found = _FENCE.finditer(page.read_text(encoding="utf-8"))
    return [(match["text"], match["reason"]) for match in found if match["language"] == language]


def allow_torchvision() -> None:
    """With a CPU build of torch, importing torchvision fails at the fake kernels of its C++ operators."""
    register = torch.library.register_fake

    def register_fake(op, *args, **kwargs):
        if isinstance(op, str) and op.startswith("torchvision::"):
            return lambda function: function
        return register(op, *args, **kwargs)

    torch.library.register_fake = register_fake


def run_script(path: Path) -> None:
    """A script as `python PATH` runs it, in this process, so that libraries are imported once."""
    runpy.run_path(str(path), run_name="__main__")
