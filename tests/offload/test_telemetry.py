"""Recordings of a store: samples, pictures, traces, the line of a progress bar."""

import json
import time

import jax
import jax.numpy as jnp
import matplotlib
import pytest

from dejax.offload import ActivationStore, offload


def gradient():
    layer = offload(lambda w, x: jnp.tanh(x @ w), min_bytes=0)
    return jax.block_until_ready(jax.grad(lambda w: layer(w, jnp.ones((64, 64))).sum())(jnp.eye(64)))


def test_a_recording(tmp_path):
    backend = matplotlib.get_backend()
    matplotlib.use("template")  # any but the one that draws files
    with ActivationStore() as store:
        with pytest.raises(
            RuntimeError, match="a step must have been recorded, got none; run steps inside `with store.record"
        ):
            store.plot(tmp_path / "none.svg")
        with store.record(interval=0.001) as recording:
            gradient()
            time.sleep(0.01)
        for counter in ("open_seconds", "fetched_bytes"):
            values = [getattr(sample, counter) for sample in recording.samples]
            assert values == sorted(values) and values[-1] > 0
        count = len(recording.samples)
        recording.stop()  # again: nothing
        assert len(recording.samples) == count
        store.plot(tmp_path / "tiers.svg")
        assert "stored" in store.stats().line() or "offload" in store.stats().line()
    assert "host memory" in (tmp_path / "tiers.svg").read_text()
    assert matplotlib.get_backend() == "template"  # a picture changes nothing of a notebook
    matplotlib.use(backend)
    recording.trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["name"] for event in events} >= {"host, bytes", "ring, bytes", "disk, bytes"}
    times = [event["ts"] for event in events if event["ph"] == "C"]
    assert times == sorted(times)


def test_a_store_that_closes_while_it_is_recorded(tmp_path):
    store = ActivationStore()
    with store.record(interval=0.0005) as recording:
        gradient()
        store.close()
        time.sleep(0.005)
    assert recording.samples
    with pytest.raises(ValueError, match="`interval` must be positive, got 0"):
        store.record(0)


def test_an_empty_recording():
    with ActivationStore() as store:
        recording = store.record()
        with pytest.raises(ValueError, match="there must be at least two samples, got 0; record a step"):
            recording.trace("nowhere.json")


def test_the_line_of_a_progress_bar(tmp_path):
    with ActivationStore(tmp_path) as store:
        gradient()
    line = store.stats().line()
    assert "\n" not in line and line.startswith("offload ") and line.endswith(" s")
