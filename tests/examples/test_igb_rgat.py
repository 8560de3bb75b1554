"""MLPerf's R-GAT: its equations in numpy, the data of a run, and a run that resumes."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.minibatch import make_blocks, random_topology, sample_blocks
from examples import igb_rgat
from examples.igb_rgat import folder_data, main, random_data
from tests.minibatch.graphs import COUNTS, edge_lists, topology_of


def reference(params, edges, x, types, heads):
    """The equations of MLPerf's R-GAT on a whole graph, float64; logits of papers."""
    h = {name: np.asarray(rows, np.float64) for name, rows in x.items()}
    for number, own in enumerate(params["layers"]):
        width = own["bias"].shape[1]
        out = {name: np.zeros((len(rows), width)) for name, rows in h.items()}
        for r, ((source, _, target), (senders, receivers)) in enumerate(edges.items()):
            z_src, z_dst = (np.einsum("nk,hkd->nhd", h[name], own["weight"][r]) for name in (source, target))
            score = (z_src * own["attention_src"][r]).sum(-1)[senders] + (z_dst * own["attention_dst"][r]).sum(-1)[
                receivers
            ]
            score = np.exp(np.where(score > 0, score, 0.2 * score))
            total = np.zeros((len(h[target]), heads))
            np.add.at(total, receivers, score)
            share = score / total[receivers]
            sums = np.zeros((len(h[target]), heads, width // heads))
            np.add.at(sums, receivers, share[..., None] * z_src[senders])
            out[target] += sums.reshape(len(sums), width) + own["bias"][r]
        h = out
        if number + 1 < len(params["layers"]):
            h = {name: np.where(rows > 0, rows, 0.01 * rows) for name, rows in h.items()}
    assert set(types) == set(h)
    return h["paper"] @ params["head"]["weight"] + params["head"]["bias"]


@pytest.mark.parametrize(
    "dtype, tolerance", [("float32", 2e-5), pytest.param("bfloat16", 5e-2, marks=pytest.mark.slow)]
)
def test_the_model_has_the_published_equations(dtype, tolerance):
    edges = {relation: tuple(np.asarray(side, int) for side in ends) for relation, ends in edge_lists().items()}
    topology = topology_of(edges)
    precision = "f32" if dtype == "float32" else None
    config = igb_rgat.RGATConfig(
        topology.edge_types,
        topology.node_types,
        in_features=6,
        hidden=8,
        heads=2,
        layers=2,
        classes=5,
        dtype=dtype,
        precision=precision,
    )
    params = igb_rgat.init(jax.random.key(0), config)
    rng = np.random.default_rng(1)
    for own in params["layers"]:
        own["bias"] = jnp.asarray(rng.standard_normal(own["bias"].shape), jnp.float32)
    x = {name: rng.standard_normal((count, 6)).astype(np.float32) for name, count in COUNTS.items()}
    want = reference(jax.tree.map(lambda a: np.asarray(a, np.float64), params), edges, x, COUNTS, 2)
    seeds = jnp.array([4, 11, 2, 7])

    @jax.jit
    def logits(params, topology, seeds, x):
        sample = sample_blocks(jax.random.key(0), topology, ("paper", seeds), [-1, -1])
        local = {
            name: x[name].at[jnp.where(ids >= 0, ids, 99)].get(mode="fill", fill_value=0)
            for name, ids in sample.node_ids.items()
        }
        return igb_rgat.logits(config, params, make_blocks(sample), local, sample.seed_positions["paper"])

    got = logits(params, topology, seeds, jax.tree.map(jnp.asarray, x))
    assert np.abs(got - want[seeds]).max() < tolerance * np.abs(want).max()


def test_dropout_keeps_the_mean():
    h = jnp.ones((400, 33), jnp.float32)
    words, others = jax.jit(lambda key: igb_rgat._random_words(key, [400, 400], 17))(jax.random.key(3))
    kept = np.asarray(igb_rgat._dropped(words, h, 0.2))
    assert abs((kept == 0).mean() - 0.2) < 0.02 and abs(kept.mean() - 1) < 0.02
    assert not np.array_equal(kept, igb_rgat._dropped(others, h, 0.2))
    assert not np.array_equal(words, igb_rgat._random_words(jax.random.key(4), [400], 17)[0])


def test_a_random_topology_is_the_joined_csc():
    counts = {"a": 50, "b": 20}
    relations = {("a", "to", "b"): 300, ("b", "rev_to", "a"): 300, ("a", "none", "a"): 0}
    one, two = (random_topology(counts, relations, seed=4, on_host=on_host) for on_host in (False, True))
    assert len(one.lists) == 1 and one.num_edges == relations
    for relation in relations:
        starts, senders, _ = one.csc(relation)
        assert starts[0] == 0 and starts[-1] == len(senders) == relations[relation]
        assert (np.diff(starts) >= 0).all() and np.diff(starts).max() == one.relations[
            one.number_of(relation)
        ].max_degree
        assert senders.size == 0 or (senders.min() >= 0 and senders.max() < counts[relation[0]])
        for a, b in zip(one.csc(relation), two.csc(relation), strict=True):
            np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="must be at least 0, got -1"):
        random_topology(counts, {("a", "to", "b"): -1})
    with pytest.raises(ValueError, match="node type must be one of"):
        random_topology(counts, {("a", "to", "c"): 1})


@pytest.mark.slow
def test_rows_that_batches_visit_go_to_the_device():
    data = random_data(2e-6, width=8, device_bytes=8000, batch=4, fan_outs=(2, 2))
    placements = {name: node.placement for name, node in data.features.types.items()}
    assert "host and device" in placements["paper"]
    assert len(data.topology.relations) == 11 and data.width == 8
    rows = data.features.gather({"paper": np.arange(len(data.labels))}, dtype=np.float32)["paper"]
    assert rows.shape == (539, 8) and (np.abs(rows) >= 0.125).all()


@pytest.mark.slow
def test_rows_on_a_drive_are_those_in_host_memory(tmp_path):
    small = {"width": 8, "batch": 4, "fan_outs": (2, 2), "seed": 3}
    stored = random_data(2e-6, drive=igb_rgat.DriveSpace(tmp_path, 1 << 12), device_bytes=8000, **small)
    assert "drive, cached in host memory, cached on the device" in stored.features.types["paper"].placement
    ids = {name: np.arange(count) for name, count in stored.topology.num_nodes.items()}
    want = random_data(2e-6, **small).features.gather(ids, dtype=np.float32)
    for _ in range(2):  # written, then found
        found = stored.features.gather(ids, dtype=np.float32)
        for name, rows in want.items():
            np.testing.assert_array_equal(found[name], rows)
        stored = random_data(2e-6, drive=igb_rgat.DriveSpace(tmp_path, 1 << 12), **small)


def test_room_on_the_device_is_filled_with_rows_that_no_batch_visited():
    visits = {"a": np.array([0, 3, 0, 0]), "b": np.array([1, 0])}
    found = igb_rgat._rows_for_the_device(visits, {"a": 8, "b": 8}, 4 * 6 + 8 * 4)
    assert 1 in found["a"] and 0 in found["b"] and sum(map(len, found.values())) == 4


@pytest.mark.slow
def test_a_run_that_resumes_has_the_same_losses(tmp_path, capsys):
    small = ["--scale", "1e-6", "--width", "8", "--hidden", "4", "--heads", "2", "--batch", "4", "--fan-outs", "2"]
    small += ["--compute", "float32", "--report", "2", "--eval-batches", "1"]
    assert main([*small, "--steps", "4", "--out", str(tmp_path / "a")]) == 0
    whole = json.loads((tmp_path / "a" / "results.json").read_text())
    assert len(whole["loss"]) == 4 and len(whole["accuracy"]) == 2 and (tmp_path / "a" / "curves.png").exists()
    assert main([*small, "--steps", "2", "--pipeline", "2", "--out", str(tmp_path / "b")]) == 0
    assert main([*small, "--steps", "4", "--out", str(tmp_path / "b"), "--resume"]) == 0
    resumed = json.loads((tmp_path / "b" / "results.json").read_text())
    np.testing.assert_array_equal(np.float32(resumed["loss"]), np.float32(whole["loss"]))
    assert "time per step" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*small, "--steps", "4", "--seed", "1", "--out", str(tmp_path / "b"), "--resume"])
    assert "got seed=1 (it has 0)" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*small, "--out", str(tmp_path / "c"), "--resume"])
    assert "must be the folder of a run" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.devices(2)
