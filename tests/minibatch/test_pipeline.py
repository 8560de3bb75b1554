"""Pipelined steps give what single steps give; errors; seeds and keys."""

import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from dejax import offload
from dejax._dtypes import entering_jit
from dejax.distributed import ShardedTable, make_mesh, share
from dejax.host_gather import DeviceTable, HostTable, PeerTable, adam
from dejax.minibatch import (
    FeatureStore,
    HeteroTopology,
    JoinedFeatures,
    SampleOptions,
    edge_ids,
    link_batch,
    pipelined_steps,
    sample_blocks,
    sampled_step,
    seed_batches,
    step_keys,
)
from dejax.minibatch import nnx as mb
from dejax.minibatch.steps import pipeline
from dejax.minibatch.steps._split import split_at_reads
from dejax.rgnn.nnx import RGATConv, RGCNConv
from tests.host_gather.rows import on_drive
from tests.minibatch.graphs import COUNTS, REV, WRITES, edge_lists, topology_of

WIDTHS = {"author": 3, "paper": 4}
LABELS = jnp.asarray(np.random.default_rng(9).integers(0, 3, COUNTS["paper"]))
OPTIMIZER = optax.adam(0.05)


def store_of(kinds=("author", "paper")):
    rng = np.random.default_rng(1)
    return FeatureStore.from_arrays(
        {name: rng.standard_normal((COUNTS[name], WIDTHS[name])).astype(np.float32) for name in kinds},
        on_device={"paper": [1, 5]} if "paper" in kinds else False,
    )


def model_of():
    rngs = nnx.Rngs(0)
    layers = [RGCNConv(4, 4, 4, rngs=rngs), RGATConv(4, 3, 4, rngs=rngs)]
    return nnx.split(mb.HeteroGNN(WIDTHS, 4, layers, rngs=rngs), nnx.Param)


def sample(key, topology, seeds):
    return sample_blocks(key, topology, ("paper", seeds), [3, 2])


def updates(graphdef, around=lambda f: f):
    def loss_of(params, batch):
        def layers(params, x):
            return nnx.merge(graphdef, params)(batch.blocks, x)["paper"]

        y = around(layers)(params, batch.x)[batch.sample.seed_positions["paper"]]
        y = y + 0.1 * jax.random.normal(batch.key, y.shape)  # as dropout would
        loss = optax.softmax_cross_entropy_with_integer_labels(y, LABELS[batch.seeds])
        return jnp.where(batch.seeds >= 0, loss, 0).sum()

    def update(state, batch, rate):
        params, moments = state
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        changes, moments = OPTIMIZER.update(gradients, moments, params)
        changes = jax.tree.map(lambda change: rate * change, changes)
        return (optax.apply_updates(params, changes), moments), {"loss": loss, "lost": batch.sample.lost.sum()}

    return update


@pytest.mark.parametrize("steps, around", [(3, None), (2, functools.partial(offload.offload, min_bytes=1))])
@pytest.mark.slow
def test_pipelined_steps_equal_single_ones(steps, around):
    graphdef, params = model_of()
    update = updates(graphdef) if around is None else updates(graphdef, around)
    topology, store = topology_of(), store_of()
    seeds = seed_batches(np.arange(COUNTS["paper"]), 5, seed=0)[-steps:]  # the last batch has padding
    keys = step_keys(jax.random.key(3), 7, steps)
    one = sampled_step(update, sample, donate=False)
    state, single = (params, OPTIMIZER.init(params)), []
    for key, some in zip(keys, seeds, strict=True):
        state, out = one(state, topology, store, key, some, 0.5)
        single.append(float(out["loss"]))
    many = pipelined_steps(update, sample, donate=False)
    got, outs = many((params, OPTIMIZER.init(params)), topology, store, keys, seeds, 0.5)
    assert outs["loss"].shape == (steps,) and not outs["lost"].any()
    np.testing.assert_array_equal(np.asarray(outs["loss"]), np.array(single, np.float32))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)


