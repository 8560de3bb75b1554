"""Training steps on sampled batches: `sampled_step` one by one, `pipelined_steps` several in one program.

A pipelined program reads the features of the next batch and samples the one after it while the layers of the present
batch run. Its results are those of single steps.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.typing import ArrayLike

from dejax._pytrees import pytree
from dejax.host_gather import gather_done
from dejax.host_gather.tables.table import is_table_of_host
from dejax.minibatch.features._joined import JoinedFeatures
from dejax.minibatch.features.store import FeatureStore
from dejax.minibatch.sampling._layout import SampleLayout
from dejax.minibatch.sampling.blocks import Block, join_nodes, make_blocks
from dejax.minibatch.sampling.sample import SampledBlocks
from dejax.minibatch.steps._packing import Packing
from dejax.minibatch.steps._split import Between, Split, Whole, split_at_reads
from dejax.minibatch.steps._training_steps import TrainingSteps
from dejax.minibatch.topology.hetero_topology import HeteroTopology

__all__ = ["MiniBatch", "TrainingSteps", "pipelined_steps", "sampled_step", "seed_batches", "step_keys"]

Sample = Callable[[Array, HeteroTopology, Any], Any]
"""(key, topology, seeds) -> SampledBlocks, or a pair of it and a pytree of arrays."""
_STEPS_A_STAGE = 8  # the fewest steps for each further stage, because a call begins and ends with an empty pipeline
Update = Callable[..., tuple[Any, Any]]
"""(state, batch, *rest) -> (state, out)."""


@pytree
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class MiniBatch:
    """The batch of one training step: a sample and the features of its nodes. It is a pytree.

    Attributes:
        sample: the sampled neighbourhood of the seeds.
        x: for each node type of the feature store [nodes, *row], the features of the sample's nodes; zeros for padding.
            A type that no edge of the topology leads to has no entry. A dict, or JoinedFeatures if the step was made
            with `joined=True`.
        seeds: the seeds, as they were given to the step.
        key: a random key for the step, for example for dropout. The sample was drawn with another key.
        extra: what the function `sample` returned besides the sample, or None.

    >>> import jax, jax.numpy as jnp, numpy as np
    >>> from dejax.minibatch import FeatureStore, HeteroTopology, sample_blocks, sampled_step
    >>> topology = HeteroTopology.from_edges({("a", "to", "a"): ([1, 2], [0, 0])}, {"a": 3})
    >>> store = FeatureStore.from_arrays({"a": np.array([[1.0], [2.0], [4.0]], np.float32)})
    >>> def sample(key, topology, seeds):
    ...     return sample_blocks(key, topology, ("a", seeds), [2])
    >>> def update(total, batch):  # `batch` is a MiniBatch
    ...     return total + batch.x["a"].sum(), len(batch.blocks)
    >>> step = sampled_step(update, sample)
    >>> step(jnp.zeros(()), topology, store, jax.random.key(0), jnp.array([0]))
    (Array(7., dtype=float32), Array(1, dtype=int32, weak_type=True))
    """

    sample: SampledBlocks
    x: Mapping[str, Array]
    seeds: Any
    key: Array
    extra: Any = None

    @property
    def blocks(self) -> list[Block]:
        """The graph of each layer, `make_blocks(sample)`.

        Read the attribute once in a step, as each read builds the graphs.
        """
        return make_blocks(self.sample)


def sampled_step(
    update: Update,
    sample: Sample,
    *,
    dtype: Any = None,
    joined: bool = False,
    donate: bool = True,
    mesh: Mesh | None = None,
    axis: str = "data",
) -> TrainingSteps:
    """Makes a jitted training step that samples a batch, reads its features, and calls your function `update`.

    Args:
        update: function `(state, batch, *rest) -> (state, out)` of a `MiniBatch`; `out` is a pytree of arrays such as
            the loss. Trainable embeddings belong into the state; `update` reads and writes them itself.
        sample: function `(key, topology, seeds)` that returns `SampledBlocks`, or a pair of these and further arrays
            for `MiniBatch.extra`.
        dtype: dtype of the features: float32, bfloat16 or float16; by default as in `FeatureStore.gather`.
        joined: whether `batch.x` has the features of all node types in one array (`JoinedFeatures`). Choose it if the
            first layer takes all nodes at once, because `batch.blocks[0].join(batch.x)` then copies nothing. All node
            types of the sample need features of one width.
        donate: whether the step may reuse the memory of the given state.
        mesh: devices of one process; None means one device without a mesh. The seeds are then divided along their first
            axis, and each device samples, reads and calls `update` with its part and with a key of its own (`fold_in`
            of the device's number). `update` must average the gradients (`jax.lax.pmean(gradients, axis)`) and return
            equal states and results on all devices. Give the topology, the features and `rest` to all devices by
            `dejax.distributed.share`.
        axis: name of the axis of the mesh.

    Returns:
        A function `(state, topology, features, key, seeds, *rest) -> (state, out)`. `features` is a FeatureStore.
        `seeds` is a pytree of arrays, such as the ids and times of the seeds. Without jax's 64-bit mode, int64 values
        are clipped to int32, so that ids out of range stay out of range.

    Raises:
        TypeError: `features` is no FeatureStore, or `sample` returns something else.
        ValueError: the feature store has trainable embeddings; or, with `joined`, node types have no features or
            different widths.
    """

    def step(
        state: Any, topology: HeteroTopology, features: FeatureStore, key: Array, seeds: Any, *rest: Any
    ) -> tuple[Any, Any]:
        _check_features("sampled_step", features)
        drawn = _draw("sampled_step", sample, key, topology, seeds)
        x: Mapping[str, Array] = features.gather(_ids(drawn, features), dtype=dtype)
        if joined:
            x = _joined("sampled_step", drawn.sample.layout, x)
        return update(state, _batch(drawn, x), *rest)

    return TrainingSteps(step, False, donate, mesh, axis)


def pipelined_steps(
    update: Update,
    sample: Sample,
    *,
    dtype: Any = None,
    joined: bool = False,
    donate: bool = True,
    num_sms: int | None = None,
    edges_ahead: bool | None = None,
    mesh: Mesh | None = None,
    axis: str = "data",
) -> TrainingSteps:
    """Makes a jitted function of several training steps whose sampling, reads of features and computation overlap.

    While the layers of batch t run, a second stream reads the features of batch t + 1 from host memory, and batch t + 2
    is sampled. If edges lie in host memory, too, batches are sampled in stages that overlap in the same way: the second
    stream reads the edges of one hop, and the sampling of that batch continues in the next step. States and results are
    those of `sampled_step`, called with the same keys and seeds one by one. If `update` writes embeddings, it reads
    them in the step that uses them, so that no read is out of date.

    The first samples and reads of a call overlap with nothing, so run some dozens of steps in each call. The features
    of two batches lie on the device.

    Args:
        update, sample, dtype, joined, donate, mesh, axis: as in `sampled_step`; on a mesh the second axis of the seeds
            is divided, [steps, seeds]. `sample` is also called with seeds of -1, for the
            batches after the last one.
        num_sms: number of GPU multiprocessors for the overlapped read; by default as in
            `dejax.host_gather.gather_start`.
        edges_ahead: whether reads of edges in host memory overlap, too. This costs some copies in each step, and
            additional samples at the beginning and end of each call. By default it is chosen if the reads of edges take
            longer than the copies and a call has at least eight steps for each stage of a sample. Reads inside of
            loops, such as those of the times of edges, do not overlap.

    Returns:
        A function `(state, topology, features, keys, seeds, *rest) -> (state, outs)`. `keys` is an array of keys, one
        for each step (`step_keys`); `seeds` are integer arrays [steps, ...] (`seed_batches`); the arrays of `outs` have
        a leading axis of steps.

    Raises:
        TypeError: as `sampled_step`; or seeds are not integers.
        ValueError: as `sampled_step`; or keys and seeds are for different numbers of steps, or for none.
    """
    what = "pipelined_steps"

    def steps(
        state: Any, topology: HeteroTopology, features: FeatureStore, keys: Array, seeds: Any, *rest: Any
    ) -> tuple[Any, Any]:
        _check_features(what, features)
        keys = _checked_steps(what, keys, seeds)

        def draw(varying: tuple[Array, Any], topology: HeteroTopology) -> _DrawnBatch:
            return _draw(what, sample, varying[0], topology, varying[1])

        sampling = _sampling(draw, (keys[0], _at(seeds, 0)), topology, keys.shape[0], edges_ahead)
        reading = {"dtype": dtype} if num_sms is None else {"dtype": dtype, "num_sms": num_sms}
        return _Pipeline(update, sampling, features, reading, joined, rest).run(state, keys, seeds)

    return TrainingSteps(steps, True, donate, mesh, axis)


def step_keys(key: ArrayLike, first: int | Array, steps: int) -> Array:
    """The random keys of consecutive steps, key[steps]: `fold_in(key, n)` for n = first, ..., first + steps - 1.

    The key of a step depends on its number only, so a run that is resumed draws the samples that it would have drawn.
    """
    key = jnp.asarray(key)
    typed = key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)
    found: Array = jax.vmap(lambda n: jax.random.fold_in(typed, n))(first + jnp.arange(steps))
    return found


def seed_batches(nodes: ArrayLike, size: int, *, seed: int | None = None, epoch: int = 0) -> np.ndarray:
    """Shuffles the seeds of an epoch and cuts them into batches: int32[batches, size].

    The last batch is padded with -1.

    Args:
        nodes: int[nodes], for example the training nodes.
        size: number of seeds in a batch.
        seed: random seed of the order; each epoch has another order. None keeps the given order.
        epoch: number of the epoch.

    Raises:
        ValueError: `size` is below 1, or a node is 2**31 or larger.
        TypeError: the nodes are not integers.

    >>> seed_batches([5, 6, 7], 2)
    array([[ 5,  6],
           [ 7, -1]], dtype=int32)
    """
    found = np.asarray(nodes).reshape(-1)
    if size < 1:
        raise ValueError(f"seed_batches: `size` must be at least 1, got {size}")
    if found.size and found.dtype.kind not in "iu":
        raise TypeError(f"seed_batches: `nodes` must be integers, got {found.dtype}")
    if found.size and int(found.max()) >= 2**31:
        raise ValueError(f"seed_batches: `nodes` must be below 2**31, got {found.max()}")
    found = np.maximum(found, -1) if found.dtype.kind == "i" else found
    if seed is not None:
        found = np.random.default_rng([seed, epoch]).permutation(found)
    batches = np.full((-(-found.size // size), size), -1, np.int32)
    batches.reshape(-1)[: found.size] = found
    return batches


# -------------------------------------------------------------------------------------------- parts of a step


@pytree
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _DrawnBatch:
    """A batch without its features."""

    sample: SampledBlocks
    seeds: Any
    key: Array
    extra: Any


_Passed = tuple[list[Array], _DrawnBatch]
"""A batch as the loop passes it on: what nearly every step reads, packed, and the batch without it."""


class _Passing:
    """How the loop passes batches on. What is not packed is passed on only if `update` reads it."""

    _packed = "nodes", "slots", "seed_positions"  # of a sample

    def __init__(self, like: _DrawnBatch) -> None:
        self._packing = Packing(self._numbers(like))

    def pack(self, drawn: _DrawnBatch) -> _Passed:
        return self._packing.pack(self._numbers(drawn)), self._with(drawn, None, *(None for _ in self._packed))

    def unpack(self, numbers: list[Array], rest: _DrawnBatch) -> _DrawnBatch:
        return self._with(rest, *self._packing.unpack(numbers))

    def _numbers(self, drawn: _DrawnBatch) -> tuple[Any, ...]:
        return drawn.seeds, *(getattr(drawn.sample, name) for name in self._packed)

    def _with(self, drawn: _DrawnBatch, seeds: Any, *fields: Any) -> _DrawnBatch:
        sample = dataclasses.replace(drawn.sample, **dict(zip(self._packed, fields, strict=True)))
        return dataclasses.replace(drawn, sample=sample, seeds=seeds)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Pipeline:
    """The loop of `pipelined_steps`, in one program.

    In iteration t, batch t is trained on, features of batch t + 1 are read, the last stage of sampling gives batch
    t + 2, and each stage before it works on a later batch.

    Attributes:
        update: see `pipelined_steps`.
        sampling: the stages of a sample.
        features: the store.
        reading: further arguments of reads of features.
        joined: whether `update` gets JoinedFeatures.
        rest: further arguments of `update`.
    """

    update: Update
    sampling: Split | Whole
    features: FeatureStore
    reading: dict[str, Any]
    joined: bool
    rest: tuple[Any, ...]

    def run(self, state: Any, keys: Array, seeds: Any) -> tuple[Any, Any]:
        """All steps: the last state, and the results of `update`, stacked."""
        filling = 2 + self.sampling.depth
        ahead = _padded(keys, seeds, filling)
        like = jax.eval_shape(self.sampling.all, _at(ahead, 0))
        passing = _Passing(like[1])
        first, following, between = self._filled(jax.tree.map(lambda some: some[:filling], ahead), like, passing)
        x: Mapping[str, Array] = self.features.gather(_ids(first[1], self.features), dtype=self.reading["dtype"])
        if self.joined:
            x = _joined("pipelined_steps", first[1].sample.layout, x)
        later = jax.tree.map(lambda some: some[filling:], ahead)
        iteration = functools.partial(self._iteration, passing)
        last, outs = jax.lax.scan(iteration, (state, first, following, x, between), later)
        return last[0], outs

    def _filled(
        self, begin: Any, like: tuple[Between, _DrawnBatch], passing: _Passing
    ) -> tuple[_Passed, _Passed, Between]:
        """Batches 0 and 1, of batch 2 all stages but the last, of batch 3 all but the last two, and so on.

        In a loop, so that XLA compiles the sampling twice and not once for each batch.
        """
        depth = self.sampling.depth

        def fill(carry: Any, each: Any) -> tuple[Any, None]:
            number, key, some = each
            between, drawn = self.sampling.all((key, some))
            passed = passing.pack(drawn)
            found = (passed, passed, between)
            at = (0, 1, [depth + 1 - n for n in range(depth)])
            taken = jax.tree.map(lambda n, new, old: _chosen(number == n, new, old), at, found, carry)
            return taken, None

        passed = jax.eval_shape(passing.pack, like[1])
        blank = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), (passed, passed, like[0]))
        filled: tuple[_Passed, _Passed, Between]
        filled, _ = jax.lax.scan(fill, blank, (jnp.arange(2 + depth), *begin))
        return filled

    def _iteration(self, passing: _Passing, carry: Any, ahead: tuple[Array, Any]) -> tuple[Any, Any]:
        state, (numbers, now), following, x, between = carry
        key, some = ahead
        # What the samples and the layers read passes through the start, so that they run after it.
        through = (jax.random.key_data(key), numbers, x, [rows for _, rows in between])
        ids = _ids(following[1], self.features)
        pending, (bits, numbers, x, all_rows) = self.features.gather_start(ids, before=through, **self.reading)
        key = jax.random.wrap_key_data(bits, impl=jax.random.key_impl(key))
        between = [(kept, rows) for (kept, _), rows in zip(between, all_rows, strict=True)]
        later, stages = self.sampling.advance((key, some), between)
        reads = []
        for request in itertools.chain.from_iterable(asked for _, asked in stages):
            read, (numbers, x) = request.start((numbers, x))  # before the layers, which run meanwhile
            reads.append(read)
        state, out = self.update(state, _batch(passing.unpack(numbers, now), x), *self.rest)
        after = _arrays((state, out))
        if self.joined:
            x = pending.gather_done_joined(following[1].sample.layout, after=after)[0]
        else:
            x = pending.gather_done(after=after)[0]
        arrived = iter([gather_done(read, after=after)[0] for read in reads])
        between = [(kept, [next(arrived) for _ in asked]) for kept, asked in stages]
        return (state, following, passing.pack(later), x, between), out


def _sampling(
    draw: Callable[[Any, Any], _DrawnBatch], like: Any, topology: HeteroTopology, steps: int, edges_ahead: bool | None
) -> Split | Whole:
    """The sampling of a loop: cut at its reads of edges in host memory, where that is wanted or pays."""
    split = None if edges_ahead is False else split_at_reads(draw, like, topology, on_cpu=edges_ahead is True)
    if split is None:
        return Whole(draw, topology)
    pays = split.pays and steps >= _STEPS_A_STAGE * split.depth
    return split if edges_ahead or pays else Whole(draw, topology)


def _draw(what: str, sample: Sample, key: Array, topology: HeteroTopology, seeds: Any) -> _DrawnBatch:
    own, rest = jax.random.split(key)
    found = sample(own, topology, seeds)
    extra = None
    if isinstance(found, tuple) and len(found) == 2:
        found, extra = found
    if not isinstance(found, SampledBlocks):
        raise TypeError(
            f"{what}: `sample` must return SampledBlocks, or (SampledBlocks, further arrays), got "
            f"{type(found).__name__}"
        )
    return _DrawnBatch(found, seeds, rest, extra)


def _ids(drawn: _DrawnBatch, features: FeatureStore) -> dict[str, Array]:
    return {name: ids for name, ids in drawn.sample.node_ids.items() if name in features and ids.shape[0]}


def _joined(what: str, layout: SampleLayout, x: Mapping[str, Array]) -> JoinedFeatures:
    """Features by node type in one array."""
    counts = layout.counts(layout.num_hops)
    if missing := [name for name, count in counts.items() if count and name not in x]:
        raise ValueError(
            f"{what}: with `joined` each node type of the sample must have features, got none of {missing[0]!r}; leave "
            "`joined` out"
        )
    shapes = {name: rows.shape[1:] for name, rows in x.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"{what}: with `joined` features must have one width, got {shapes}; leave `joined` out")
    return JoinedFeatures(join_nodes(layout, x, layout.num_hops), layout)


def _batch(drawn: _DrawnBatch, x: Mapping[str, Array]) -> MiniBatch:
    return MiniBatch(drawn.sample, x, drawn.seeds, drawn.key, drawn.extra)


def _at(tree: Any, step: int) -> Any:
    return jax.tree.map(lambda some: some[step], tree)


def _arrays(tree: Any) -> list[Array]:
    """The arrays on the device in a result, without random keys."""
    leaves: list[Any] = []
    for leaf in jax.tree.leaves(tree, is_leaf=is_table_of_host):
        leaves += leaf._on_device if is_table_of_host(leaf) else [leaf]
    return [leaf for leaf in leaves if not jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.extended)]


def _chosen(there: Array, new: Any, old: Any) -> Any:
    """All arrays of `new` where `there` is true, else of `old`."""
    return jax.tree.map(lambda some, other: jnp.where(there, some, other), new, old)


def _checked_steps(what: str, keys: Array, seeds: Any) -> Array:
    """The keys, typed, of as many steps as the seeds have."""
    if not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key):
        keys = jax.random.wrap_key_data(keys)
    if keys.ndim != 1 or not keys.shape[0]:
        raise ValueError(f"{what}: `keys` must be key[steps], of one step at least, got shape {keys.shape}")
    count = keys.shape[0]
    for leaf in jax.tree.leaves(seeds):
        if not jnp.issubdtype(leaf.dtype, jnp.integer):
            raise TypeError(f"{what}: `seeds` must be integers, got {leaf.dtype}; give other arrays as `rest`")
        if leaf.ndim < 1 or leaf.shape[0] != count:
            raise ValueError(
                f"{what}: `seeds` must have a leading axis of {count} steps, as `keys`, got shape {leaf.shape}"
            )
    return keys


def _padded(keys: Array, seeds: Any, count: int) -> tuple[Array, Any]:
    """Keys and seeds with some steps of padding at the end."""

    def longer(some: Array) -> Array:
        return jnp.concatenate([some, jnp.full((count, *some.shape[1:]), -1, some.dtype)])

    return jnp.concatenate([keys, jnp.broadcast_to(keys[-1:], (count,))]), jax.tree.map(longer, seeds)


def _check_features(what: str, features: Any) -> None:
    if not isinstance(features, FeatureStore):
        raise TypeError(
            f"{what}: `features` must be a FeatureStore, got {type(features).__name__}; make one with "
            "FeatureStore.from_arrays or FeatureStore().with_table"
        )
    if divided := [name for name, node in features.types.items() if node.table._is_divided]:
        raise ValueError(
            f"{what}: each device must read the tables of `features` alone, got one of {divided[0]!r} that devices "
            "exchange; use a PeerTable, or dejax.distributed.data_parallel"
        )
    if features.trainable:
        raise ValueError(
            f"{what}: `features` must have no trainable embeddings, got {', '.join(features.trainable)}; keep them in "
            "the state (FeatureStore.split_trainable) and read them in `update`"
        )
