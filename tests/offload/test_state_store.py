"""Training state on disk: the numbers of state in memory, its faults, its checkpoints, its share of host memory."""

import contextlib
import functools
import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dejax.offload import DiskArray, StateStore, optimizer, stack_step
from tests.offload.state_faults import interceptor
from tests.offload.states import equal, in_memory
from tests.offload.test_layerwise import LAYERS, WIDTH, batch, body, embed, head, model
from tests.offload.test_optimizer import PARAMS

make = functools.partial(stack_step, embed, body, head, optax.adamw(1e-2), min_bytes=100, streams=True)


def train(step, steps=3, first=0, state=None):
    state = step.init(*model()) if state is None else state
    run, losses = step.jit(state), []
    for i in range(first, first + steps):
        state, loss = run(state, batch(i))
        losses.append(float(loss))
    return losses, state


@pytest.fixture(scope="module")
def on_the_device():
    losses, state = train(make(params="device", moments="device"))
    return losses, in_memory(state)


@pytest.mark.slow
def test_host_memory_is_bounded(tmp_path):
    """The state has 64 units. Host memory holds those on their way."""
    with StateStore(tmp_path, io_threads=2, chunk_bytes=4096) as store:
        tx = optimizer(optax.adam(1e-2), min_bytes=1, piece_bytes=8192, ahead=1, path=store)
        params = jnp.ones((256, 256))
        state = tx.init(params)
        interceptor(store).slow(0.002)
        step = jax.jit(lambda g, s: tx.update(g, s)[1])
        for _ in range(2):
            state = step(params, state)
        jax.block_until_ready(state)
        store.drain()
        stats = store.stats()
        assert stats["peak_host_bytes"] <= (8 + 4) * 8192 and stats["wait_seconds"] > 0
        assert stats["read_bytes"] == 2 * 2 * params.nbytes


def is_on_disk(leaf):
    return isinstance(leaf, DiskArray)


