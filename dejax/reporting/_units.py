"""Figures as text."""

from __future__ import annotations


def size(nbytes: float) -> str:
    """Bytes in binary units.

    >>> size(1536), size(512), size(0)
    ('1.5 KiB', '512 B', '0 B')
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(nbytes) < 1024 or unit == "TiB":
            return (
                f"{nbytes:.0f} {unit}"
                if unit == "B"
                else f"{nbytes:.3g} {unit}"
                if nbytes < 100
                else f"{nbytes:.0f} {unit}"
            )
        nbytes /= 1024
    raise AssertionError


def milliseconds(value: float | None) -> str:
    """A time in milliseconds; "" for none."""
    return "" if value is None else f"{value:.3f} ms" if value < 10 else f"{value:.1f} ms"


def count(value: float) -> str:
    """A large number with a letter.

    >>> count(2_500_000), count(12)
    ('2.5 M', '12')
    """
    for letter in ("", " k", " M", " G", " T"):
        if abs(value) < 1000 or letter == " T":
            return f"{value:.0f}" if not letter else f"{value:.3g}{letter}"
        value /= 1000
    raise AssertionError
