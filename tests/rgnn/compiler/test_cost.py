"""The cost model: bytes moved, row-scaled float16, and higher costs for more work."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import pytest

from dejax.rgnn import Options, library, zoo
from dejax.rgnn.compiler import execute
from dejax.rgnn.cost.work import CostConstants, Counts, Work
from dejax.rgnn.ir.intra import Gemm, Kernels, RowProducts, Traversal
from dejax.rgnn.passes.kernels.predicted import cost_model, training_models
from dejax.rgnn.passes.kernels.storage import encoded_values
from tests.rgnn.cases import Size
from tests.rgnn.contract import make_arrays
from tests.rgnn.references import GRAPHS, graph_of

MANY = Counts(
    nodes=2_000_000, edges=20_000_000, source_pairs=4_000_000, destination_pairs=9_000_000, edge_types=50, node_types=4
)
LAYERS = {"rgcn_mean": library.rgcn, "rgat": library.rgat, "hgt": library.hgt}


def task_of(case: str, counts: Counts) -> execute.CompileTask:
    arrays = make_arrays(case, GRAPHS["typical"], Size(64, 64, 1), "float32")
    arrays = {key: a.astype("float32") for key, a in arrays.items()}
    x = arrays.pop("x")
    task, _, _ = LAYERS[case]._prepare(graph_of("typical"), Options(precision="tf32"), (x, arrays), {})
    return replace(task, counts=counts)


def forward(case: str, counts: Counts = MANY) -> Kernels:
    return execute.inference_kernels(task_of(case, counts))


@pytest.mark.parametrize("case", LAYERS)
def test_more_edges_take_longer(case: str) -> None:
    half = replace(MANY, edges=MANY.edges // 2)
    total = lambda counts: sum(c.seconds for c in cost_model(forward(case, MANY), counts).costs())  # noqa: E731
    assert total(half) < total(MANY) < 2 * total(half)


def test_a_grouped_gemm_takes_its_bytes_over_the_bandwidth() -> None:
    """It reads float32 rows in the order of pairs and writes row-scaled float16."""
    counts = replace(MANY, destination_pairs=1_500_000)
    kernels = forward("rgat", counts)
    products = {instance.out: i for i, instance in enumerate(kernels.instances) if isinstance(instance, Gemm)}
    ((product, number),) = ((v, i) for v, i in products.items() if v in kernels.row_scaled)
    assert kernels.program.ops[product].width == 64
    cost = cost_model(kernels, counts).costs()[number]
    rows = counts.source_pairs
    least = counts.nodes * 256 + rows * 129
    assert least < cost.bytes < rows * (256 + 4 + 129) + 2**20
    assert cost.seconds > cost.bytes / CostConstants().bytes_per_second
    assert cost.flops == 2 * rows * 64 * 64


def test_backward_reads_what_forward_stored_in_16_bits() -> None:
    task = task_of("rgat", MANY)
    cut, *tasks = execute.training_tasks(task, execute.differentiable_positions(task))
    forward_kernels, backward = (execute.inference_kernels(t) for t in tasks)
    _, model = training_models(cut, forward_kernels, backward, MANY, "tf32")
    kept = model.row_scaled - backward.row_scaled - model.encoded
    assert kept and all(backward.program.ops[v].name == "input" for v in kept)
    without = sum(c.bytes for c in cost_model(backward, MANY).costs())
    assert sum(c.bytes for c in model.costs()) < without


def test_encoding_an_input_in_16_bits_costs_once() -> None:
    """GEMMs by pair read x almost six times per node here, and less than three times in the other graph."""
    few = replace(MANY, destination_pairs=1_500_000)
    counts = replace(few, source_pairs=10_000_000)
    kernels = forward("rgat", counts)
    x = kernels.program.inputs[0]
    assert x in encoded_values(kernels, counts.rows) and x not in encoded_values(forward("rgat", few), few.rows)
    model = cost_model(kernels, counts)
    assert sum(x in values for values in model.encodes.values()) == 1
    assert not cost_model(kernels, counts, precision="f32").encoded


def test_reductions_wait_for_their_longest_segment() -> None:
    """On a graph with few edges bytes do not decide the time."""
    few = Counts(nodes=700, edges=5000, source_pairs=900, destination_pairs=900, edge_types=9, node_types=2)
    kernels = forward("rgat", few)
    for instance, cost in zip(kernels.instances, cost_model(kernels, few).costs(), strict=True):
        if isinstance(instance, Traversal) and instance.via == "dst":
            assert 3e-6 < cost.seconds < 20e-6


def graphsage_backward(disable: tuple[str, ...] = ()) -> Kernels:
    params = {"neighbour": jnp.zeros((64, 64)), "root": jnp.zeros((64, 64)), "bias": jnp.zeros(64)}
    graph = graph_of("typical")
    x = jnp.zeros((graph.num_nodes, 64))
    task, _, _ = zoo.graphsage._prepare(graph, Options(precision="tf32", disable=disable), (x, params), {})
    task = replace(task, counts=MANY)
    _, _, backward = execute.training_tasks(task, execute.differentiable_positions(task))
    return execute.inference_kernels(backward)


def test_gradients_of_shared_weights_read_their_rows_once() -> None:
    """GraphSAGE's: two weights and a bias meet the rows of one gradient."""
    kernels = graphsage_backward()
    ((number, instance),) = ((n, i) for n, i in enumerate(kernels.instances) if isinstance(i, RowProducts))
    assert len(instance.xs) == 2 and instance.total is not None
    cost = cost_model(kernels, MANY).costs()[number]
    rows = 3 * MANY.nodes * 256
    assert rows < cost.bytes < 1.05 * rows
    assert cost.flops == 2 * 2 * MANY.nodes * 64 * 64
    assert cost.seconds > cost.bytes / CostConstants().bytes_per_second


