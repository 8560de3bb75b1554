"""Public classes that functions return: each is what its function gives, and has what its docstring says."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import dejax
from dejax import datasets, distributed, host_gather, minibatch, offload, reporting, rgnn, training
from dejax.distributed import full_graph, partition
from dejax.minibatch import linen as by_type_linen
from dejax.minibatch import nnx as by_type_nnx
from tests.examples.tiny import write_aifb

CITES = ("paper", "cites", "paper")


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w).sum()


def topology() -> minibatch.HeteroTopology:
    return minibatch.HeteroTopology.from_edges({CITES: ([1, 2], [0, 0])}, {"paper": 3})


def store() -> minibatch.FeatureStore:
    return minibatch.FeatureStore.from_arrays({"paper": np.array([[1.0], [2.0], [4.0]], np.float32)})


def sample(key: jax.Array, graph: minibatch.HeteroTopology, seeds: jax.Array) -> minibatch.SampledBlocks:
    return minibatch.sample_blocks(key, graph, ("paper", seeds), [2])


# ------------------------------------------------------------------------------------------------ mini-batches


def test_steps_of_mini_batches() -> None:
    seen = []

    def update(total, batch):
        seen.append(batch)
        return total + batch.x["paper"].sum(), jnp.float32(len(batch.blocks))

    step = minibatch.sampled_step(update, sample)
    assert isinstance(step, minibatch.TrainingSteps) and not step.pipelined
    total, blocks = step(jnp.zeros(()), topology(), store(), jax.random.key(0), jnp.array([0]))
    assert float(total) == 7.0 and float(blocks) == 1.0
    assert all(isinstance(batch, minibatch.MiniBatch) for batch in seen)


def test_samples_and_blocks() -> None:
    found = jax.jit(sample)(jax.random.key(0), topology(), jnp.array([0]))
    assert isinstance(found, minibatch.SampledBlocks)
    assert found.node_ids["paper"].tolist() == [0, 1, 2]
    (block,) = minibatch.make_blocks(found)
    assert isinstance(block, minibatch.Block) and block.graph.num_edges == 2


def test_a_batch_of_links() -> None:
    edges = jnp.array([1, 2]), jnp.array([0, 0])
    batch = minibatch.link_batch(jax.random.key(0), topology(), CITES, edges, 3)
    assert isinstance(batch, minibatch.LinkBatch)
    assert batch.negatives.shape == (2, 3) and batch.mask.all()


def test_a_started_gather_of_features() -> None:
    def step(features, ids):
        pending = features.gather_start({"paper": ids})
        assert isinstance(pending, minibatch.PendingFeatures)
        return pending.gather_done()["paper"]

    np.testing.assert_array_equal(jax.jit(step)(store(), jnp.array([2])), [[4]])


def test_a_decoder_of_ones_own() -> None:
    double = minibatch.Decoder("double", lambda h, r: 2 * h, lambda t, r: 2 * t, relation_width=lambda width: 0)
    entities = jnp.array([[1.0], [2.0], [3.0]])
    ranks = minibatch.link_ranks(double, entities, None, entities, [[0, 0, 1]], sides=["tail"])
    assert ranks.tail.tolist() == [2.0]


def test_projections_of_both_libraries_agree() -> None:
    x = {"author": jnp.ones((2, 4)), "paper": jnp.ones((3, 6))}
    mine = by_type_nnx.InputProjection({"author": 4, "paper": 6}, 8, rngs=nnx.Rngs(0))
    theirs = by_type_linen.InputProjection(8)
    variables = theirs.init(jax.random.key(0), x)
    rgnn.nnx.params_from_linen(mine, variables)
    for name, rows in theirs.apply(variables, x).items():
        np.testing.assert_allclose(mine(x)[name], rows, rtol=1e-6)


# ------------------------------------------------------------------------------------------------ tables in host memory


def test_a_started_gather() -> None:
    table = host_gather.HostTable.from_numpy(np.arange(6, dtype=np.float32).reshape(3, 2))

    def step(table, ids):
        pending = host_gather.gather_start(table, ids)
        assert isinstance(pending, host_gather.PendingRows)
        return host_gather.gather_done(pending)

    np.testing.assert_array_equal(jax.jit(step)(table, jnp.array([2])), [[4, 5]])


# ------------------------------------------------------------------------------------------------ several devices


def test_a_step_on_a_mesh_reports() -> None:
    def gradients(state, key, batch, data):
        return distributed.Part(*jax.value_and_grad(lambda w: ((batch - w) ** 2).mean())(state))

    step = distributed.data_parallel(gradients, lambda state, mean: state - mean.gradients, parts=2)
    _, report = step(jnp.zeros(()), jax.random.key(0), jnp.arange(4.0), None)
    assert isinstance(report, distributed.StepReport) and float(report.loss) == 3.5


def test_programs_and_arrays_on_a_mesh() -> None:
    mesh = distributed.make_mesh(1)
    assert distributed.replicate({"w": jnp.ones(2)}, mesh)["w"].sharding.is_fully_replicated
    layer = full_graph.over_mesh(rgnn.library.rgcn)
    assert isinstance(layer, full_graph.MeshProgram) and full_graph.MeshProgram is distributed.MeshProgram


def test_a_partition_reports() -> None:
    ring = {("a", "to", "a"): (np.arange(8), np.roll(np.arange(8), 1))}
    report = partition.partition(ring, 2, num_nodes={"a": 8}, method="stream").report
    assert isinstance(report, partition.PartitionReport) and sum(report.edges) == report.num_edges == 8


def test_processes_that_disagree_raise_an_error_of_its_own() -> None:
    assert issubclass(distributed.DisagreementError, Exception)
    assert distributed.check_agreement(batch=512)["batch"] == "512"


# ------------------------------------------------------------------------------------------------ offload


def test_counters_and_policies_of_a_store() -> None:
    seen: list[offload.Residual] = []

    def keep(residual: offload.Residual) -> bool:
        seen.append(residual)
        return True

    with offload.ActivationStore() as opened, opened.record() as recording:
        step = jax.jit(jax.grad(offload.offload(loss, policy=keep, min_bytes=0)))
        jax.block_until_ready(step(jnp.eye(3), jnp.ones((2, 3))))
        stats = opened.stats()
    assert isinstance(stats, offload.StoreStats) and stats.stored_count == stats.fetched_count > 0
    assert isinstance(recording, offload.Recording)
    assert seen and all(isinstance(residual, offload.Residual) for residual in seen)


def test_states_of_optimizers() -> None:
    state = offload.master_weights(optax.sgd(0.1)).init({"w": jnp.ones(2, jnp.bfloat16)})
    assert isinstance(state, offload.MasterState) and state.master["w"].dtype == jnp.float32
    step = offload.stack_step(
        lambda outer, x: x * outer["scale"],
        lambda w, x: x + jnp.tanh(x @ w),
        lambda outer, x, batch: jnp.mean(x**2),
        optax.sgd(0.1),
        moments="device",
    )
    assert isinstance(step, offload.StackStep)
    state = step.init({"scale": jnp.ones(())}, jnp.ones((4, 8, 8)) / 8)
    assert isinstance(state, offload.StackState) and state.layers.shape == (4, 8, 8)


# ------------------------------------------------------------------------------------------------ reports and training


def test_rows_of_a_report() -> None:
    table = host_gather.HostTable.from_numpy(np.ones((100, 64), np.float32))
    step = jax.jit(lambda params, table, ids: loss(params, host_gather.gather(table, ids)))
    page = dejax.report(step, jnp.ones((64, 64)), table, jnp.arange(10), calls=0)
    assert isinstance(page, reporting.Report)
    assert all(isinstance(leaf, reporting.Leaf) for leaf in page.leaves)
    assert all(isinstance(remedy, reporting.Remedy) for remedy in page.remedies)
    assert [(moved.nbytes, moved.direction) for moved in page.traffic] == [(2560, "to the device")]
    assert isinstance(page.traffic[0], reporting.Traffic)


def test_models_of_the_training_command() -> None:
    graph = rgnn.RelGraph.from_edges([0, 1], [2, 2], [0, 1], num_nodes=3)
    x = np.ones((3, 4), np.float32)
    for name in set(training.MODELS) - {"sage"}:  # of mini-batches alone
        settings = training.Settings(dataset="mine", model=name, hidden=8)
        model = training.EntityClassifier(settings, graph, 4, 2, options=rgnn.Options(), rngs=nnx.Rngs(0))
        assert model(graph, x).shape == (3, 2)
    settings = training.Settings(dataset="mine", model="mlp")
    assert training.NodeMLP(settings, graph, 4, 2, rngs=nnx.Rngs(0))(graph, x).shape == (3, 2)


def test_a_trainer_has_a_state(tmp_path) -> None:
    data = datasets.load_rdf("aifb", write_aifb(tmp_path / "aifb"), cache=tmp_path / "cache")
    trainer = training.Trainer(training.resolve("aifb", epochs=1), data)
    state = trainer.init(seed=0)
    assert isinstance(state, training.TrainState) and int(state.step) == 0
