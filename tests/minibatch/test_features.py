"""`FeatureStore`: the same rows from every dtype and place, and embeddings that train in the step that reads them."""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dejax.host_gather import CachedTable, DeviceTable, HostTable, SplitTable, adagrad, adam, sgd, shardings
from dejax.minibatch import FeatureStore, NodeFeatures

RNG = np.random.default_rng(0)
PAPERS = (RNG.standard_normal((40, 16)) * np.logspace(-2, 2, 16)).astype(np.float32)
IDS = np.array([[3, -1, 39], [0, 40, 3]])
PLACES = {"host": False, "device": True, "split": [39, 3, 7]}
FORMATS = {
    "float32": (np.float32, None),
    "float16": (np.float16, None),
    "bfloat16": (ml_dtypes.bfloat16, None),
    "fp8": (ml_dtypes.float8_e4m3fn, None),
    "fp8 by column": (ml_dtypes.float8_e4m3fn, "column"),
    "int8 by row": (np.int8, "row"),
    "int8 by column": (np.int8, "column"),
}


def decoded(node: NodeFeatures) -> np.ndarray:
    """float64 [nodes, *row]: what the table means."""
    x = node.table.numpy().astype(np.float64)
    if node.row_scale is not None:
        x = x * np.asarray(node.row_scale, np.float64).reshape(-1, *[1] * (x.ndim - 1))
    return x if node.column_scale is None else x * np.asarray(node.column_scale, np.float64)


def looked_up(rows: np.ndarray, ids: np.ndarray) -> np.ndarray:
    there = (ids >= 0) & (ids < len(rows))
    return np.where(there.reshape(*ids.shape, *[1] * (rows.ndim - 1)), rows[np.where(there, ids, 0)], 0)


# Every format and every place once; the rest of the product is slow.
_FORMATS_AND_PLACES = {(form, list(PLACES)[k % 3]) for k, form in enumerate(FORMATS)}


@pytest.mark.parametrize(
    ("form", "place"),
    [
        pytest.param(*case, marks=() if case in _FORMATS_AND_PLACES else pytest.mark.slow)
        for case in itertools.product(FORMATS, PLACES)
    ],
)
def test_every_format_in_every_place(form: str, place: str) -> None:
    dtype, scale = FORMATS[form]
    store = FeatureStore.from_arrays({"paper": PAPERS}, dtype=dtype, scale=scale, on_device=PLACES[place])
    kinds = {"host": HostTable, "device": DeviceTable, "split": SplitTable}
    assert isinstance(store["paper"].table, kinds[place])
    want = looked_up(decoded(store["paper"]), IDS)
    for result, tolerance in ((jnp.float32, 1e-6), (jnp.bfloat16, 2**-8), (jnp.float16, 2**-11)):
        step = jax.jit(lambda s, ids, result=result: s.gather({"paper": ids}, dtype=result)["paper"])
        for _ in range(2):
            got = step(store, jnp.asarray(IDS, jnp.int32))
            assert got.dtype == result and got.shape == (2, 3, 16)
            # A subnormal float16 is off by half of 2^-24.
            atol = 2**-25 if result == jnp.float16 else 0
            np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=tolerance, atol=atol)
    np.testing.assert_array_equal(store.gather({"paper": IDS}, dtype=jnp.float16)["paper"], got)


@pytest.mark.parametrize(("form", "bound"), [("fp8 by column", 2**-4), ("int8 by row", 0.5 / 127), ("float16", 2**-11)])
def test_what_a_format_loses(form: str, bound: float) -> None:
    dtype, scale = FORMATS[form]
    node = NodeFeatures.from_numpy(PAPERS, dtype=dtype, scale=scale)
    top = np.abs(PAPERS).max(axis={"row": 1, "column": 0, None: None}[scale], keepdims=True)
    assert (np.abs(decoded(node) - PAPERS) <= 1.001 * bound * top).all()


def test_an_int8_scale_is_exact_where_it_can_be() -> None:
    rows = np.arange(-127, 128, dtype=np.float32).reshape(5, 51) / 4
    node = NodeFeatures.from_numpy(np.concatenate([rows, np.zeros((1, 51), np.float32)]), dtype="int8", scale="column")
    assert not decoded(node)[-1].any() and np.asarray(node.column_scale).shape == (51,)
    np.testing.assert_array_equal(NodeFeatures.from_numpy(rows[:, :1], dtype=np.float16).table.numpy(), rows[:, :1])