def totals(state, batch):
    """An update that tells what a batch has."""
    sample = batch.sample
    found = (sample.node_ids, sample.slots, sample.positions, sample.lost, sample.seed_positions, sample.trees)
    extra = jax.tree.map(
        lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, batch.extra
    )
    return state + sum(x.sum() for x in batch.x.values()), (found, dict(batch.x), batch.seeds, extra)


def plain(key, topology, seeds):
    return sample_blocks(key, topology, ("paper", seeds), [3, 2, 2])


@pytest.mark.slow
def test_features_on_a_drive_are_those_in_memory():
    rng = np.random.default_rng(1)
    rows = {name: rng.standard_normal((COUNTS[name], WIDTHS[name])).astype(np.float32) for name in WIDTHS}
    held, stored = FeatureStore.from_arrays(rows), FeatureStore()
    for name, some in rows.items():
        stored = stored.with_table(name, on_drive(some, 3))
    stored = stored.cached({"paper": [1, 5]})
    seeds, keys = seed_batches(np.arange(COUNTS["paper"]), 5, seed=0), step_keys(jax.random.key(3), 0, 3)
    run = pipelined_steps(totals, sample, donate=False)
    want = run(jnp.zeros(()), topology_of(), held, keys, seeds[:3])
    got = run(jnp.zeros(()), topology_of(), stored, keys, seeds[:3])
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)
    assert stored["author"].table.stats()["drive_rows"] and not stored["author"].table.stats()["requests_open"]


def by_weight(key, topology, seeds):
    return sample_blocks(key, topology, ("paper", seeds), [3, 2], options=SampleOptions(replace=True))


def in_time(key, topology, seeds):
    own = sample_blocks(key, topology, ("paper", seeds), [3, 2], seed_times=jnp.where(seeds >= 0, 25, 0))
    return own, edge_ids(topology, own)


def links(key, topology, seeds):
    pairs = (jnp.where(seeds >= 0, seeds % 9, -1), seeds)
    batch = link_batch(key, topology, WRITES, pairs, 2, negatives="degree", reverse=REV)
    return sample_blocks(key, topology, batch.seeds, [2, 2], exclude=batch.exclude), batch


def looped(key, topology, seeds):
    """Reads in a loop, which cannot be cut; reads of fixed ids; a result without any read."""
    fixed = sample_blocks(jax.random.key(0), topology, ("paper", jnp.arange(2)), [2])

    def body(total, n):
        return total + sample_blocks(key, topology, ("paper", seeds + n), [2]).slots[0].sum(), None

    others = jnp.arange(3), jnp.asarray(2.0), jax.random.key(3, impl="rbg")  # of a weak type, of another kind of key
    return plain(key, topology, seeds), (fixed.slots, jax.lax.scan(body, 0, jnp.arange(2))[0], others)


def topologies():
    rng = np.random.default_rng(5)
    lists = edge_lists()
    weights = {name: rng.random(len(some[0])) + 0.1 for name, some in lists.items()}
    times = {name: rng.integers(0, 50, len(some[0])) for name, some in lists.items()}
    host = {"on_host": True}
    return {
        plain: topology_of(**host), by_weight: topology_of(**host, weights=weights),
        in_time: topology_of(**host, times=times), links: topology_of(**host), looped: topology_of(**host),
    }  # fmt: skip


@pytest.mark.parametrize(
    "drawn, steps",
    [
        pytest.param(plain, 1, marks=pytest.mark.slow),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(by_weight, 3), (in_time, 3), (links, 3), (looped, 4)]
        ),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_edges_that_are_read_ahead_give_the_same_samples(drawn, steps):
    topology, store = topologies()[drawn], store_of()
    seeds = np.random.default_rng(8).integers(0, COUNTS["paper"], (steps, 4)).astype(np.int32)
    seeds[-1, 2:] = -1
    keys = step_keys(jax.random.key(3), 7, steps)
    one = sampled_step(totals, drawn, donate=False)
    state, outs = jnp.zeros(()), []
    for key, some in zip(keys, seeds, strict=True):
        state, out = one(state, topology, store, key, some)
        outs.append(out)
    ahead = pipelined_steps(totals, drawn, edges_ahead=True, donate=False)
    got = ahead(jnp.zeros(()), topology, store, keys, seeds)
    jax.tree.map(lambda a, *some: np.testing.assert_array_equal(a, np.stack(some)), got[1], *outs)
    np.testing.assert_array_equal(got[0], state)


