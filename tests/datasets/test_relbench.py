"""RelBench: a small database in its format, read by its own package where that is installed, and as objects."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dejax.datasets import HeteroDataset, from_relbench

pd = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")

DRIVERS = {"driver": [0, 1, 2], "born": pd.to_datetime(["1980-01-01", "1985-05-05", None])}
RACES = {"race": [0, 1, 2, 3], "date": pd.to_datetime(["2004-01-01", "2004-06-01", "2005-06-01", "2006-06-01"])}
RESULTS = {
    "driver": [0, 1, 0, 2, 1],
    "race": [0, 0, 1, 2, 3],
    "date": RACES["date"][[0, 0, 1, 2, 3]],
    "position": [1, 2, 1, None, 3],
}
CUTOFFS = pd.to_datetime(["2004-02-01", "2004-02-01", "2004-07-01", "2005-01-01", "2005-01-01", "2006-01-01"])
SPLITS = {"train": slice(0, 3), "val": slice(3, 5), "test": slice(5, 6)}
LABELS = {
    "dnf": [0, 1, 1, 0, 1, 1],
    "points": [1.5, 2.5, 0.0, 3.0, 4.0, 5.0],
    "next": [[1, 2], [0], [3], [1], [2], [3]],
}
KINDS = {"dnf": "binary_classification", "points": "regression", "next": "recommendation"}
WHO = [0, 1, 0, 0, 2, 1]


def _frames(task: str) -> dict[str, Any]:
    other = "race" if task == "next" else task
    rows = pd.DataFrame({"driver": WHO, "at": CUTOFFS, other: LABELS[task]})
    return {split: rows[part].reset_index(drop=True) for split, part in SPLITS.items()}


def _check(data: HeteroDataset, task: str) -> None:
    found = data.tasks[task]
    assert data.num_nodes == {"drivers": 3, "races": 3, "results": 4}  # not the race after the test time
    assert data.columns["results"]["position"].values.tolist()[:3] == [1, 2, 1]
    assert data.columns["drivers"]["born"].missing.tolist() == [False, False, True]
    assert {split: places.tolist() for split, places in found.splits.items()} == {
        "train": [0, 1, 2], "valid": [3, 4], "test": [5],
    }  # fmt: skip
    assert found.rows.tolist() == WHO
    np.testing.assert_array_equal(found.times, CUTOFFS.to_numpy().astype("datetime64[s]").astype(np.int64))
    if task == "next":
        assert (found.kind, found.target) == ("link", "races")
        assert np.split(found.labels, found.offsets[1:-1])[0].tolist() == [1, 2]
        assert found.left_out == {"links whose key races lacks": 2}  # to the race after the test time
    else:
        assert found.labels.tolist() == LABELS[task]


@pytest.mark.parametrize("task", list(LABELS))
def test_objects_of_its_format(task: str) -> None:
    def table(rows: Any, key: str | None = None, time: str | None = None, **keys: str) -> Any:
        return SimpleNamespace(df=pd.DataFrame(rows), pkey_col=key, time_col=time, fkey_col_to_pkey_table=keys)

    tables = {
        "drivers": table(DRIVERS, "driver"),
        "races": table(pd.DataFrame(RACES)[:3], "race", "date"),
        "results": table(pd.DataFrame(RESULTS)[:4], None, "date", driver="drivers", race="races"),
    }
    dataset = SimpleNamespace(
        get_db=lambda: SimpleNamespace(table_dict=tables), val_timestamp=pd.Timestamp("2005-01-01")
    )
    names = {"entity_table": "drivers", "entity_col": "driver", "target_col": task}
    names |= {f"src_{name}": value for name, value in names.items()} | {
        "dst_entity_table": "races", "dst_entity_col": "race",
    }  # fmt: skip
    frames = _frames(task)
    given = SimpleNamespace(
        name=task,
        task_type=SimpleNamespace(value=KINDS[task]),
        time_col="at",
        get_table=lambda split, mask_input_cols: SimpleNamespace(df=frames[split]),
        **names,
    )
    _check(from_relbench(dataset, given), task)


def test_a_task_of_several_labels_is_refused() -> None:
    dataset = SimpleNamespace(get_db=lambda: SimpleNamespace(table_dict={}), val_timestamp="2005-01-01")
    with pytest.raises(ValueError, match="must have one label for each example, or links, got the type multilabel"):
        from_relbench(dataset, SimpleNamespace(name="t", task_type="multilabel_classification"))


@pytest.mark.parametrize("task", list(LABELS))
def test_a_folder_read_by_its_own_package(task: str, tmp_path: Path) -> None:
    manifest = pytest.importorskip("relbench.manifest")
    (tmp_path / "db").mkdir()
    for name, rows in (("drivers", DRIVERS), ("races", RACES), ("results", RESULTS)):
        pd.DataFrame(rows).to_parquet(tmp_path / "db" / f"{name}.parquet")
    spec = manifest.TableSpec
    tables = {
        "drivers": spec("driver"),
        "races": spec("race", "date"),
        "results": spec(None, "date", {"driver": "drivers", "race": "races"}),
    }
    manifest.DatasetManifest("racing", "2005-01-01", "2006-01-01", tables=tables).save(tmp_path / "manifest.yaml")
    folder = tmp_path / "tasks" / task
    own = {"entity_table": "drivers", "entity_col": "driver", "target_col": task}
    if task == "next":
        own = {"src_entity_table": "drivers", "src_entity_col": "driver"}
        own |= {"dst_entity_table": "races", "dst_entity_col": "race", "eval_k": 2}  # type: ignore[dict-item]
    manifest.TaskManifest(
        name=task, kind="external", task_type=KINDS[task], time_col="at", timedelta="30 days", **own
    ).save(folder / "manifest.yaml")
    for split, frame in _frames(task).items():
        frame.to_parquet(folder / f"{split}.parquet")
    data = from_relbench(tmp_path, task)
    assert data.name == "racing"
    _check(data, task)