def test_default_dtypes_and_integers() -> None:
    def rows_of(array, **options):
        node = NodeFeatures.from_numpy(array, **options)
        return node.gather(np.array([1]))

    assert rows_of(PAPERS.astype(np.float16)).dtype == np.float16
    assert rows_of(PAPERS, dtype="float8_e4m3fn").dtype == np.float32
    assert rows_of(PAPERS, dtype="int8", scale="row").dtype == np.float32
    assert rows_of(PAPERS.astype(np.float64)).dtype == np.float32
    integers = np.arange(6, dtype=np.int32).reshape(3, 2)
    assert rows_of(integers).tolist() == [[2, 3]]
    np.testing.assert_array_equal(rows_of(integers.astype(np.int8)), [[2, 3]])


def test_memory_maps_and_blocks(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dejax.datasets.files._narrow_rows._BLOCK_BYTES", 500)
    np.save(tmp_path / "rows.npy", PAPERS)
    mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")
    for place in PLACES.values():
        for dtype, scale in FORMATS.values():
            node = NodeFeatures.from_numpy(mapped, dtype=dtype, scale=scale, on_device=place)
            monkeypatch.setattr("dejax.datasets.files._narrow_rows._BLOCK_BYTES", 1 << 20)
            whole = NodeFeatures.from_numpy(PAPERS, dtype=dtype, scale=scale)
            monkeypatch.setattr("dejax.datasets.files._narrow_rows._BLOCK_BYTES", 500)
            np.testing.assert_array_equal(decoded(node), decoded(whole))


def test_several_types_rows_of_any_shape_and_started_gathers() -> None:
    store = FeatureStore.from_arrays(
        {"paper": PAPERS, "author": PAPERS[:5].reshape(5, 2, 8), "none": np.zeros((0, 4), np.float32)},
        dtype={"paper": "int8", "author": "float16"},
        scale={"paper": "column"},
        on_device={"author": True},
    )
    ids = {"paper": jnp.array([1, 2]), "author": jnp.array([4]), "none": jnp.array([0, -1, 2])}

    @jax.jit
    def both(store, ids, x):
        pending, x = store.gather_start(ids, dtype=jnp.float32, before=x)
        x = x @ x
        ahead, x = pending.gather_done(after=x)
        alone = store.gather_start(ids, dtype=jnp.float32).gather_done()
        return store.gather(ids, dtype=jnp.float32), ahead, alone, x

    now, ahead, alone, x = both(store, ids, jnp.eye(3))
    assert {name: rows.shape for name, rows in now.items()} == {"paper": (2, 16), "author": (1, 2, 8), "none": (3, 4)}
    jax.tree.map(np.testing.assert_array_equal, (now, now), (ahead, alone))
    np.testing.assert_array_equal(x, np.eye(3))
    assert store.gather({}) == {} and not np.asarray(now["none"]).any()
    assert store.row_bytes == {"paper": 16, "author": 32, "none": 0}
    store.check_counts({"paper": 40, "author": 5, "none": 0, "other": 3})


OPTIMIZERS = {"sgd": sgd(0.5), "adagrad": adagrad(0.5), "adam": adam(0.1)}


def reference(name: str, rows: np.ndarray, sums: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """The rows after steps of (touched ids, summed gradients), in float64."""
    x, first, second = rows.astype(np.float64), np.zeros(rows.shape), np.zeros(rows.shape)
    accumulated = np.full(rows.shape, 0.1)
    for step, (ids, g) in enumerate(sums, start=1):
        if name == "sgd":
            x[ids] -= 0.5 * g
        elif name == "adagrad":
            accumulated[ids] += g**2
            x[ids] -= 0.5 * g / (np.sqrt(accumulated[ids]) + 1e-7)
        else:
            first[ids] = 0.9 * first[ids] + 0.1 * g
            second[ids] = 0.999 * second[ids] + 0.001 * g**2
            x[ids] -= 0.1 * (first[ids] / (1 - 0.9**step)) / (np.sqrt(second[ids] / (1 - 0.999**step)) + 1e-8)
    return x


@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param(name, how, marks=() if (name, how) in [("adam", "cached"), ("sgd", "eager")] else pytest.mark.slow)
        for name, how in itertools.product(OPTIMIZERS, ["eager", "jitted", "whole store", "cached"])
    ],
)
def test_embeddings_train_in_the_step(name: str, how: str) -> None:
    optimizer = OPTIMIZERS[name]
    store = FeatureStore.from_arrays({"paper": PAPERS}, dtype="float8_e4m3fn", on_device=how == "cached")
    store = store.embedding("author", 12, 4, seed=3)
    if how == "cached":
        store = store.cached({"author": [2, 7]})
        assert isinstance(store["author"].table, CachedTable)
    before = np.array(store["author"].table.numpy())
    embeddings, features = store.split_trainable()
    if how == "whole store":
        embeddings, features = store, FeatureStore()
    ids = {"author": jnp.array([[2, 7, 2], [-1, 12, 0]]), "paper": jnp.array([1, 5])}
    w = jnp.asarray(RNG.standard_normal((16, 4)).astype(np.float32))

    def step(embeddings, state, features, scale):
        store = embeddings | features
        rows = store.gather(ids)

        def loss(rows):
            return ((rows["author"].sum((0, 1)) - (rows["paper"] @ w).sum(0)) ** 2).sum() * scale

        value, gradients = jax.value_and_grad(loss)(rows)
        embeddings, state = embeddings.update(optimizer, ids, gradients, state)
        return embeddings, state, value, gradients["author"]

    state = store.init(optimizer)
    if how != "eager":
        step = functools.partial(
            jax.jit(step, donate_argnums=(0, 1), out_shardings=shardings((embeddings, state, None, None)))
        )
    sums = []
    for k in range(3):
        embeddings, state, value, g = step(embeddings, state, features, 1.0 + k)
        g = np.asarray(g, np.float64)
        sums.append((np.array([2, 7, 0]), np.stack([g[0, 0] + g[0, 2], g[0, 1], g[1, 2]])))
        assert np.isfinite(value)
    after = np.array(embeddings["author"].table.numpy())
    np.testing.assert_allclose(after, reference(name, before, sums), rtol=2e-5, atol=2e-6)
    untouched = np.setdiff1d(np.arange(12), [0, 2, 7])
    np.testing.assert_array_equal(after[untouched], before[untouched])
    if how == "cached":
        np.testing.assert_array_equal(embeddings.gather({"author": [2, 7]})["author"], after[[2, 7]])
    assert embeddings.trainable == ("author",)


