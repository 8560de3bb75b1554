"""Tables that dejax writes for drives: rows, formats, several files, checksums, conversions, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from dejax._drive_layout import DriveLayout
from dejax.datasets import write_drive_table
from dejax.datasets.files import drive
from dejax.host_gather import DriveTable
from dejax.minibatch import FeatureStore, NodeFeatures

RNG = np.random.default_rng(0)
ROWS = RNG.standard_normal((1000, 24)).astype(np.float32)


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("shape", [(1000, 24), (7, 3), (50, 1024), (33, 1100), (10, 5000), (0, 4), (9,)])
def test_rows_come_back(tmp_path: Path, shape: tuple[int, ...], files: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive, "block_rows", lambda rows: 64)  # several blocks at once
    rows = RNG.standard_normal(shape).astype(np.float32)
    folder = write_drive_table([tmp_path / str(k) for k in range(files)], rows)
    layout = DriveLayout.read(folder)
    np.testing.assert_array_equal(layout.numpy(), rows)
    if not rows.size:
        return
    with DriveTable.open(folder, cache_bytes=20 * layout.row_bytes, verify=True) as table:
        ids = RNG.integers(0, len(rows), 40)
        np.testing.assert_array_equal(table[ids], rows[ids])
        np.testing.assert_array_equal(table[np.arange(len(rows))], rows)
        np.testing.assert_array_equal(table.numpy(), rows)
    # A row lies in the fewest blocks, unless that took more than a quarter more bytes.
    aligned = layout.stripe_bytes <= 1.25 * layout.stripe_rows * layout.row_bytes and layout.stripe_rows != 1024
    within = np.arange(layout.stripe_rows) * layout.row_bytes % 4096 + layout.row_bytes
    assert not aligned or layout.row_bytes > 4096 or within.max() <= 4096


@pytest.mark.parametrize("scale", ["row", "column"])
def test_narrow_rows_have_their_scales(tmp_path: Path, scale: str) -> None:
    write_drive_table(tmp_path, ROWS, dtype="float8_e4m3fn", scale=scale)
    store = FeatureStore({"paper": NodeFeatures.from_drive(tmp_path, cache_bytes=240)})
    want = FeatureStore.from_arrays({"paper": ROWS}, dtype="float8_e4m3fn", scale=scale)
    ids = {"paper": np.array([5, 999, -1, 0])}
    np.testing.assert_array_equal(store.gather(ids)["paper"], want.gather(ids)["paper"])
    cached = store.cached({"paper": np.arange(0, 1000, 7)})  # more rows than the cache holds
    np.testing.assert_array_equal(cached.gather(ids)["paper"], want.gather(ids)["paper"])
    assert "cached on the device (143 rows)" in repr(cached)


def test_files_are_converted(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    np.save(tmp_path / "rows.npy", ROWS)
    write_drive_table(tmp_path / "npy", tmp_path / "rows.npy", dtype=np.float16)
    np.testing.assert_array_equal(DriveLayout.read(tmp_path / "npy").numpy(), ROWS.astype(np.float16))
    names = [f"c{k}" for k in range(24)]
    parquet.write_table(pa.table(list(ROWS.T), names), tmp_path / "columns.parquet", row_group_size=130)
    write_drive_table(tmp_path / "columns", tmp_path / "columns.parquet", columns=names[:5])
    np.testing.assert_array_equal(DriveLayout.read(tmp_path / "columns").numpy(), ROWS[:, :5])
    lists = pa.FixedSizeListArray.from_arrays(pa.array(ROWS.reshape(-1)), 24)
    parquet.write_table(pa.table([lists], ["x"]), tmp_path / "lists.parquet", row_group_size=130)
    write_drive_table(tmp_path / "lists", tmp_path / "lists.parquet", dtype="int8", scale="column")
    want = FeatureStore.from_arrays({"n": ROWS}, dtype="int8", scale="column").types["n"].table.numpy()
    np.testing.assert_array_equal(DriveLayout.read(tmp_path / "lists").numpy(), want)
    for bad, why in (
        (pa.table([pa.array([1.0, None])], ["x"]), "no missing values"),
        (pa.table([pa.array([[1.0], [1.0, 2.0]])], ["x"]), "one length"),
        (pa.table([pa.array(["a"])], ["x"]), "must be numeric"),
    ):
        parquet.write_table(bad, tmp_path / "bad.parquet")
        with pytest.raises((ValueError, TypeError), match=why):
            write_drive_table(tmp_path / "bad", tmp_path / "bad.parquet")


def test_damage_is_found_where_it_is_asked_for(tmp_path: Path) -> None:
    folder = write_drive_table([tmp_path / "a", tmp_path / "b"], ROWS)
    file = tmp_path / "b" / "rows1.bin"
    held = bytearray(file.read_bytes())
    held[9000] ^= 1
    file.write_bytes(held)
    with DriveTable.open(folder, cache_bytes=10_000) as table:
        table[np.arange(1000)].block_until_ready()
    with DriveTable.open(folder, cache_bytes=10_000, verify=True) as table:
        with pytest.raises(Exception, match=r"row \d+: .*rows1.bin is damaged at byte 8192: .*write the table again"):
            table[np.arange(1000)].block_until_ready()
        np.testing.assert_array_equal(table[np.arange(40)], ROWS[:40])
    (tmp_path / "a" / "checksums0.npy").unlink()
    with pytest.raises(ValueError, match="must have checksums"):
        DriveTable.open(folder, cache_bytes=10_000, verify=True)


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="write_drive_table has finished"):
        DriveTable.open(tmp_path, cache_bytes=100)
    folder = write_drive_table(tmp_path / "table", ROWS)
    with pytest.raises(ValueError, match="must be a folder without a table"):
        write_drive_table(folder, ROWS)
    with pytest.raises(ValueError, match="`scale` must be None for rows of float32"):
        write_drive_table(tmp_path / "other", ROWS, scale="row")
    with pytest.raises(TypeError, match="must be numbers"):
        write_drive_table(tmp_path / "other", np.array(["a"]))
    with pytest.raises(ValueError, match=r"an \.npy or \.parquet file"):
        write_drive_table(tmp_path / "other", tmp_path / "rows.csv")
    described = json.loads((folder / "table.json").read_text())
    (folder / "table.json").write_text(json.dumps(described | {"version": 9}))
    with pytest.raises(ValueError, match="version 9"):
        DriveTable.open(folder, cache_bytes=100)
    (folder / "table.json").write_text(json.dumps(described | {"shape": [10_000, 24]}))
    with pytest.raises(ValueError, match=r"rows0.bin must have \d+ bytes for the rows of the table"):
        DriveTable.open(folder, cache_bytes=100)