def divided_over(devices, rows):
    """Every other row in host memory, the others divided over the memory of the devices."""
    ids, blocks = np.arange(0, len(rows), 2), []
    for number, device in enumerate(devices):
        own = rows[ids[number :: len(devices)]]
        padding = np.zeros((-(-len(ids) // len(devices)) - len(own), *rows.shape[1:]), rows.dtype)
        blocks.append(DeviceTable.from_numpy(np.concatenate([own, padding]), device=device))
    return PeerTable.from_parts(HostTable.from_numpy(rows[1::2]), blocks, ids)


@pytest.mark.devices(2)
@pytest.mark.parametrize("pipelined", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_each_device_of_a_mesh_has_its_own_seeds_and_keys(pipelined, monkeypatch):
    cuts, cut = [], pipeline.split_at_reads
    monkeypatch.setattr(pipeline, "split_at_reads", lambda *some, **more: cuts.append(cut(*some, **more)) or cuts[-1])
    mesh, rng = make_mesh(2), np.random.default_rng(4)
    rows = {name: rng.standard_normal((count, 4)).astype(np.float32) for name, count in COUNTS.items()}
    topology, store = topology_of(on_host=True), FeatureStore.from_arrays(rows)
    divided = store.with_table("paper", divided_over(mesh.devices.flat, rows["paper"]))
    seeds, keys = rng.integers(0, COUNTS["paper"], (3, 8)).astype(np.int32), step_keys(jax.random.key(3), 0, 3)

    def weighted(batch):
        return sum((x * jnp.arange(1.0, len(x) + 1)[:, None]).sum() for x in batch.x.values())

    def of_all(state, batch):
        total = jax.lax.psum(weighted(batch), "data")
        return state + total, total

    one = sampled_step(lambda state, batch: (state, weighted(batch)), plain, donate=False)
    want = [
        sum(
            float(one(0.0, topology, store, jax.random.fold_in(key, part), some[4 * part : 4 * part + 4])[1])
            for part in range(2)
        )
        for key, some in zip(keys, seeds, strict=True)
    ]
    inputs, state, found = share((topology, divided), mesh), jnp.zeros(()), []
    if pipelined:
        state, found = pipelined_steps(of_all, plain, edges_ahead=True, mesh=mesh)(state, *inputs, keys, seeds)
        assert [split.depth for split in cuts] == [6]  # as of one device
    else:
        step = sampled_step(of_all, plain, mesh=mesh)
        for key, some in zip(keys, seeds, strict=True):
            state, out = step(state, *inputs, key, some)
            found.append(out)
    np.testing.assert_allclose(np.asarray(found), want, rtol=1e-5)
    np.testing.assert_allclose(float(state), sum(want), rtol=1e-5)


@pytest.mark.devices(2)
def test_a_mesh_refuses_what_devices_exchange_and_unknown_axes():
    mesh = make_mesh(2)
    store = FeatureStore().with_table("paper", ShardedTable.zeros((COUNTS["paper"], 4), mesh))
    step = sampled_step(lambda state, batch: (state, None), plain, mesh=mesh)
    with pytest.raises(ValueError, match="each device must read the tables of `features` alone, got one of 'paper'"):
        step(jnp.zeros(()), *share((topology_of(), store), mesh), jax.random.key(0), np.zeros(2, np.int32))
    with pytest.raises(ValueError, match="`axis` must be one of the mesh's axes, data, got 'seeds'"):
        sampled_step(lambda state, batch: (state, None), plain, mesh=mesh, axis="seeds")


def test_a_sample_is_cut_at_each_read_that_needs_another_one():
    host, device = topology_of(on_host=True), topology_of()
    some = jax.random.key(0), jnp.arange(3)

    def depth(topology, draw=plain):
        found = split_at_reads(
            lambda varying, topology: draw(varying[0], topology, varying[1]), some, topology, on_cpu=True
        )
        return 0 if found is None else found.depth

    assert depth(host) == 6  # three hops, each of which reads where a receiver's edges begin, and then the edges
    assert depth(device) == 0
    assert depth(host.with_starts_on_device()) == 3
    assert depth(host, looped) == 6

    def prints(key, topology, seeds):
        jax.debug.print("{}", seeds)
        return plain(key, topology, seeds)

    assert depth(host, prints) == 0  # effects keep their order


def test_stages_of_a_sample_pass_on_the_key_and_one_array_of_numbers():
    some = jax.random.key(0), jnp.arange(3)
    cut = split_at_reads(lambda v, topology: plain(v[0], topology, v[1]), some, topology_of(on_host=True), on_cpu=True)
    for kept, _ in jax.eval_shape(cut.all, some)[0]:
        assert not [array for array in kept if array.dtype == jnp.uint32]
        assert len([array for array in kept if array.dtype == jnp.int32]) <= 1


def test_garbage_is_not_collected_while_a_step_is_traced():
    inputs, seen = (topology_of(), all_types()), []

    def update(state, batch):
        seen.append(gc.isenabled())
        return state, None

    key, seeds = jax.random.key(0), jnp.arange(3)
    sampled_step(update, plain, donate=False).trace(jnp.zeros(()), *inputs, key, seeds)
    assert seen == [False] and gc.isenabled()


def all_types(scale=None, width=4):
    """Features of all types, of one width unless `width` is another one for authors."""
    rng = np.random.default_rng(2)
    widths = dict.fromkeys(COUNTS, 4) | {"author": width}
    arrays = {name: rng.standard_normal((n, widths[name])).astype(np.float32) for name, n in COUNTS.items()}
    return FeatureStore.from_arrays(arrays, scale=scale, dtype=None if scale is None else np.int8)


@pytest.mark.parametrize(
    "scale", ["row", pytest.param(None, marks=pytest.mark.slow), pytest.param("column", marks=pytest.mark.slow)]
)
def test_joined_features_are_those_by_type_in_the_order_of_blocks(scale):
    topology, store = topology_of(), all_types(scale)
    sample = lambda key, topology, seeds: sample_blocks(key, topology, ("paper", seeds), [3])  # noqa: E731
    seeds, keys = seed_batches(np.arange(COUNTS["paper"]), 5, seed=0)[-2:], step_keys(jax.random.key(3), 7, 2)

    def update(total, batch):
        first = batch.blocks[0]
        rows = first.join(batch.x)
        return total + rows.sum(), (rows, {name: batch.x[name] for name in batch.x}, len(batch.x))

    apart = sampled_step(update, sample, donate=False)
    outs = [apart(0.0, topology, store, key, some)[1] for key, some in zip(keys, seeds, strict=True)]
    want = jax.tree.map(lambda *some: np.stack(some), *outs)
    joined = sampled_step(update, sample, joined=True, donate=False)
    single = [joined(0.0, topology, store, key, some)[1] for key, some in zip(keys, seeds, strict=True)]
    many = pipelined_steps(update, sample, joined=True, donate=False)(0.0, topology, store, keys, seeds)[1]
    for got in (jax.tree.map(lambda *some: np.stack(some), *single), many):
        jax.tree.map(np.testing.assert_array_equal, got, want)


def test_joined_features_are_a_pytree_and_a_mapping():
    topology, store = topology_of(), all_types()
    step = sampled_step(lambda state, batch: (state, batch.x), sample, joined=True, donate=False)
    _, x = step(0, topology, store, jax.random.key(0), np.arange(3, dtype=np.int32))
    half = jax.tree.map(lambda rows: rows.astype(jnp.bfloat16), x)
    assert isinstance(half, JoinedFeatures) and half["paper"].dtype == jnp.bfloat16
    assert dict(x).keys() == {"author", "paper"} and {**x}["paper"].shape == x["paper"].shape
    for name in ("lonely", "unknown"):
        with pytest.raises(KeyError):
            x[name]


def test_features_that_cannot_be_joined_are_named():
    topology, seeds, key = topology_of(), np.arange(3, dtype=np.int32), jax.random.key(0)
    step = sampled_step(lambda state, batch: (state, batch.x), sample, joined=True)
    with pytest.raises(ValueError, match="must have one width, got .*leave `joined` out"):
        step(0, topology, all_types(width=3), key, seeds)
    with pytest.raises(ValueError, match="each node type of the sample must have features, got none of 'author'"):
        step(0, topology, store_of(["paper"]), key, seeds)


def test_embeddings_in_the_state_are_read_after_the_step_before():
    rows = adam(0.1)

    def update(state, batch):
        embeddings, moments = state
        ids = {"author": batch.sample.node_ids["author"]}
        x = batch.x["paper"].sum() + 0 * batch.x["paper"][0, 0]

        def loss_of(own):
            return ((own - x) ** 2).mean()

        own = embeddings.gather(ids)["author"]
        loss, gradient = jax.value_and_grad(loss_of)(own)
        return embeddings.update(rows, ids, {"author": gradient}, moments), loss

    def states():
        embeddings = FeatureStore().embedding("author", COUNTS["author"], 3)
        return embeddings, embeddings.init(rows)

    topology, features = topology_of(), store_of(["paper"])
    keys, seeds = step_keys(jax.random.key(0), 0, 4), jnp.arange(8).reshape(4, 2)
    one, state, single = sampled_step(update, sample), states(), []
    for key, some in zip(keys, seeds, strict=True):
        state, loss = one(state, topology, features, key, some)
        single.append(float(loss))
    got, losses = pipelined_steps(update, sample)(states(), topology, features, keys, seeds)
    np.testing.assert_array_equal(np.asarray(losses), np.array(single, np.float32))
    np.testing.assert_array_equal(got[0]["author"].table.numpy(), state[0]["author"].table.numpy())


@pytest.mark.slow
def test_edges_as_seeds():
    def linked(key, topology, pairs):
        batch = link_batch(key, topology, WRITES, pairs, 2, reverse=REV)
        return sample_blocks(key, topology, batch.seeds, [2], exclude=batch.exclude), batch

    def update(state, batch):
        rows = {name: x.sum(1) for name, x in batch.x.items()}
        authors, papers, wrong = batch.extra.rows(batch.sample, rows)
        return state + 1, (authors * papers).sum() - (wrong * batch.extra.negative_mask).sum()

    topology, features = topology_of(), store_of()
    senders, receivers = jnp.arange(2).reshape(1, 2), jnp.arange(2).reshape(1, 2) + 1
    keys = step_keys(jax.random.key(1), 0, 1)  # a pipeline of one step
    state, found = pipelined_steps(update, linked)(jnp.int32(0), topology, features, keys, (senders, receivers))
    one = sampled_step(update, linked)
    want = [one(jnp.int32(0), topology, features, keys[n], (senders[n], receivers[n]))[1] for n in range(1)]
    assert int(state) == 1
    np.testing.assert_array_equal(found, jnp.stack(want))


def test_bad_arguments():
    topology, features = topology_of(), store_of()
    keys, seeds = step_keys(jax.random.key(0), 0, 2), jnp.zeros((2, 3), jnp.int32)
    update = lambda state, batch: (state, batch.x["paper"].sum())  # noqa: E731
    many = pipelined_steps(update, sample)
    with pytest.raises(TypeError, match="`features` must be a FeatureStore, got dict"):
        many(0.0, topology, {}, keys, seeds)
    with pytest.raises(ValueError, match="no trainable embeddings, got author"):
        many(0.0, topology, features.embedding("author", COUNTS["author"], 3), keys, seeds)
    with pytest.raises(ValueError, match="leading axis of 2 steps, as `keys`, got shape \\(3, 3\\)"):
        many(0.0, topology, features, keys, jnp.zeros((3, 3), jnp.int32))
    with pytest.raises(TypeError, match="`seeds` must be integers, got float32"):
        many(0.0, topology, features, keys, jnp.zeros((2, 3)))
    with pytest.raises(ValueError, match="`keys` must be key\\[steps\\], of one step at least"):
        many(0.0, topology, features, keys[0], seeds[0])
    with pytest.raises(TypeError, match="`sample` must return SampledBlocks, or .*, got int"):
        sampled_step(update, lambda key, topology, seeds: 3)(0.0, topology, features, keys[0], seeds[0])


def test_seed_batches_and_keys():
    batches = [seed_batches(np.arange(10), 4, seed=1, epoch=epoch) for epoch in (0, 0, 1)]
    assert batches[0].shape == (3, 4) and (batches[0][-1, 2:] == -1).all()
    np.testing.assert_array_equal(batches[0], batches[1])
    assert sorted(batches[0].reshape(-1)[:10]) == list(range(10)) and (batches[0] != batches[2]).any()
    assert seed_batches([], 4).shape == (0, 4)
    with pytest.raises(ValueError, match="`size` must be at least 1"):
        seed_batches([1], 0)
    with pytest.raises(TypeError, match="`nodes` must be integers"):
        seed_batches([0.5], 1)
    np.testing.assert_array_equal(seed_batches(np.array([-(2**40), 3]), 2), [[-1, 3]])
    with pytest.raises(ValueError, match=r"`nodes` must be below 2\*\*31, got 4294967297"):
        seed_batches(np.array([2**32 + 1, 3]), 2)
    key = jax.random.key(5)
    np.testing.assert_array_equal(
        jax.random.key_data(step_keys(key, 3, 2)), jax.random.key_data(step_keys(jax.random.key_data(key), 0, 5)[3:])
    )


@pytest.mark.skipif(jax.config.values["jax_enable_x64"], reason="for 32-bit mode")
def test_ids_and_times_of_64_bits_do_not_wrap_at_jit():
    """Topology times 1, 2, 3; the right number of edges is how many are not later than the seed's time."""
    to, when = ("a", "to", "b"), [2**31, 2**32 + 15, 2**40, 2, -(2**40), -(2**32) + 2]
    topology = HeteroTopology.from_edges({to: ([0, 1, 2], [0, 0, 0])}, {"a": 3, "b": 1}, times={to: [1, 2, 3]})
    store = FeatureStore.from_arrays({"a": np.ones((3, 1), np.float32)})

    def temporal(key, topology, seeds):
        return sample_blocks(key, topology, ("b", seeds["ids"]), [3], seed_times=seeds["times"])

    def count(state, batch):
        return state, (batch.sample.slots[0] >= 0).reshape(-1, 3).sum(1)

    want, ids = [3, 3, 3, 2, 0, 0], np.zeros(6, np.int64)
    seeds = {"ids": ids, "times": np.array(when)}
    step, steps = sampled_step(count, temporal), pipelined_steps(count, temporal)
    assert step(jnp.zeros(()), topology, store, jax.random.key(0), seeds)[1].tolist() == want
    assert step(jnp.zeros(()), topology, store, jax.random.key(0), {**seeds, "ids": ids + 2**32})[1].tolist() == [0] * 6
    stacked = {name: some[None] for name, some in seeds.items()}
    assert steps(jnp.zeros(()), topology, store, step_keys(jax.random.key(0), 0, 1), stacked)[1].tolist() == [want]
    with pytest.raises(ValueError, match="sampled_step: integers must fit int32 .*, got 0 to 4294967296"):
        step(jnp.zeros(()), topology, store, jax.random.key(0), seeds, np.array([0, 2**32]))


def test_the_check_of_arrays_that_enter_jit():
    tree = {"a": np.array([-(2**40), 7, 2**33]), "b": np.uint64(2**63), "c": np.float64(1e300), "d": jnp.ones(1)}
    found = entering_jit("f", tree, ids_or_times=True)
    assert found["a"].tolist() == [-(2**31), 7, 2**31 - 1] and found["b"] == 2**31 - 1 and found["b"].dtype == np.int32
    assert found["c"] is tree["c"] and found["d"] is tree["d"]
    with jax.enable_x64(True):
        assert entering_jit("f", tree) is tree