def test_a_type_without_gradient_or_ids_stays(tmp_path) -> None:
    store = FeatureStore().embedding("a", 3, 2).embedding("b", 3, 2)
    state = store.init(sgd(1.0))
    before = {name: np.array(store[name].table.numpy()) for name in "ab"}
    store, state = store.update(sgd(1.0), {"a": [1]}, {"a": np.ones((1, 2), np.float32)}, state)
    np.testing.assert_array_equal(store["b"].table.numpy(), before["b"])
    np.testing.assert_allclose(store["a"].table.numpy()[1], before["a"][1] - 1)
    none = np.zeros((0, 2), np.float32)
    store, state = store.update(sgd(1.0), {"a": np.zeros(0, np.int32)}, {"a": none}, state)
    np.testing.assert_allclose(store["a"].table.numpy()[1], before["a"][1] - 1)
    assert not np.array_equal(before["a"], FeatureStore().embedding("a", 3, 2, seed=1)["a"].table.numpy())


def test_the_first_values_of_an_embedding() -> None:
    rows = FeatureStore().embedding("a", 4000, 16, seed=5)["a"].table.numpy()
    np.testing.assert_array_equal(rows, FeatureStore().embedding("a", 4000, 16, seed=5)["a"].table.numpy())
    assert abs(rows.std() - 0.25) < 0.01 and abs(rows.mean()) < 0.01
    assert FeatureStore().embedding("a", 3, 2, dtype="bfloat16", stddev=0.0)["a"].table.dtype.name == "bfloat16"


def test_repr() -> None:
    store = FeatureStore.from_arrays({"paper": PAPERS}, dtype="int8", scale="row", on_device=[1]).embedding("a", 2, 3)
    assert repr(store) == (
        "FeatureStore(\n  paper: (40, 16) int8, host and device (1 rows), scale by row\n"
        "  a: (2, 3) float32, host, trainable\n)"
    )


ERRORS = {
    "one of the store's, 'paper'; got 'x'": lambda s: s.gather({"x": [0]}),
    "must be one of .None, 'row', 'column'.": lambda s: FeatureStore.from_arrays({"a": PAPERS}, scale="rows"),
    "`scale` must be None for rows of float16": lambda s: NodeFeatures.from_numpy(PAPERS, dtype="float16", scale="row"),
    "hold values from -448 to 448": lambda s: NodeFeatures.from_numpy(PAPERS * 1e3, dtype="float8_e4m3fn"),
    "give scale='row'": lambda s: NodeFeatures.from_numpy(PAPERS * 1e3, dtype="int8"),
    "must be finite": lambda s: NodeFeatures.from_numpy(np.full((2, 2), np.nan), dtype="int8", scale="row"),
    "ids of rows from 0 to 39": lambda s: NodeFeatures.from_numpy(PAPERS, on_device=[40]),
    "got a scalar": lambda s: NodeFeatures.from_numpy(3.0),
    "`on_device` must name types of the arrays": lambda s: FeatureStore.from_arrays({"a": PAPERS}, on_device={"b": 1}),
    r"must have shape \(40,\) or \(\)": lambda s: s.with_table("a", s["paper"].table, row_scale=np.ones(3)),
    "`num_nodes` must be at least 0": lambda s: s.embedding("a", 3, 0),
    "must have a row for each of 41 nodes": lambda s: s.check_counts({"paper": 41}),
    "must be those of the graph, 'author'": lambda s: s.check_counts({"author": 41}),
    "must lie in host memory or on a drive alone": lambda s: FeatureStore.from_arrays(
        {"a": PAPERS}, on_device=True
    ).cached({"a": [1]}),
    "distinct": lambda s: s.cached({"paper": [1, 1]}),
    "`ids` must have every type of `gradients`, got none for 'a'": lambda s: s.embedding("a", 3, 2).update(
        sgd(1.0), {}, {"a": 1}, {}
    ),
    "`state` must have every embedding of the store, got none for 'a'": lambda s: s.embedding("a", 3, 2).update(
        sgd(1.0), {"a": [0]}, {"a": 1}, {}
    ),
}