def test_a_run_on_two_devices_resumes(tmp_path, capsys):
    small = ["--scale", "1e-6", "--width", "8", "--hidden", "4", "--heads", "2", "--batch", "4", "--fan-outs", "2"]
    small += ["--compute", "float32", "--eval-batches", "1", "--device-gb", "5e-6", "--pipeline", "2", "--gpus", "2"]
    assert main([*small, "--steps", "4", "--out", str(tmp_path / "a")]) == 0
    whole = json.loads((tmp_path / "a" / "results.json").read_text())
    assert len(whole["loss"]) == 4 and whole["devices"] == 2 and len(whole["accuracy"]) == 1
    assert main([*small, "--steps", "2", "--out", str(tmp_path / "b")]) == 0
    assert main([*small, "--steps", "4", "--out", str(tmp_path / "b"), "--resume"]) == 0
    resumed = json.loads((tmp_path / "b" / "results.json").read_text())
    np.testing.assert_allclose(resumed["loss"], whole["loss"], rtol=1e-6)
    with pytest.raises(SystemExit):
        main([*small, "--gpus", "1", "--steps", "6", "--out", str(tmp_path / "b"), "--resume"])
    assert "got devices=1 (it has 2)" in capsys.readouterr().err


def test_igbs_folder(tmp_path):
    rng = np.random.default_rng(0)
    root = tmp_path / "processed"
    for name, count in (("paper", 20), ("author", 12)):
        (root / name).mkdir(parents=True)
        np.save(root / name / "node_feat.npy", rng.standard_normal((count, 8)).astype(np.float32))
    np.save(root / "paper" / "node_label_2K.npy", rng.integers(0, 2983, 20).astype(np.float32))
    for source, name, target in (("paper", "cites", "paper"), ("paper", "written_by", "author")):
        folder = root / f"{source}__{name}__{target}"
        folder.mkdir()
        ends = {"paper": 20, "author": 12}
        np.save(folder / "edge_index.npy", np.stack([rng.integers(0, ends[t], 40) for t in (source, target)], 1))
    kept = tmp_path / "lists"
    drive = igb_rgat.DriveSpace(tmp_path / "drive", 1 << 10)
    for on in (None, drive, drive):  # sorted, then mapped; written to the drive, then found there
        data = folder_data(tmp_path, dtype="int8", cache=kept, batch=4, fan_outs=(2,), drive=on)
        assert [relation[1] for relation in data.topology.edge_types] == ["cites", "written_by", "rev_written_by"]
        assert len(data.train) == 12 and data.features["paper"].row_scale is not None
