"""A step uses the store that was current in its thread when it was dispatched, a fetch the store in its handle."""

import asyncio
import gc
import re
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.offload import ActivationStore, default_store, offload
from dejax.offload.activations import current as _current
from tests.offload.layers import LAYERS, assert_same_bits, layer, loss_of, offloaded_inputs, operands, step
from tests.offload.processes import python


@pytest.fixture(scope="module")
def want():
    return step("checkpoint")(*operands())


def stored(store):
    return store.stats().stored_count


def slow_step(times=40):
    """A step that is still running when its dispatch has returned."""

    @jax.jit
    def run(ws, x):
        work = jax.lax.fori_loop(0, times, lambda _, a: jnp.tanh(a @ a), jnp.ones((512, 512)) / 512)
        x = x + 0 * work[0, 0]
        return jax.grad(loss_of(offloaded_inputs), argnums=(0, 1))(ws, x)

    return run


def in_threads(*functions):
    errors = []

    def guarded(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize(("kept", "failing"), [(True, False), (False, True)])
def test_leaving_waits_for_dispatched_steps(kept, failing, want):
    """Also for steps whose results nobody kept, and when an exception ends the block."""
    run, elsewhere = slow_step(), stored(default_store())
    jax.block_until_ready(run(*operands()))
    elsewhere = stored(default_store())
    results = []
    try:
        with ActivationStore() as store:
            for _ in range(3):
                got = run(*operands())
                if kept:
                    results.append(got)
                del got
            if failing:
                raise KeyError
    except KeyError:
        pass
    stats = store.stats()
    assert stats.stored_count == stats.fetched_count == 3 * LAYERS and stats.live_count == 0
    assert stored(default_store()) == elsewhere
    for got in results:
        assert_same_bits(got, want)


def test_entering_waits_too(want):
    run = slow_step()
    jax.block_until_ready(run(*operands()))
    before = stored(default_store())
    first = run(*operands())
    with ActivationStore() as outer:
        second = run(*operands())
        with ActivationStore() as inner:
            third = run(*operands())
        fourth = run(*operands())
    for got in first, second, third, fourth:
        assert_same_bits(got, want)
    assert stored(default_store()) - before == LAYERS
    assert (stored(outer), stored(inner)) == (2 * LAYERS, LAYERS)


def test_one_compiled_function_serves_one_store_after_the_other(want):
    traces = []

    @jax.jit
    def run(ws, x):
        traces.append(1)
        return jax.grad(loss_of(offloaded_inputs), argnums=(0, 1))(ws, x)

    ahead = run.lower(*operands()).compile()
    for _ in range(3):
        with ActivationStore() as store:
            for function in run, ahead:
                assert_same_bits(function(*operands()), want)
        assert stored(store) == 2 * LAYERS
    before = stored(default_store())
    assert_same_bits(jax.block_until_ready(run(*operands())), want)
    assert stored(default_store()) - before == LAYERS
    assert len(traces) == 1


def test_two_threads_with_a_store_each_and_one_function(want):
    run, both = jax.jit(jax.grad(loss_of(offloaded_inputs), argnums=(0, 1))), threading.Barrier(3)
    stores = {}
    before = stored(default_store())

    def work(name, steps):
        with ActivationStore() as stores[name]:
            both.wait()
            for _ in range(steps):
                assert_same_bits(run(*operands()), want)
            both.wait()

    def outside():
        both.wait()
        for _ in range(4):
            assert_same_bits(run(*operands()), want)
        both.wait()

    in_threads(lambda: work("a", 5), lambda: work("b", 7), outside)
    assert {name: stored(store) for name, store in stores.items()} == {"a": 5 * LAYERS, "b": 7 * LAYERS}
    assert stored(default_store()) - before == 4 * LAYERS
    assert _current.current_binding() == 0  # threads are alike again


@pytest.mark.slow
def test_threads_share_a_store_that_each_enters(want):
    run = jax.jit(jax.grad(loss_of(offloaded_inputs), argnums=(0, 1)))
    with ActivationStore() as store:

        def work(enter):
            with enter():
                assert_same_bits(run(*operands()), want)

        in_threads(lambda: work(store.use), lambda: work(lambda: store))
        assert store.is_open
        assert_same_bits(run(*operands()), want)
    assert stored(store) == 3 * LAYERS and not store.is_open
    with pytest.raises(RuntimeError, match="closed; make another"), store.use():
        pass


def test_a_fetch_goes_to_the_store_in_its_handle(want):
    forward = jax.jit(lambda ws, x: jax.vjp(loss_of(offloaded_inputs), ws, x)[1])
    backward = jax.jit(lambda vjp: vjp(jnp.float32(1)))
    with ActivationStore() as outer:
        with ActivationStore() as inner:
            kept = forward(*operands())
            with ActivationStore() as innermost:
                assert_same_bits(backward(kept), want)
        assert (stored(outer), stored(inner), stored(innermost)) == (0, LAYERS, 0)
        kept = forward(*operands())
    with pytest.raises(Exception, match="closed before this step ran"):
        jax.block_until_ready(backward(kept))


def test_a_handle_of_a_closed_store_never_names_anothers_tensor():
    put = jax.jit(lambda x: jax.vjp(offload(lambda x: jnp.sin(x) * x, min_bytes=1, inputs="all"), x)[1])
    with ActivationStore():
        stale = put(jnp.ones(100))
    with ActivationStore() as store:
        jax.block_until_ready(put(jnp.zeros(100)))
        assert store.id == 1 + (default_store().id == 1)  # numbers are given again
        with pytest.raises(Exception, match="is gone"):
            jax.block_until_ready(stale(jnp.ones(100)))


@pytest.mark.slow
def test_any_number_of_stores_one_after_the_other():
    highest = max(ActivationStore(host_bytes=1).close() or store_number() for _ in range(300))
    assert highest < 100


def store_number():
    store = ActivationStore(host_bytes=1)
    store.close()
    return store.id


def test_a_second_close_and_one_inside(want):
    before = stored(default_store())
    with ActivationStore() as store:
        assert_same_bits(step("inputs")(*operands()), want)
        store.close()
        store.close()
        assert_same_bits(jax.block_until_ready(step("inputs")(*operands())), want)  # by the default store
    store.close()
    assert stored(default_store()) - before == LAYERS
    assert _current.current_binding() == 0


def test_generators_and_tasks_that_are_interleaved(want):
    def work():
        with ActivationStore() as store:
            while True:
                yield store

    one, two = work(), work()
    first, second = next(one), next(two)
    one.close()  # the outer one first
    assert_same_bits(step("inputs")(*operands()), want)
    assert (stored(first), stored(second)) == (0, LAYERS)
    closer = threading.Thread(target=two.close)  # and in another thread
    closer.start()
    closer.join()
    assert not second.is_open
    before = stored(default_store())
    assert_same_bits(jax.block_until_ready(step("inputs")(*operands())), want)
    assert stored(default_store()) - before == LAYERS
    with ActivationStore() as third:
        assert_same_bits(step("inputs")(*operands()), want)
    assert stored(third) == LAYERS

    async def task(wait):
        with ActivationStore() as store:
            await asyncio.sleep(wait)
            assert_same_bits(step("inputs")(*operands()), want)
            await asyncio.sleep(0.02 - wait)
        return store.is_open

    async def both():
        return await asyncio.gather(task(0.0), task(0.01))

    assert asyncio.run(both()) == [False, False]
    assert _current.current_binding() == 0


def test_a_thread_that_ends_inside_gives_its_place_back(want):
    keep = []

    def work():
        keep.append(ActivationStore().__enter__())
        assert_same_bits(step("inputs")(*operands()), want)

    in_threads(work)
    gc.collect()
    before = stored(default_store())
    assert_same_bits(jax.block_until_ready(step("inputs")(*operands())), want)
    assert stored(default_store()) - before == LAYERS
    with ActivationStore() as store:
        assert _current.current_binding() == 0
        assert_same_bits(step("inputs")(*operands()), want)
    assert stored(store) == LAYERS
    keep[0].close()


def test_a_functions_own_store_and_the_current_one(want):
    with ActivationStore(host_bytes=1 << 22) as own, ActivationStore() as current:
        body = offload(jax.checkpoint(layer), store=own, min_bytes=1)
        assert_same_bits(jax.jit(jax.grad(loss_of(body), argnums=(0, 1)))(*operands()), want)
        assert (stored(own), stored(current)) == (LAYERS, 0)
    with pytest.raises(ValueError, match="got PosixPath; for a path write store="):
        offload(layer, store=Path("/tmp"))(operands()[0][0], operands()[1])


@pytest.mark.devices(4)
def test_sharded_steps_are_waited_for():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")

    x = jax.device_put(jnp.ones((1200, 300)) / 300, jax.sharding.NamedSharding(mesh, spec))
    grad = jax.jit(jax.shard_map(jax.grad(loss_of_slow), mesh=mesh, in_specs=spec, out_specs=spec))
    jax.block_until_ready(grad(x))
    with ActivationStore() as store:
        for _ in range(3):
            grad(x)
    stats = store.stats()
    assert stats.stored_count == stats.fetched_count > 0 and stats.live_count == 0


def loss_of_slow(x):
    slow = jax.lax.fori_loop(0, 10, lambda _, a: jnp.tanh(a @ a), jax.lax.stop_gradient(x))
    x = x + 0 * jax.lax.psum(slow, "d")
    return (offload(jnp.sin, min_bytes=1, inputs="all")(x) ** 2).sum()


# ------------------------------------------------------------------------------------------------ new processes

PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
from dejax.offload import ActivationStore, offload
from tests.offload.layers import *

other, folder, many = sys.argv[1:4]
if other == "other":  # stores opened and functions traced earlier make no difference
    keep = [ActivationStore() for _ in range(3)]
    jax.jit(jax.grad(loss_of(offloaded)))(*operands(layers=2))
jax.config.update("jax_compilation_cache_dir", folder)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
own = ActivationStore(host_bytes=1 << 20)
with ActivationStore() as store:
    def loss(ws, x):
        mine = offload(layer, store=own, min_bytes=1)
        return loss_of(offloaded_inputs)(ws, x) + loss_of(mine, scan=False)(ws, x)
    run = jax.jit(jax.grad(loss))
    text = run.lower(*operands()).as_text()
    got = jax.block_until_ready(run(*operands()))
    assert store.stats().stored_count > 0 and own.stats().stored_count > 0
print("sum", float(abs(got).sum()))
import hashlib
print("text", hashlib.sha256(text.encode()).hexdigest())
"""


def output_of(code, *arguments):
    ran = python(code, *map(str, arguments), interpreter_options=("-W", "error"))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.slow
def test_programs_are_the_same_in_every_process(tmp_path):
    first = output_of(PROGRAM, "alone", tmp_path, 0)
    entries = sorted(path.name for path in tmp_path.iterdir())
    second = output_of(PROGRAM, "other", tmp_path, 0)
    # Not by hits: on some CPUs XLA refuses to load what it compiled there, and compiles it again.
    assert any(name.startswith("jit_loss-") for name in entries)
    assert sorted(path.name for path in tmp_path.iterdir()) == entries, second
    assert re.search("sum.*\ntext.*", first)[0] == re.search("sum.*\ntext.*", second)[0]


EXPORT = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
from jax import export
from dejax.offload import ActivationStore, offload
from tests.offload.layers import *

own = ActivationStore(host_bytes=1 << 20)
def gradient(store):
    return jax.jit(jax.grad(loss_of(offload(jax.checkpoint(layer), min_bytes=1, store=store)), argnums=(0, 1)))
checks = [export.DisabledSafetyCheck.custom_call(f"dejax_offload_{name}") for name in ("store", "fetch", "guard")]
for name, store in (("current", None), ("own", own)):
    exported = export.export(gradient(store), disabled_checks=checks)(*operands())
    Path(sys.argv[1], name).write_bytes(exported.serialize())
"""

IMPORT = """
import sys
from pathlib import Path
import jax
from jax import export
from dejax.offload import ActivationStore
from tests.offload.layers import assert_same_bits, operands, step

want = step("checkpoint")(*operands())
blobs = [Path(sys.argv[1], name).read_bytes() for name in ("current", "own")]
current, own = (jax.jit(export.deserialize(bytearray(blob)).call) for blob in blobs)
stranger = ActivationStore()
for _ in range(2):
    with ActivationStore() as store:
        assert_same_bits(current(*operands()), want)
    assert store.stats().stored_count == 4 and stranger.stats().stored_count == 0
try:
    jax.block_until_ready(own(*operands()))
except Exception as error:
    assert "never opened in this process" in str(error), error
else:
    raise AssertionError
try:
    jax.block_until_ready(current(*operands()))
except Exception as error:
    assert "no store is current" in str(error), error
else:
    raise AssertionError
with ActivationStore(host_bytes=1 << 20) as same:
    assert_same_bits(own(*operands()), want)
assert same.stats().stored_count == 4 and stranger.stats().stored_count == 0
print("right")
"""


@pytest.mark.slow
def test_exported_programs_in_a_new_process(tmp_path):
    pytest.importorskip("flatbuffers", reason="jax.export needs it to serialize")
    output_of(EXPORT, tmp_path)
    assert "right" in output_of(IMPORT, tmp_path)


def test_sites_do_not_depend_on_earlier_traces():
    def text(f):
        return jax.jit(jax.grad(loss_of(f, scan=False))).lower(*operands()).as_text()

    first = text(offload(layer, min_bytes=1))
    text(offload(lambda w, x: jnp.sin(layer(w, x)), min_bytes=1))
    assert text(offload(layer, min_bytes=1)) == first
    sites = re.findall(r"@dejax_offload_store.*?site = (\d+)", first)
    assert len(set(sites)) == len(sites) >= LAYERS  # each call of a program has its own
    np.testing.assert_equal(sorted(sites), sorted(re.findall(r"@dejax_offload_fetch.*?site = (\d+)", first)))
