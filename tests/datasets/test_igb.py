"""IGB's folder, headers or none; and random graphs of its shape."""

import ml_dtypes
import numpy as np
import pytest

from dejax.datasets import IGBShape, fill_rows, load_igb, random_csc, random_rows_on_device, synthetic_igb

FEATURES = np.random.default_rng(0).standard_normal((7, 8)).astype(np.float32)
COUNTS = {"author": 3, "fos": 2, "institute": 1, "paper": 7}
EDGES = {
    ("author", "affiliated_to", "institute"): [(0, 0), (2, 0)],
    ("paper", "cites", "paper"): [(0, 1), (6, 6), (2, 0)],
    ("paper", "topic", "fos"): [(0, 1)],
    ("paper", "written_by", "author"): [(0, 0), (5, 2)],
}


def make(root, raw: bool):
    for kind, count in COUNTS.items():
        path = root / "processed" / kind / "node_feat.npy"
        path.parent.mkdir(parents=True)
        rows = np.resize(FEATURES, (count, 8))
        path.write_bytes(rows.tobytes()) if raw else np.save(path, rows)
    labels = np.array([0, 3, np.nan, 18, 5, 1, 2], np.float32)
    for name in ("node_label_19.npy", "node_label_2K.npy"):
        path = root / "processed" / "paper" / name
        path.write_bytes(labels.tobytes()) if raw else np.save(path, labels)
    for relation, edges in EDGES.items():
        path = root / "processed" / "__".join(relation) / "edge_index.npy"
        path.parent.mkdir()
        np.save(path, np.array(edges, np.int64))
    return root


@pytest.mark.parametrize("raw", [False, True])
def test_the_folder(raw: bool, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "igb" / "tiny", raw)
    monkeypatch.setenv("DEJAX_DATA", str(tmp_path))
    for data in (
        load_igb(tmp_path / "igb" / "tiny", feature_width=8),
        load_igb(size="tiny", feature_width=8, num_classes=2983),
    ):
        assert data.num_nodes == COUNTS
        for relation, want in EDGES.items():
            assert list(zip(*(ends.tolist() for ends in data.edges[relation]), strict=True)) == want
        for kind, count in COUNTS.items():
            assert isinstance(data.features[kind], np.memmap)
            np.testing.assert_array_equal(data.features[kind], np.resize(FEATURES, (count, 8)))
        assert data.labels["paper"].tolist() == [0, 3, -1, 18, 5, 1, 2]
        assert {split: nodes["paper"].tolist() for split, nodes in data.splits.items()} == {
            "train": [0, 1, 3], "valid": [4], "test": [5, 6],
        }  # fmt: skip
    data = load_igb(tmp_path / "igb" / "tiny", feature_width=8, num_labelled=2, use_features=False)
    assert data.labels["paper"].tolist() == [0, 3, -1, -1, -1, -1, -1] and not data.features
    prepared = data.with_reverse(symmetric=["cites"])
    assert len(prepared.edges) == 7 and len(prepared.edges["paper", "cites", "paper"][0]) == 2 * 2 + 7


def test_a_type_without_features_needs_its_count(tmp_path) -> None:
    make(tmp_path, raw=False)
    (tmp_path / "processed/fos/node_feat.npy").unlink()
    with pytest.raises(FileNotFoundError, match=r"give the number of nodes, num_nodes=\{'fos'"):
        load_igb(tmp_path)
    data = load_igb(tmp_path, num_nodes={"fos": 2})
    assert data.num_nodes == COUNTS and "fos" not in data.features
    with pytest.raises(ValueError, match="got 8 for the type 'paper'"):
        load_igb(tmp_path, num_nodes={"fos": 2, "paper": 8})
    with pytest.raises(ValueError, match="must be from 0 to 0"):
        load_igb(tmp_path, num_nodes={"fos": 1})


@pytest.mark.parametrize("raw", [False, True])
def test_short_and_missing_files(raw: bool, tmp_path) -> None:
    processed = make(tmp_path, raw) / "processed"

    def error_of(name: str, contents: bytes | None):
        path = processed / name
        before = path.read_bytes()
        if contents is None:
            path.unlink()
        else:
            path.write_bytes(contents)
        with pytest.raises((ValueError, FileNotFoundError)) as found:
            load_igb(tmp_path, feature_width=8)
        path.write_bytes(before)
        return str(found.value)

    short = (processed / "paper/node_feat.npy").read_bytes()[:-1]
    assert "node_feat.npy must" in error_of("paper/node_feat.npy", short)
    label = (processed / "paper/node_label_19.npy").read_bytes()
    assert "node_label_19.npy must" in error_of("paper/node_label_19.npy", label[:-4])
    assert "must exist" in error_of("paper/node_label_19.npy", None)
    edges = (processed / "paper__cites__paper/edge_index.npy").read_bytes()
    assert "edge_index.npy must be a complete .npy file" in error_of("paper__cites__paper/edge_index.npy", edges[:-8])
    assert "edge_index.npy must exist" in error_of("paper__cites__paper/edge_index.npy", None)
    np.save(tmp_path / "other.npy", np.zeros((2, 4), np.int64))
    wide = (tmp_path / "other.npy").read_bytes()
    assert "must be integers [edges, 2]" in error_of("paper__cites__paper/edge_index.npy", wide)
    (processed / "paper__cites").mkdir()
    with pytest.raises(ValueError, match="must be named <source>__<relation>__<destination>"):
        load_igb(tmp_path, feature_width=8)


