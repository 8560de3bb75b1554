"""The files of a table on a drive, which `dejax.datasets.write_drive_table` writes and `DriveTable.open` reads.

Rows lie in stripes of whole blocks, which go to the files in turn. A stripe has as many rows as fit in a block, so that
no row lies in more blocks than it must. `table.json` in the table's folder names the files, shape and dtype; the scales
of narrow rows and the checksums of blocks are `.npy` files beside it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dejax._files import write_whole

BLOCK = 4096  # bytes: what a drive reads at least
NAME = "table.json"
_FORMAT, _VERSION = "dejax table on a drive", 1
_TIGHT_ROWS = 1024  # rows of a stripe whose rows are not aligned


@dataclasses.dataclass(frozen=True, slots=True)
class DriveLayout:
    """Shape, dtype and places of the rows of a table on a drive.

    Attributes:
        shape: (rows, *row).
        dtype: the dtype of the elements.
        paths: the files.
        first: bytes of each file before its first stripe.
        stripe_rows: rows of a stripe, one after the other.
        stripe_bytes: from the beginning of a stripe to that of the next one in its file.
        folder: the folder of a table that was written by dejax: it has the scales and the checksums.
        scales: "row", "column" or None, what the folder has scales of.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    paths: tuple[str, ...]
    first: int
    stripe_rows: int
    stripe_bytes: int
    folder: str | None = None
    scales: str | None = None

    @classmethod
    def of_one_file(
        cls, path: str | os.PathLike[str], shape: Sequence[int], dtype: np.dtype, offset: int
    ) -> DriveLayout:
        """Rows that lie in a file one after the other."""
        rows, *row = shape
        row_bytes = math.prod(row) * dtype.itemsize
        full = os.path.abspath(os.fspath(path))
        return cls((rows, *row), dtype, (full,), offset, max(1, rows), max(1, rows) * row_bytes)

    @classmethod
    def new(
        cls, folders: Sequence[Path], shape: tuple[int, ...], dtype: np.dtype, scales: str | None, align: bool | None
    ) -> DriveLayout:
        """A table to be written, with a file in each folder; `table.json` goes to the first folder.

        Args:
            folders: the folders of the files, made absolute.
            shape: (rows, *row).
            dtype: the dtype of the elements.
            scales: "row", "column" or None.
            align: whether rows begin where they lie in the fewest blocks; None: where that takes at most a quarter more
                bytes.
        """
        row_bytes = max(1, math.prod(shape[1:]) * dtype.itemsize)
        stripe_rows = max(1, BLOCK // row_bytes)
        if align is False or (align is None and whole_blocks(stripe_rows * row_bytes) > 1.25 * stripe_rows * row_bytes):
            stripe_rows = _TIGHT_ROWS
        paths = tuple(str(folder / f"rows{number}.bin") for number, folder in enumerate(folders))
        stripe_bytes = whole_blocks(stripe_rows * row_bytes)
        return cls(shape, dtype, paths, 0, stripe_rows, stripe_bytes, str(folders[0]), scales)

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def blocks(self, number: int) -> int:
        """Blocks of one of the files that dejax wrote."""
        stripes = -(-self.shape[0] // self.stripe_rows)
        return len(range(number, stripes, len(self.paths))) * self.stripe_bytes // BLOCK

    def checksums(self) -> list[np.ndarray]:
        """uint64[blocks] for each file.

        Raises:
            ValueError: the table has no checksums, or those of other blocks.
        """
        found = []
        for number in range(len(self.paths)):
            path = self._beside(f"checksums{number}.npy")
            if self.folder is None or not os.path.exists(path):
                raise ValueError(
                    f"{self.folder or self.paths[0]} must have checksums of its blocks to be verified, got none; "
                    "write the table again with dejax.datasets.write_drive_table"
                )
            sums = np.load(path, mmap_mode="r")
            if sums.shape != (self.blocks(number),) or sums.dtype != np.uint64:
                raise ValueError(f"{path} must be uint64[{self.blocks(number)}], got {sums.dtype}{list(sums.shape)}")
            found.append(sums)
        return found

    def scale(self) -> np.ndarray | None:
        """float32[rows] or float32[*row], by which rows or columns are multiplied; None without scales."""
        return None if self.scales is None else np.load(self._beside("scale.npy"))

    def numpy(self) -> np.ndarray:
        """The rows: a memory map where they lie in one file without gaps, else a copy."""
        rows, *row = self.shape
        if not rows * self.row_bytes:
            return np.zeros(self.shape, self.dtype)
        if len(self.paths) == 1 and self.stripe_bytes == self.stripe_rows * self.row_bytes:
            return np.memmap(self.paths[0], self.dtype, "r", self.first, self.shape)
        stripes = -(-rows // self.stripe_rows)
        out = np.empty((stripes, self.stripe_rows * self.row_bytes), np.uint8)
        for number, path in enumerate(self.paths):
            count = len(range(number, stripes, len(self.paths)))
            if count:
                held = np.memmap(path, np.uint8, "r", self.first, (count, self.stripe_bytes))
                out[number :: len(self.paths)] = held[:, : out.shape[1]]
        flat = out.reshape(-1)[: rows * self.row_bytes]
        return flat.view(self.dtype).reshape(rows, *row)

    def write(self) -> None:
        """Writes `table.json`, last: a folder without it is not a table."""
        assert self.folder is not None
        own = Path(self.folder)
        described: dict[str, Any] = {
            "format": _FORMAT,
            "version": _VERSION,
            "shape": list(self.shape),
            "dtype": self.dtype.name,
            "files": [os.path.relpath(p, own) if Path(p).parent == own else p for p in self.paths],
            "stripe_rows": self.stripe_rows,
            "stripe_bytes": self.stripe_bytes,
            "scales": self.scales,
        }
        write_whole(own / NAME, (json.dumps(described, indent=1) + "\n").encode())

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> DriveLayout:
        """The layout of a table that dejax wrote.

        Raises:
            ValueError: the folder has no such table.
        """
        own = Path(folder).absolute()
        try:
            found = json.loads((own / NAME).read_text(encoding="utf-8"))
            if found["format"] != _FORMAT or found["version"] != _VERSION:
                raise KeyError(f"{found['format']}, version {found['version']}")
            name = found["dtype"]
            dtype = np.dtype(getattr(ml_dtypes, name, name))
            paths = tuple(str(own / each) for each in found["files"])
            stripe_rows, stripe_bytes = int(found["stripe_rows"]), int(found["stripe_bytes"])
            shape = tuple(int(size) for size in found["shape"])
            return cls(shape, dtype, paths, 0, stripe_rows, stripe_bytes, str(own), found["scales"])
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{own} must hold a table that dejax.datasets.write_drive_table has finished, got an error in {NAME}: "
                f"{error}; write the table again"
            ) from error

    def _beside(self, name: str) -> str:
        return os.path.join(self.folder or "", name)


def whole_blocks(count: int) -> int:
    """Bytes, rounded up to whole blocks."""
    return -(-count // BLOCK) * BLOCK


def checksums_of(blocks: np.ndarray) -> np.ndarray:
    """uint64[blocks], the checksum of each of uint8[blocks, 4096]: `Checksum` of native/blocks/block_source.h."""
    words = np.ascontiguousarray(blocks).view(np.uint64).reshape(len(blocks), -1, 4)
    lanes = np.tile(np.arange(1, 5, dtype=np.uint64), (len(blocks), 1))
    for step in range(words.shape[1]):
        lanes = _mixed(lanes, words[:, step])
    total = np.full(len(blocks), BLOCK, np.uint64)
    for lane in range(4):
        total = _mixed(total, lanes[:, lane])
    return total


def _mixed(state: np.ndarray, word: np.ndarray) -> np.ndarray:
    state = (state ^ word) * np.uint64(0x9E3779B97F4A7C15)
    return state ^ (state >> np.uint64(29))
