"""MkDocs hook: links from a page to a file of the repository that is no page lead to that file on GitHub.

Pages use relative links, which also work when they are read on GitHub or in an editor.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"(?P<before>\]\(|^\[[^\]]+\]:\s*)(?P<target>[^)\s#<>]+)(?P<anchor>#[^)\s]*)?", re.MULTILINE)


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Rewrite the relative links that leave the site, and refuse those whose file does not exist."""
    root = Path(config.config_file_path).parent
    folder = posixpath.dirname(posixpath.join(Path(config.docs_dir).name, page.file.src_uri))

    def rewrite(match: re.Match) -> str:
        target = match["target"]
        if re.match(r"[a-z]+:", target) or target.startswith("/"):
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        found = files.get_file_from_path(posixpath.relpath(path, Path(config.docs_dir).name))
        if found is not None and not found.inclusion.is_excluded():
            return match[0]
        if not (root / path).exists():
            return match[0]  # MkDocs itself reports it, and strict mode fails
        kind = "tree" if (root / path).is_dir() else "blob"
        return f"{match['before']}{config.repo_url.rstrip('/')}/{kind}/main/{path}{match['anchor'] or ''}"

    return _LINK.sub(rewrite, markdown)
