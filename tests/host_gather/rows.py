"""Rows of a table, ids some of which are out of range, ids of rows on the device, and tables on a drive."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from dejax.host_gather import DriveTable

ROWS = np.random.default_rng(0).standard_normal((50, 6)).astype(np.float32)
IDS = np.array([4, 17, 4, -1, 50, 3, 0])
HOT = [4, 0, 49, 17]
_FOLDER = tempfile.TemporaryDirectory()


def file_of(rows: np.ndarray) -> Path:
    """A new .npy file with the rows."""
    with tempfile.NamedTemporaryFile(suffix=".npy", dir=_FOLDER.name, delete=False) as file:
        np.save(file, rows)
    return Path(file.name)


def on_drive(rows: np.ndarray, cache_rows: int = 4, **options: Any) -> DriveTable:
    """A table on the drive whose cache has room for some rows."""
    row_bytes = rows.nbytes // max(1, len(rows))
    return DriveTable.from_npy(file_of(rows), cache_bytes=cache_rows * row_bytes, **options)
