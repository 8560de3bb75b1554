"""Split graphs on disk, and training by several processes, each of which opens its own part."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.distributed.full_graph import load_nodes, load_parts, save_parts
from dejax.rgnn import library
from tests.distributed.full_graphs import mesh_of, owners
from tests.distributed.test_mesh_training import CLASSES, K, N, graph_of, model_params, stacked, trained

pytestmark = pytest.mark.devices(2)

ROOT = Path(__file__).parents[2]


def saved(folder: Path, parts: int) -> tuple[Any, np.ndarray, np.ndarray]:
    graph, rng = graph_of(), np.random.default_rng(2)
    x, labels = rng.normal(size=(N, K)).astype(np.float32), rng.integers(0, CLASSES, N)
    weights = np.arange(900, dtype=np.float32)
    save_parts(folder, graph, owners(N, parts), parts, nodes={"x": x, "labels": labels}, edges={"weight": weights})
    return graph, x, labels


def test_a_graph_keeps_its_arrays_when_another_one_is_saved_in_its_folder(tmp_path: Path) -> None:
    _, x, _ = saved(tmp_path, 2)
    graph = load_parts(tmp_path, mesh_of(2))
    rows = load_nodes(tmp_path, graph, "x")
    before = jax.tree.map(np.array, (graph, rows))
    save_parts(tmp_path, graph_of(), owners(N, 2)[::-1], 2, nodes={"x": x + 1})
    jax.tree.map(np.testing.assert_array_equal, (graph, rows), before)


def test_a_broken_folder_has_a_clear_error(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    with pytest.raises(ValueError, match="must have 2 devices, one for each part"):
        load_parts(tmp_path, mesh_of(1))
    file = tmp_path / "part_1" / "senders.npy"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"part_1/senders.npy must be a complete .npy file"):
        load_parts(tmp_path, mesh_of(2))
    file.unlink()
    with pytest.raises(FileNotFoundError, match="split the graph again"):
        load_parts(tmp_path, mesh_of(2))
    described = json.loads((tmp_path / "graph.json").read_text())
    (tmp_path / "graph.json").write_text(json.dumps(described | {"format": 1}))
    with pytest.raises(ValueError, match="must have format 2, got 1; split the graph again"):
        load_parts(tmp_path, mesh_of(2))
    (tmp_path / "graph.json").unlink()
    with pytest.raises(FileNotFoundError, match="writes last"):
        load_parts(tmp_path, mesh_of(2))
    with pytest.raises(ValueError, match=r"`nodes\['x'\]` must have 200 rows, got shape \(3, 2\)"):
        save_parts(tmp_path, graph_of(), owners(N, 2), 2, nodes={"x": np.zeros((3, 2))})


@pytest.mark.slow
def test_two_processes_train_as_one_device(tmp_path: Path) -> None:
    graph, x, labels = saved(tmp_path, 2)
    params = [{name: some[name] for name in ("weight", "root")} for some in model_params("rgcn")]
    np.savez(tmp_path / "params.npz", **{f"{k}_{n}": v for n, some in enumerate(params) for k, v in some.items()})
    alone = trained(stacked(library.rgcn), graph, jnp.asarray(x), jnp.asarray(labels), np.ones(N, bool), params)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags), "PYTHONPATH": str(ROOT)}
    script = Path(__file__).with_name("full_graph_process.py")
    running = [
        subprocess.Popen(
            [sys.executable, script, address, "2", str(number), tmp_path],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    try:
        texts = [process.communicate(timeout=400)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], "\n".join(texts)
    for number in range(2):
        found = json.loads((tmp_path / f"result_{number}.json").read_text())
        np.testing.assert_allclose(found["losses"], alone, rtol=1e-5)
        assert found["whole"] and found["opened"] in ([], [f"part_{number}"])
