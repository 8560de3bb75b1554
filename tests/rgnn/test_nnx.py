"""The nnx binding: parameters, options, dropout, checkpoints, a training step."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from dejax.rgnn import Options, RelGraph
from dejax.rgnn.layers import dropout, library
from dejax.rgnn.layers.specs import RGATSpec
from dejax.rgnn.nnx import GATConv, HGTConv, ProgramModule, RGATConv, RGCNConv
from tests.cases import slow_but
from tests.rgnn.flax_layers import features, gated, typed_graph, without_edges

pytestmark = pytest.mark.usefixtures("programs_by_numpy")

GRAPH = typed_graph()
R, T, N = GRAPH.num_edge_types, GRAPH.num_node_types, GRAPH.num_nodes
RGCN_FORMS: dict[str, dict[str, Any]] = {"full": {}, "bases": {"num_bases": 2}, "blocks": {"num_blocks": 2}}


def pure(module: nnx.Module) -> dict[str, Any]:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def same(a: Any, b: Any, **tolerance: float) -> None:
    np.testing.assert_allclose(
        np.asarray(a, np.float64), np.asarray(b, np.float64), **({"rtol": 1e-5, "atol": 1e-5} | tolerance)
    )


@pytest.mark.parametrize("num_bases", [None, 2])
def test_featureless(num_bases: int | None) -> None:
    layer = RGCNConv.featureless(GRAPH, 6, num_bases=num_bases, rngs=nnx.Rngs(0))
    params = pure(layer)
    rows = (
        {"weight": (GRAPH.num_source_pairs, 6)} if num_bases is None else {"bases": (N, 2, 6), "coefficients": (R, 2)}
    )
    assert {key: value.shape for key, value in params.items()} == rows | {"root": (N, 6), "bias": (6,)}
    # The same result as one-hot features with dense weights.
    if num_bases is None:
        weight = np.zeros((R, N, 6), np.float32)
        pairs = (np.asarray(GRAPH.source_pair_by_type.index), np.asarray(GRAPH.source_pair_by_node.index))
        weight[pairs] = params.pop("weight")
        dense = {"weight": weight, **params}
    else:
        dense = params | {"bases": params["bases"].swapaxes(0, 1)}
    same(layer(GRAPH), library.rgcn(GRAPH, jnp.eye(N), dense))
    with pytest.raises(ValueError, match="x must be None with in_features=None"):
        layer(GRAPH, features(GRAPH, 4))


@pytest.mark.slow
def test_initialisers() -> None:
    """Glorot's limit follows from the fans of one relation's matrix, not of the stacked parameter."""
    rngs = nnx.Rngs(0)

    def limit(value: Any, expected: float) -> None:
        largest = float(jnp.abs(value[...]).max())
        assert 0.8 * expected < largest <= expected * (1 + 1e-6)

    rgcn = RGCNConv(40, 60, 50, rngs=rngs)
    limit(rgcn.weight, (6 / 100) ** 0.5)
    assert not jnp.any(rgcn.bias[...])
    limit(RGCNConv(40, 60, 50, num_blocks=10, rngs=rngs).blocks, (6 / 10) ** 0.5)
    limit(RGCNConv(40, 60, 50, num_bases=5, rngs=rngs).bases, (6 / 100) ** 0.5)
    limit(RGCNConv.featureless(GRAPH, 60, rngs=rngs).weight, (6 / (N + 60)) ** 0.5)
    rgat = RGATConv(40, 20, 50, num_heads=3, rngs=rngs)
    limit(rgat.weight, (6 / 100) ** 0.5)
    limit(rgat.attention_src, (6 / 21) ** 0.5)
    hgt = HGTConv(40, 60, 4, 50, num_heads=3, rngs=rngs)
    limit(hgt.key, (6 / 100) ** 0.5)
    limit(hgt.relation_message, (6 / 40) ** 0.5)
    assert jnp.all(hgt.prior[...] == 1)
    ours = RGCNConv(4, 6, R, initializers={"bias": jax.nn.initializers.ones}, rngs=rngs)
    assert jnp.all(ours.bias[...] == 1)
    with pytest.raises(ValueError, match=r"initialiser for \['kernel'\]"):
        RGCNConv(4, 6, R, initializers={"kernel": jax.nn.initializers.ones}, rngs=rngs)


def test_dtypes() -> None:
    x = features(GRAPH, 4)
    layer = RGCNConv(4, 6, R, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert layer.weight[...].dtype == jnp.bfloat16
    assert layer(GRAPH, x).dtype == jnp.float32  # promoted with x
    assert layer(GRAPH, x.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    full = RGCNConv(4, 6, R, rngs=nnx.Rngs(0))
    in_bfloat16 = RGCNConv(4, 6, R, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert in_bfloat16.weight[...].dtype == jnp.float32 and in_bfloat16(GRAPH, x).dtype == jnp.bfloat16
    same(in_bfloat16(GRAPH, x), full(GRAPH, x), rtol=0.05, atol=0.05)


def test_bfloat16_in_bfloat16_out() -> None:
    """Gradients of float32 parameters are float32."""
    layer = RGATConv(4, 5, R, num_heads=2, rngs=nnx.Rngs(0))
    spec, x, params = dataclasses.replace(layer.spec, dtype=jnp.bfloat16), features(GRAPH, 4), pure(layer)
    out = spec(GRAPH, x, params)
    assert out.dtype == jnp.bfloat16
    same(out, layer(GRAPH, x), rtol=0.1, atol=0.1)
    grads = jax.grad(lambda p: (spec(GRAPH, x, p).astype(jnp.float32) ** 2).sum())(params)
    assert all(g.dtype == jnp.float32 and bool(jnp.any(g != 0)) for g in jax.tree.leaves(grads))


def test_options_reach_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(RGATSpec, "program", lambda graph, x, params, **keywords: seen.append(keywords["options"]))
    x = features(GRAPH, 4)
    RGATConv(4, 2, R, rngs=nnx.Rngs(0), backend="xla", precision="bf16")(GRAPH, x)
    RGATConv(4, 2, R, rngs=nnx.Rngs(0), options=Options(backend="pallas", interpret=True))(GRAPH, x)
    assert seen == [Options(backend="xla", precision="bf16"), Options(backend="pallas", interpret=True)]
    with pytest.raises(ValueError, match="must not be given together"):
        RGATConv(4, 2, R, rngs=nnx.Rngs(0), backend="xla", options=Options())


@pytest.mark.parametrize(
    ("form", "normalization"),
    slow_but([("full", "mean"), ("blocks", "sum")], itertools.product(RGCN_FORMS, ("mean", "sum"))),
)
def test_edge_dropout_equals_a_graph_without_the_dropped_edges(form: str, normalization: Any) -> None:
    """Edges are dropped before normalisation."""
    rate = 0.4
    layer = RGCNConv(
        4, 6, R, normalization=normalization, edge_dropout=rate, rngs=nnx.Rngs(0, dropout=7), **RGCN_FORMS[form]
    )
    x, key = features(GRAPH, 4), jax.random.key(3)
    kept = np.asarray(jax.random.bernoulli(jax.random.split(key)[0], 1 - rate, (GRAPH.num_edges,)))
    assert 0 < kept.sum() < GRAPH.num_edges
    params = pure(layer)
    relational = {name: p for name, p in params.items() if name not in ("root", "bias")}
    want = library.rgcn(without_edges(GRAPH, kept), x, relational, normalization=normalization)
    want = (want if normalization == "mean" else want / (1 - rate)) + x @ params["root"] + params["bias"]
    got = dropout.rgcn(GRAPH, x, params, key, rate, 0.0, normalization=normalization, options=Options())
    same(got, want)


@pytest.mark.parametrize("num_bases", [None, 2])
def test_edge_dropout_without_features(num_bases: int | None) -> None:
    layer = RGCNConv.featureless(GRAPH, 6, num_bases=num_bases, rngs=nnx.Rngs(0))
    key, params = jax.random.key(3), pure(layer)
    kept = jax.random.bernoulli(jax.random.split(key)[0], 0.5, (GRAPH.num_edges,))
    weight = np.zeros((R, N, 6), np.float32)
    pairs = (np.asarray(GRAPH.source_pair_by_type.index), np.asarray(GRAPH.source_pair_by_node.index))
    if num_bases is None:
        weight[pairs] = params["weight"]
    else:
        weight[...] = np.einsum("rb,nbj->rnj", params["coefficients"], params["bases"])
    dense = {"weight": weight, "root": params["root"], "bias": params["bias"]}
    want = library.rgcn(without_edges(GRAPH, np.asarray(kept)), jnp.eye(N), dense)
    same(dropout.rgcn(GRAPH, None, params, key, 0.5, 0.0, normalization="mean", options=Options()), want)


def test_self_loop_dropout() -> None:
    layer = RGCNConv(4, 6, R, self_loop_dropout=0.5, rngs=nnx.Rngs(0))
    x, key, params = features(GRAPH, 4), jax.random.key(3), pure(layer)
    messages = library.rgcn(GRAPH, x, {"weight": params["weight"], "bias": params["bias"]})
    root = np.asarray(dropout.rgcn(GRAPH, x, params, key, 0.0, 0.5, normalization="mean", options=Options()) - messages)
    dropped = np.abs(root).max(1) < 1e-6
    assert 0 < dropped.sum() < N
    same(root[~dropped], (2 * x @ params["root"])[~dropped])


def test_attention_dropout_is_after_the_softmax() -> None:
    """The attention of kept edges is divided by 1 - rate and otherwise unchanged."""
    x, key = features(GRAPH, 4), jax.random.key(3)
    layer = RGATConv(4, 5, R, num_heads=2, attention_dropout=0.5, use_bias=False, rngs=nnx.Rngs(0))
    params = pure(layer)
    mask = jax.random.bernoulli(key, 0.5, (GRAPH.num_edges, 2))
    senders, receivers, edge_type = (np.asarray(a) for a in GRAPH.to_edges())
    z = np.einsum("nk,rhkd->rnhd", x, params["weight"])
    z_src, z_dst = z[edge_type, senders], z[edge_type, receivers]
    score = (z_src * params["attention_src"][edge_type]).sum(-1) + (z_dst * params["attention_dst"][edge_type]).sum(-1)
    weight = np.exp(np.where(score > 0, score, 0.2 * score))
    total = np.zeros((N, 2))
    np.add.at(total, receivers, weight)
    want = np.zeros((N, 2, 5))
    np.add.at(want, receivers, (weight / total[receivers] * np.asarray(mask) / 0.5)[..., None] * z_src)
    got = layer(GRAPH, x, rngs=nnx.Rngs(dropout=0))
    assert got.shape == (N, 10)
    assert isinstance(layer.spec, RGATSpec)
    same(layer.spec(GRAPH, x, params, key), want.reshape(N, 10))


def test_hgt_dropout_is_before_the_skip() -> None:
    layer = HGTConv(4, 4, T, R, dropout=0.5, rngs=nnx.Rngs(0))
    x, key, params = features(GRAPH, 4), jax.random.key(3), pure(layer)
    inner = library.hgt(GRAPH, x, {name: p for name, p in params.items() if name != "skip"})
    mask = jax.random.bernoulli(key, 0.5, (N, 4))
    gate = jax.nn.sigmoid(params["skip"])[GRAPH.node_type][:, None]
    same(layer.spec(GRAPH, x, params, key), gate * inner * mask * 2 + (1 - gate) * x)
    same(layer(GRAPH, x, deterministic=True), gate * inner + (1 - gate) * x)


@pytest.mark.parametrize(
    "make",
    [
        lambda r: RGCNConv(4, 6, R, edge_dropout=0.5, rngs=r),
        lambda r: RGATConv(4, 6, R, attention_dropout=0.5, rngs=r),
        lambda r: HGTConv(4, 6, T, R, dropout=0.5, rngs=r),
        lambda r: GATConv(4, 3, num_heads=2, attention_dropout=0.5, rngs=r),
    ],
    ids=["rgcn", "rgat", "hgt", "gat"],
)
def test_dropout_follows_train_and_eval(make: Any) -> None:
    layer = make(nnx.Rngs(0))
    x = features(GRAPH, 4)
    layer.train()
    first, second = layer(GRAPH, x), layer(GRAPH, x)
    assert jnp.any(first != second), "each call takes a new key"
    same(layer(GRAPH, x, rngs=nnx.Rngs(dropout=5)), layer(GRAPH, x, rngs=nnx.Rngs(dropout=5)))
    layer.eval()
    same(layer(GRAPH, x), layer(GRAPH, x), rtol=0, atol=0)
    assert jnp.any(layer(GRAPH, x, deterministic=False) != layer(GRAPH, x))


@pytest.mark.slow
def test_padding_has_no_effect_with_dropout() -> None:
    """Padding rows are zero; test_cases.py checks results and gradients without dropout."""
    edges = [np.concatenate([np.asarray(a), np.zeros(5, np.int32)]) for a in GRAPH.to_edges()]
    masks = {"edge_mask": np.arange(GRAPH.num_edges + 5) < GRAPH.num_edges, "node_mask": np.arange(N + 3) < N}
    kinds = {"node_type": np.concatenate([np.asarray(GRAPH.node_type), [0, 0, 0]]), "num_node_types": T}
    graph = RelGraph.from_edges(*edges, num_nodes=N + 3, num_edge_types=R, **masks, **kinds)
    for module in (
        RGCNConv(4, 4, R, edge_dropout=0.5, self_loop_dropout=0.2, rngs=nnx.Rngs(0)),
        RGATConv(4, 4, R, attention_dropout=0.5, rngs=nnx.Rngs(0)),
        HGTConv(4, 4, T, R, dropout=0.5, rngs=nnx.Rngs(0)),
    ):
        out = module(graph, jnp.concatenate([features(GRAPH, 4), jnp.full((3, 4), 7.0)]))
        assert not jnp.any(out[N:]) and bool(jnp.all(jnp.isfinite(out)))


def test_a_jitted_optax_step_learns() -> None:
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first = RGCNConv.featureless(GRAPH, 8, edge_dropout=0.1, rngs=rngs)
            self.second = RGCNConv(8, 3, R, num_bases=2, edge_dropout=0.1, rngs=rngs)

        def __call__(self, graph: RelGraph) -> jax.Array:
            return self.second(graph, nnx.relu(self.first(graph)))

    labels = jax.random.randint(jax.random.key(9), (N,), 0, 3)
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.02), wrt=nnx.Param)
    traces = 0

    @nnx.jit
    def step(model: Model, optimizer: nnx.Optimizer, graph: RelGraph) -> jax.Array:
        nonlocal traces
        traces += 1

        def loss(model: Model) -> jax.Array:
            return optax.softmax_cross_entropy_with_integer_labels(model(graph), labels).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    model.train()
    before = pure(model)
    losses = [float(step(model, optimizer, GRAPH)) for _ in range(60)]
    # nnx.jit traces again once, when the optimiser's state has its final types.
    assert traces <= 2
    assert np.mean(losses[-5:]) < 0.5 * losses[0]
    changed = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), before, pure(model))
    assert all(jax.tree.leaves(changed)), changed


def test_state_round_trip() -> None:
    layer, x = HGTConv(4, 6, T, R, num_heads=2, rngs=nnx.Rngs(0)), features(GRAPH, 4)
    state = jax.tree.map(lambda a: a + 0.25, pure(layer))
    nnx.update(layer, state)
    jax.tree.map(lambda a, b: same(a, b, rtol=0, atol=0), pure(layer), state)
    merged: Any = nnx.merge(*nnx.split(layer))
    same(merged(GRAPH, x), layer(GRAPH, x), rtol=0, atol=0)
    assert type(merged) is HGTConv


def test_orbax_round_trip(tmp_path: Path) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")
    x = features(GRAPH, 4)
    layer = HGTConv(4, 4, T, R, dropout=0.3, rngs=nnx.Rngs(3))
    layer(GRAPH, x)  # the dropout stream's count is state as well
    state = nnx.state(layer)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "layer", nnx.to_pure_dict(state))
        checkpointer.wait_until_finished()
        fresh = HGTConv(4, 4, T, R, dropout=0.3, rngs=nnx.Rngs(8))
        target = nnx.state(fresh)
        restored = checkpointer.restore(tmp_path / "layer", nnx.to_pure_dict(target))
    nnx.replace_by_pure_dict(target, restored)
    nnx.update(fresh, target)
    same(fresh(GRAPH, x, deterministic=True), layer(GRAPH, x, deterministic=True), rtol=0, atol=0)
    same(fresh(GRAPH, x), layer(GRAPH, x), rtol=0, atol=0)  # the same next dropout key


def test_program_module() -> None:
    params = {
        "weight": ((R, 4, 6), jax.nn.initializers.normal(0.3)),
        "gate": ((4, 6), jax.nn.initializers.glorot_uniform()),
    }
    module = ProgramModule(gated, params, rngs=nnx.Rngs(0))
    x = features(GRAPH, 4)
    strength = jax.random.uniform(jax.random.key(5), (GRAPH.num_edges,))
    same(module(GRAPH, x, strength), gated(GRAPH, x, strength, **pure(module)))
    grads = nnx.grad(lambda m: (m(GRAPH, x, strength) ** 2).sum())(module)
    assert {k: v.shape for k, v in nnx.to_pure_dict(grads).items()} == {"weight": (R, 4, 6), "gate": (4, 6)}
    assert module(GRAPH, x.astype(jnp.bfloat16), strength).dtype == jnp.float32
    in_bfloat16 = ProgramModule(gated, params, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert in_bfloat16(GRAPH, x, strength).dtype == jnp.bfloat16
    own = ProgramModule(gated.with_options(backend="xla", precision="bf16"), params, precision="f32", rngs=nnx.Rngs(0))
    assert own.spec.options == Options(backend="xla", precision="f32")


def test_program_module_errors() -> None:
    init = jax.nn.initializers.ones
    with pytest.raises(TypeError, match=r"program must be made by @rgnn\.program, got function"):
        ProgramModule(lambda g, x: x, {}, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"params\['weight'\] must be \(shape, initialiser\)"):
        ProgramModule(gated, {"weight": (3, 4)}, rngs=nnx.Rngs(0))  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="must not be attributes of the module"):
        ProgramModule(gated, {"spec": ((3,), init)}, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="must not be keywords of programs"):
        ProgramModule(gated, {"options": ((3,), init)}, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="missing"):
        ProgramModule(gated, {"weight": ((R, 4, 6), init)}, rngs=nnx.Rngs(0))(GRAPH, features(GRAPH, 4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda r: RGCNConv(4, 6, R, num_bases=2, num_blocks=2, rngs=r),
            "num_bases and num_blocks must not be given together",
        ),
        (lambda r: RGCNConv(4, 5, R, num_blocks=2, rngs=r), "num_blocks must divide both widths"),
        (lambda r: RGCNConv(None, 6, R, rngs=r), r"RGCNConv\.featureless"),
        (
            lambda r: RGCNConv.featureless(GRAPH, 6, num_blocks=2, rngs=r),
            "num_blocks must be None without node features",
        ),
        (lambda r: RGCNConv(4, 6, R, num_nodes=3, rngs=r), "must be None with in_features=4"),
        (lambda r: RGCNConv(4, 0, R, rngs=r), "out_features must be at least 1, got 0"),
        (lambda r: RGCNConv(4, 6, R, edge_dropout=1.0, rngs=r), r"edge_dropout, .* in \[0, 1\), got 1.0"),
        (
            lambda r: RGCNConv(4, 6, R, use_root=False, self_loop_dropout=0.1, rngs=r),
            "must be 0 with use_root=False",
        ),
        (
            lambda r: RGCNConv(4, 6, R, normalization="max", rngs=r),
            "normalization must be 'mean', 'sum' or 'none', got 'max'",
        ),
        (lambda r: RGATConv(4, 6, R, softmax="src", rngs=r), "softmax must be 'dst' "),
        (lambda r: HGTConv(4, 5, T, R, num_heads=2, rngs=r), "num_heads must divide out_features"),
        (lambda r: HGTConv(4, 6, T, R, use_skip=True, rngs=r), "in_features must equal out_features .*got 4 and 6"),
        (
            lambda r: RGCNConv(4, 6, R + 1, rngs=r)(GRAPH, features(GRAPH, 4)),
            f"num_edge_types={R + 1}, for which the layer was made, got",
        ),
        (lambda r: HGTConv(4, 6, T + 1, R, rngs=r)(GRAPH, features(GRAPH, 4)), f"num_node_types={T + 1}, for which"),
        (lambda r: RGCNConv(4, 6, R, rngs=r)(GRAPH), "got None"),
        (lambda r: RGCNConv(4, 6, R, rngs=r)(GRAPH, features(GRAPH, 5)), r"got an array of shape \(12, 5\)"),
        (lambda r: RGCNConv.featureless(GRAPH, 6, rngs=r)(typed_graph(edges=20)), "num_source_pairs"),
    ],
)
def test_errors(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(nnx.Rngs(0))