def test_gradients_of_shared_weights_take_longer_by_xla_which_copies_their_rows() -> None:
    ours, without = (cost_model(graphsage_backward(disable), MANY).costs() for disable in ((), ("row_products",)))
    copies = 2 * 3 * MANY.nodes * 256  # both operands of two products, one of them for both
    assert sum(c.bytes for c in without) >= sum(c.bytes for c in ours) + copies
    assert sum(c.seconds for c in without) > sum(c.seconds for c in ours)


# Measured on an H100: with scores on edges the forward pass takes 0.83 of the time on wikikg2's counts, 1.13 on mag's.
WIKIKG2 = Counts(2_500_604, 16_109_182, 12_676_290, 12_674_431, edge_types=535, node_types=1)
MAG = Counts(1_939_743, 21_111_007, 2_235_248, 1_537_365, edge_types=4, node_types=4)


@pytest.mark.parametrize(("counts", "on_edges"), [(WIKIKG2, True), (MAG, False)], ids=["wikikg2", "mag"])
def test_attention_scores_are_computed_on_edges_where_few_edges_share_a_pair(counts: Counts, on_edges: bool) -> None:
    task = replace(task_of("rgat", counts), options=Options(precision="tf32", backend="pallas"))
    kernels = execute.inference_kernels(task)
    (scores,) = (i for i in kernels.instances if isinstance(i, Traversal) and i.via == "dst")
    assert ("sum_features" in {kernels.program.ops[i].name for i in scores.body}) == on_edges
    by_pair = execute.inference_kernels(replace(task, options=replace(task.options, disable=("scores_on_edges",))))
    seconds = [sum(c.seconds for c in cost_model(k, counts).costs()) for k in (kernels, by_pair)]
    assert seconds[0] < seconds[1] if on_edges else seconds[0] == seconds[1]


def test_the_time_of_work_is_that_of_its_slowest_part() -> None:
    m = CostConstants()
    assert Work().move(10, 4).seconds() == 40 / m.bytes_per_second
    assert Work().move(1, 4).multiply(10**9, 64).seconds() == 2 * 64 * 10**9 / dict(m.flops)["tf32"]
    table = 10**9
    assert table < Work().gather(4 * 10**6, 256, table).memory < Work().move(4 * 10**6, 256).memory
