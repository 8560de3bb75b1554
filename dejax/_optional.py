"""What may be missing here: packages that only some parts need, and the native extension."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def is_there(package: str) -> bool:
    """Whether a package can be imported. It is not imported."""
    return importlib.util.find_spec(package) is not None


TRAINING = ("flax", "optax", "orbax-checkpoint", "matplotlib", "pyarrow", "rdflib")
"""Packages of the command `dejax-train`, by the names on the registry."""


def missing_packages() -> list[str]:
    """The packages of `TRAINING` that are not installed."""
    return [name for name in TRAINING if not is_there(name.partition("-")[0])]


def hidden_installation() -> Path | None:
    """The folder of an installed dejax that this dejax, a source tree without the extension, hides on Python's path.

    An editable installation hides nothing: its folder has the extension alone, and Python's code is that of the tree.
    """
    here = Path(__file__).parent
    if any(here.glob("_dejax_native.*.so")):
        return None
    folders = (Path(entry, here.name) for entry in sys.path if entry)
    return next((f for f in folders if (f / "__init__.py").exists() and any(f.glob("_dejax_native.*.so"))), None)


@contextmanager
def optional(package: str, of: str) -> Iterator[None]:
    """Imports inside this context say who needs the package, and how to get it.

    Args:
        package: the name on the registry, which is that of its top-level module or the module's beginning.
        of: what needs it.

    Raises:
        ModuleNotFoundError: the package is not installed.

    >>> with optional("nobodys_package", of="plot()"):
    ...     import nobodys_package
    Traceback (most recent call last):
    ModuleNotFoundError: plot() needs nobodys_package, which is not installed: pip install nobodys_package
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in (package.partition("-")[0], package.replace("-", "_")):
            raise
        raise ModuleNotFoundError(
            f"{of} needs {package}, which is not installed: pip install {package}", name=error.name
        ) from None


def new_figure(of: str, size: tuple[float, float], **options: Any) -> Any:
    """A figure of matplotlib that needs no display, and leaves pyplot and the backend of a notebook as they are.

    Args:
        of: what needs matplotlib, for the error where it is missing.
        size: width and height in inches.
        options: of `matplotlib.figure.Figure`.
    """
    with optional("matplotlib", of=of):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    figure = Figure(figsize=size, **options)
    FigureCanvasAgg(figure)
    return figure