class TestFaults:
    @pytest.fixture
    def store(self, tmp_path):
        with StateStore(tmp_path, chunk_bytes=4096) as store:
            yield store
        with contextlib.suppress(Exception):  # of the last step, which a test may have left with its failure
            jax.effects_barrier()

    def run(self, store, **changes):
        step = make(path=store, **changes)
        state = step.init(*model())
        return jax.jit(step), state

    def test_a_failed_read_leaves_the_state_whole(self, store, on_the_device):
        run, state = self.run(store)
        interceptor(store).inject("read", 1)
        with pytest.raises(Exception, match="a read failed: injected fault"):
            jax.block_until_ready(run(state, batch(0)))
        losses = []
        for i in range(3):
            state, loss = run(state, batch(i))
            losses.append(float(loss))
        assert losses == on_the_device[0]
        equal(in_memory(state), on_the_device[1])

    def test_damage_and_truncation(self, store):
        run, state = self.run(store)
        interceptor(store).inject("corrupt", 1)
        state, _ = jax.block_until_ready(run(state, batch(0)))
        with pytest.raises(Exception, match="is damaged: it does not hold what was written to it"):
            jax.block_until_ready(run(state, batch(1)))
        for file in next(store.paths[0].iterdir()).glob("chunks*"):
            file.write_bytes(b"")
        with pytest.raises(Exception, match="is shorter than what was written to it"):
            jax.block_until_ready(run(state, batch(1)))
        with pytest.raises(RuntimeError, match="is shorter than"):
            np.asarray(state.layer_moments[0].mu["w"])

    def test_a_failed_write(self, store):
        run, state = self.run(store)
        interceptor(store).inject("write", 1)
        state, loss = jax.block_until_ready(run(state, batch(0)))
        assert np.isfinite(loss)  # of the parameters before the update
        with pytest.raises(RuntimeError, match="a write failed: injected fault"):
            store.drain()
        with pytest.raises(Exception, match="a write failed: injected fault"):
            jax.block_until_ready(run(state, batch(1)))
        with pytest.raises(RuntimeError, match="a write failed: injected fault"):
            in_memory(state)

    def test_a_slow_read_of_a_state_that_two_steps_replace(self, tmp_path):
        with StateStore(tmp_path, io_threads=4) as store:
            tx = optimizer(optax.adam(1e-2), min_bytes=1, path=store)
            params = jnp.ones(4096)
            old = tx.init(params)
            step = jax.jit(lambda g, s: tx.update(g, s)[1])
            state = jax.block_until_ready(step(params, step(params, old)))  # compiles
            store.drain()
            interceptor(store).slow(1.0)
            with ThreadPoolExecutor(1) as pool:
                moment = next(leaf for leaf in jax.tree.leaves(state, is_leaf=is_on_disk) if is_on_disk(leaf))
                read = pool.submit(np.asarray, moment)
                time.sleep(0.3)
                interceptor(store).slow(0)
                jax.block_until_ready(step(params, step(params, state)))
                store.drain()
                with pytest.raises(RuntimeError, match="`state` must be the newest state on disk, got version 2"):
                    read.result()

    def test_a_full_drive(self, tmp_path):
        with StateStore(tmp_path, disk_bytes=100_000) as store:
            with pytest.raises(RuntimeError, match="the disk tier is full: disk_bytes=100000, of which"):
                store.put(np.ones(20_000, np.float32))
            assert store.stats()["disk_bytes"] == 0 or store.put(np.ones(1000, np.float32))[3] == 1

    @pytest.mark.slow
    def test_an_old_state(self, store):
        run, first = self.run(store)
        second, _ = run(first, batch(0))
        before = in_memory(first)  # still whole: the second one lies elsewhere
        assert np.abs(before.layer_moments[0].mu["w"]).max() == 0
        with pytest.raises(Exception, match="must be the newest state on disk, got version 0 of an array whose files"):
            jax.block_until_ready(run(first, batch(0)))
        third, _ = jax.block_until_ready(run(second, batch(1)))
        with pytest.raises(RuntimeError, match="must be the newest state on disk, got version 0"):
            in_memory(first)
        assert np.isfinite(in_memory(third).layer_moments[0].mu["w"]).all()

    def test_room_that_is_given_back(self, store):
        array = store.put(np.arange(1000))
        held = store.stats()["disk_bytes"]
        store.remove({"a": array, "b": jnp.ones(3)})
        with pytest.raises(RuntimeError, match="got one that was removed"):
            np.asarray(array)
        assert store.stats()["disk_bytes"] < held


def test_bad_arguments(tmp_path):
    with pytest.raises(FileNotFoundError, match="StateStore: `path` must be an existing folder, got /nowhere"):
        make(path="/nowhere").init(*model())
    with pytest.raises(ValueError, match="`path` must name a folder with moments='disk', got None"):
        make(moments="disk")
    with pytest.raises(ValueError, match="`streams` must be True or None with a path, got False"):
        optimizer(optax.adam(1.0), streams=False, path=tmp_path)
    tx = optimizer(optax.adam(1.0), min_bytes=1, path=tmp_path, piece_bytes=4096)
    with pytest.raises(ValueError, match="`init` must run outside of jax.jit with a path"):
        jax.eval_shape(tx.init, PARAMS)
    state = tx.init(PARAMS)
    with pytest.raises(ValueError, match="must be updated in jax.jit, got arrays outside of it"):
        tx.update(PARAMS, state, PARAMS)
    with pytest.raises(ValueError, match="`chunk_bytes` must be a positive multiple of 4096, got 5"):
        StateStore(tmp_path, chunk_bytes=5)
    with pytest.raises(TypeError, match="rows must be an int or a slice with step 1"):
        state[0].mu["a"][::2]
    found = make(path=tmp_path).bytes_by_tier(*jax.eval_shape(model))
    assert found["disk"] == 2 * LAYERS * WIDTH * WIDTH * 4 and found["host"] == 0


