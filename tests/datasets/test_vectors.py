"""Vectors of rows: of a function of text, of arrays, of lists in Parquet; missing text has none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dejax.datasets import from_tables, sentence_vectors
from dejax.training.command.config import read_config


def test_a_function_of_the_user_is_called_once_with_different_texts() -> None:
    calls = []

    def lengths(texts: list[str]) -> list[list[float]]:
        calls.append(texts)
        return [[len(text), text.count("a")] for text in texts]

    tables = {"o": {"note": ["aa", None, "b", "aa", ""], "x": [1, 2, 3, 4, 5]}}
    column = from_tables(tables, vectors={"o": {"note": lengths}}, fixed_features=False).columns["o"]["note"]
    assert calls == [["aa", "b"]] and column.kind == "vector"
    assert column.missing.tolist() == [False, True, False, False, True]
    np.testing.assert_array_equal(column.values[[0, 2, 3]], [[2, 2], [1, 0], [2, 2]])


def test_vectors_that_are_given_keep_their_dtype(tmp_path: Path) -> None:
    given = np.arange(6, dtype=np.float16).reshape(3, 2)
    np.save(tmp_path / "given.npy", given)
    mapped = np.load(tmp_path / "given.npy", mmap_mode="r")
    for vectors in (given, mapped):
        found = from_tables({"o": {"x": [1, 2, 3]}}, vectors={"o": {"v": vectors}}, fixed_features=False)
        assert found.columns["o"]["v"].values.dtype == np.float16
        np.testing.assert_array_equal(found.columns["o"]["v"].values, given)


def test_parquet_lists_and_files_of_the_toml(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    (tmp_path / "db").mkdir()
    rows: list[list[float] | None] = [[1.0, 2.0], None, [3.0, 4.0]]
    table = pa.table({"at": [1, 2, 3], "v": pa.array(rows, pa.list_(pa.float32())), "y": [0, 1, 0]})
    parquet.write_table(table, tmp_path / "db" / "o.parquet")
    np.save(tmp_path / "w.npy", np.ones((3, 5), np.float32))
    (tmp_path / "db.toml").write_text(
        '[database]\npath = "db"\ntime_columns = {o = "at"}\nvectors = {o = {w = "w.npy"}}\n'
        '[tasks.t]\ntable = "o"\nlabel = "y"\nvalid_from = 3\ntest_from = 3\n'
    )
    columns = read_config(tmp_path / "db.toml").dataset().columns["o"]
    assert columns["v"].kind == columns["w"].kind == "vector" and columns["w"].values.shape == (3, 5)
    assert columns["v"].values.dtype == np.float32 and columns["v"].missing.tolist() == [False, True, False]
    np.testing.assert_array_equal(columns["v"].values[[0, 2]], [[1, 2], [3, 4]])


def test_mistakes() -> None:
    tables = {"o": {"note": ["a", "b"]}}
    for vectors, message in (
        ({"p": {}}, "vectors must name tables, 'o'; got 'p'"),
        ({"o": {"text": len}}, "must name a column of text of .*, one of note; got 'text'"),
        ({"o": {"note": np.ones((3, 2))}}, r"o.note must be numbers \[2, width\], .* got shape \[3, 2\] of float64"),
        ({"o": {"note": lambda texts: texts}}, r"got shape \[2\] of <U1"),
    ):
        with pytest.raises(ValueError, match=message):
            from_tables(tables, vectors=vectors)
    try:
        import sentence_transformers  # noqa: F401
    except ModuleNotFoundError:
        with pytest.raises(ModuleNotFoundError, match="pip install sentence-transformers"):
            sentence_vectors()