@pytest.mark.parametrize("message", ERRORS)
def test_bad_values(message: str) -> None:
    store = FeatureStore.from_arrays({"paper": PAPERS})
    with pytest.raises(ValueError, match=message):
        ERRORS[message](store)


def test_bad_types_of_arguments() -> None:
    store = FeatureStore.from_arrays({"paper": PAPERS})
    with pytest.raises(TypeError, match="integers, got float") as found:
        store.gather({"paper": np.array([0.5])})
    assert "node type 'paper'" in found.value.__notes__[0]
    for dtype in (np.int64, np.complex64, "float3"):
        with pytest.raises(TypeError, match="`dtype` must be"):
            NodeFeatures.from_numpy(PAPERS, dtype=dtype)
    with pytest.raises(TypeError, match="must be real"):
        NodeFeatures.from_numpy(np.array([["a"]]))
    with pytest.raises(TypeError, match="must be a dict of arrays by node type, got ndarray; .*'node'"):
        FeatureStore.from_arrays(PAPERS)
    with pytest.raises(TypeError, match="must be a HostTable"):
        store.with_table("a", PAPERS)
    with pytest.raises(TypeError, match="float32, bfloat16, float16"):
        store.embedding("a", 3, 2, dtype=np.int8)
    with pytest.raises(TypeError, match="out_dtype"):
        store.gather({"paper": [0]}, dtype=np.int16)
    with pytest.raises(TypeError, match="closes over"):
        jax.jit(lambda ids: store.gather({"paper": ids}))(jnp.array([0]))
    embedding = FeatureStore().embedding("a", 3, 2)
    with pytest.raises(ValueError, match=r"must have shape \(1, 2\)"):
        embedding.update(sgd(1.0), {"a": [1]}, {"a": np.ones((1, 3))}, embedding.init(sgd(1.0)))
    embedding["a"].table.close()
    with pytest.raises(RuntimeError, match="closed"):
        embedding.gather({"a": [0]})


@pytest.mark.parametrize(
    ("dtype", "values", "message"),
    [
        ("float16", [1e6, 1.0], "rows of float16 hold values up to 65504, got 1e\\+06; take dtype='bfloat16'"),
        ("int16", [1e6, 1.0], "rows of int16 hold values from -32768 to 32767, got 1.0 to 1000000.0; take a wider"),
        ("int32", [2**40 + 1, 1], "rows of int32 hold values from .*, got 1 to 1099511627777"),
        ("uint16", [-1, 1], "rows of uint16 hold values from 0 to 65535, got -1 to 1"),
        ("int16", [1.0, np.nan], "rows of int16 hold values from -32768 to 32767, got nan to nan; replace NaN"),
        ("bfloat16", [3.4e38, 1.0], "rows of bfloat16 hold values up to .*; take dtype='float32', or"),
    ],
)
def test_values_that_a_wider_format_cannot_hold(dtype, values, message):
    with pytest.raises(ValueError, match=f"type 'a': {message}"):
        FeatureStore.from_arrays({"a": np.array([values])}, dtype=dtype)


def test_integers_of_all_widths_are_rounded():
    values = np.array([[1.7, -1.7, 2.5, 0.2]])
    for dtype in ("int8", "int16", "int32"):
        rows = FeatureStore.from_arrays({"a": values}, dtype=dtype, on_device=np.True_).gather({"a": [0]})["a"]
        np.testing.assert_array_equal(rows, np.rint(values))


def test_infinities_stay_in_float16():
    store = FeatureStore.from_arrays({"a": np.array([[np.inf, -np.inf, np.nan, 1.0]])}, dtype="float16")
    rows = store.gather({"a": [0]})
    np.testing.assert_array_equal(rows["a"][0], [np.inf, -np.inf, np.nan, 1.0])
