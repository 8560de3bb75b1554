"""Where a result comes from: versions of packages, and texts without this machine's paths. It imports no package."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
from pathlib import Path


def version_of(name: str) -> str | None:
    """The version of a package: of the loaded module, else of the installed distribution; None without either."""
    found = getattr(sys.modules.get(name), "__version__", None)
    if found is not None:
        return str(found)
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions(*names: str) -> dict[str, str | None]:
    """The versions of Python and of packages, by name."""
    return {"python": platform.python_version()} | {name: version_of(name) for name in names}


def without_paths(text: str, root: Path | None = None) -> str:
    """The text with absolute paths as `PATH`, those below `root` relative to it, and this host as `HOST`."""
    if root is not None:
        text = text.replace(f"{root}{os.sep}", "")
    text = re.sub(r"(?<![\w.])~?/[^\s,;'\"]+", "PATH", text)
    host = platform.node()
    return re.sub(rf"(?<!\w){re.escape(host)}(?!\w)", "HOST", text) if host else text