def test_bad_arguments(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEJAX_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match="DEJAX_DATA"):
        load_igb()
    with pytest.raises(FileNotFoundError, match="must have a folder processed/ of IGB, got none in"):
        load_igb(tmp_path)
    with pytest.raises(ValueError, match="19 or 2983"):
        load_igb(tmp_path, num_classes=7)
    with pytest.raises(ValueError, match="size must be one of"):
        load_igb(tmp_path, size="huge")


def test_random_relations_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dejax.datasets.graphs.igb_shape._EDGE_BLOCK", 1000)
    offsets, senders = random_csc(500, 300, 20_000, seed=3, threads=1)
    for threads in (2, 5):
        out = np.zeros(20_000, np.int64)
        again, filled = random_csc(500, 300, 20_000, seed=3, threads=threads, out=out)
        np.testing.assert_array_equal(again, offsets)
        np.testing.assert_array_equal(filled, senders)
        assert filled is out
    assert offsets[0] == 0 and offsets[-1] == 20_000 and (np.diff(offsets) >= 0).all()
    assert senders.min() >= 0 and senders.max() < 500
    # The share of the most frequent 1 % is 0.01^0.4 = 0.158 on both sides.
    for counts in (np.diff(offsets), np.bincount(senders, minlength=500)):
        top = np.sort(counts)[::-1][: len(counts) // 100].sum() / 20_000
        assert abs(top - 0.158) < 0.02
    other = random_csc(500, 300, 20_000, seed=4)[1]
    assert (other != senders).any()
    assert random_csc(0, 0, 0)[0].tolist() == [0]
    assert random_csc(1, 1, 5)[1].tolist() == [0] * 5
    with pytest.raises(ValueError, match="edges need nodes"):
        random_csc(0, 3, 1)
    with pytest.raises(ValueError, match="`out` must be"):
        random_csc(3, 3, 4, out=np.zeros(3, np.int32))
    with pytest.raises(ValueError, match="threads must be"):
        random_csc(3, 3, 4, threads=0)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int8])
def test_random_rows(dtype: type, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dejax.datasets.graphs.igb_shape._BYTE_BLOCK", 1000)
    one, many = np.zeros((101, 7), dtype), np.zeros((101, 7), dtype)
    fill_rows(one, 5, threads=1)
    fill_rows(many, 5, threads=3)
    np.testing.assert_array_equal(one.view(np.uint8), many.view(np.uint8))
    on_device = np.asarray(random_rows_on_device(101, 7, dtype)).view(dtype)
    wide = np.asarray(random_rows_on_device(30, 8, dtype)).view(dtype)
    assert len(np.unique(wide.view(np.uint8))) > 40
    for rows in (one, on_device) if dtype is np.int8 else (one, on_device, wide):
        values = rows.astype(np.float64)
        if dtype is np.int8:
            assert values.min() < -120 and values.max() > 120
        else:
            assert np.abs(values).min() >= 0.125 and np.abs(values).max() < 2 and (values < 0).any()
    fill_rows(np.zeros((3, 0), dtype))
    with pytest.raises(ValueError, match="must be writeable"):
        one.flags.writeable = False
        fill_rows(one)
    with pytest.raises(TypeError, match="must be one of"):
        fill_rows(np.zeros(3, np.float64))


def test_a_graph_of_igbs_shape() -> None:
    data = synthetic_igb(1e-5, 1, feature_width=4, feature_dtype="float8_e4m3fn")
    shape = IGBShape.of(1e-5)
    assert data.num_nodes == shape.num_nodes and data.num_edges == shape.num_edges
    assert data.num_nodes["paper"] == 2693 and data.num_edges["paper", "cites", "paper"] == 39_964
    again = synthetic_igb(1e-5, 1, threads=1)
    for relation, ends in data.edges.items():
        np.testing.assert_array_equal(ends, again.edges[relation])
        for nodes, kind in zip(ends, (relation[0], relation[2]), strict=True):
            assert nodes.min() >= 0 and nodes.max() < data.num_nodes[kind]
    assert data.features["fos"].dtype == ml_dtypes.float8_e4m3fn and not again.features
    assert (data.labels["paper"][data.splits["train"]["paper"]] >= 0).all()
    assert len(data.splits["train"]["paper"]) == 946
    with pytest.raises(ValueError, match="scale must be above 0"):
        synthetic_igb(0)