@pytest.mark.filterwarnings("ignore:optax.*:DeprecationWarning")
def test_a_handle_is_never_a_number(tmp_path):
    """Whatever function takes a state's leaves: it raises where it is called, and says what to do."""
    with StateStore(tmp_path) as store:
        state = {"w": store.put(np.full((4, 3), 2.0, np.float32)), "v": store.put(np.ones((4, 3), np.float32))}
        ticket = jax.tree.leaves(state)[0]
        uses = {
            "arithmetic": lambda: jax.tree.map(lambda p: 0.4 * p + 0.5 * p, state),
            "jit": lambda: jax.jit(lambda s: jax.tree.map(lambda p: p + p, s))(state),
            "norm": lambda: optax.global_norm(state),
            "jitted norm": lambda: jax.jit(optax.global_norm)(state),
            "ema": lambda: optax.incremental_update(state, state, 0.1),
            "updates": lambda: optax.apply_updates(state, state),
            "tree": lambda: optax.tree_utils.tree_scale(2.0, state),
            "sum": lambda: jax.tree.map(jnp.sum, state),
            "where": lambda: jax.tree.map(lambda p: jnp.maximum(p, 0), state),
            "cast": lambda: jax.tree.map(lambda p: p.astype(jnp.bfloat16), state),
            "convert": lambda: jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), state),
            "numpy": lambda: jax.tree.map(np.asarray, state),
            "ufunc": lambda: jax.tree.map(lambda p: np.add(p, 1.0), state),
            "number": lambda: float(ticket),
            "truth": lambda: bool(state["w"]),
            "get": lambda: jax.tree.map(lambda p: jax.device_get(p) + 0, state),
            "ravel": lambda: jax.flatten_util.ravel_pytree(state),
            "bits": lambda: jax.lax.bitcast_convert_type(ticket, jnp.float32),
            "npz": lambda: np.savez(tmp_path / "saved.npz", *jax.tree.leaves(state)),
            "pickle": lambda: pickle.dumps(state),
            "pickled leaves": lambda: pickle.dumps(jax.tree.leaves(state)),
            "python": lambda: 0.4 * state["w"] + 0.5 * state["w"],
            "random": lambda: jax.random.normal(ticket, (2,)),
        }
        silent = []
        for name, use in uses.items():
            try:
                use()
            except (TypeError, ValueError, NotImplementedError, AssertionError, AttributeError):
                continue
            silent.append(name)
        assert not silent
        for name in "arithmetic", "jit", "pickle", "pickled leaves", "python", "random":
            with pytest.raises(TypeError, match=r"read the array first: np\.asarray"):
                uses[name]()
        for like in jnp.zeros_like, jnp.ones_like:
            with pytest.raises(RuntimeError, match="must have arrays of its StateStore"):
                np.asarray(jax.tree.map(like, state["w"]))
        np.testing.assert_array_equal(state["w"], np.full((4, 3), 2.0))
        np.testing.assert_array_equal(state["w"][1:2], np.full((1, 3), 2.0))


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"params": "host"}, {"params": "disk"}])
def test_debug_nans_reports_the_nan(tmp_path, how):
    """JAX calls the step again outside of jit, where a step that streams its state does not run."""
    layers = {"w": -jnp.ones((2, 8, 8))}
    logarithms = lambda w, x: x + jnp.log(x @ w["w"])  # noqa: E731
    with StateStore(tmp_path) as store:
        step = stack_step(
            lambda outer, x: x @ outer["e"],
            logarithms,
            lambda outer, x, _: (x**2).mean(),
            optax.sgd(0.1),
            min_bytes=1,
            path=store,
            **how,
        )
        state = step.init({"e": jnp.ones((4, 8))}, layers)
        with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
            step.jit(state)(state, jnp.ones((2, 4)))
