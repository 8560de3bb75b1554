"""Random graphs with the published counts of IGB's heterogeneous graph, at any scale, to measure speed.

Counts are those of the full graph times a scale. The rest is random by seed, and does not depend on the number of
threads: every block of work has a stream of random numbers of its own.

- The in-degree of the receiver of rank r of m is about E ((r + 1)^0.4 - r^0.4) / m^0.4 in a relation of E edges: few
  nodes have long segments, as with ranks floor(m u^2.5) for uniform u. Senders are drawn with such ranks.
- A permutation without memory, (a r + b) mod m, leads from ranks to nodes.
- Features are random bits of a narrow float format, of magnitudes 1/8 to 2, so that sums stay finite. They carry no
  signal, and labels are random: a training step can be measured, but nothing can be learned.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dejax.datasets._dataset import UNLABELLED
from dejax.datasets._hetero import Ends, HeteroDataset, Relation
from dejax.datasets.files._work import for_blocks

if TYPE_CHECKING:
    from jax import Array

SKEW = 2.5
NUM_CLASSES = 2983
FEATURE_WIDTH = 1024
_LABELLED_SHARE = 94_605_581 / 269_346_174  # training papers of all papers
_EDGE_BLOCK = 1 << 20
_BYTE_BLOCK = 8 << 20
# Numbers of 8 bytes that a thread draws at once: the arrays of a piece stay in the core's cache.
_PIECE = 1 << 16
_NODES = {
    "paper": 269_346_174,
    "author": 277_220_883,
    "fos": 712_960,
    "journal": 49_052,
    "institute": 26_918,
    "conference": 4_547,
}
# The counts of `published` and `venue` are of the order of the real ones; these relations are small.
_EDGES: dict[Relation, int] = {
    ("paper", "cites", "paper"): 3_996_442_004,
    ("paper", "written_by", "author"): 716_761_549,
    ("paper", "topic", "fos"): 1_050_280_600,
    ("author", "affiliated_to", "institute"): 48_521_486,
    ("paper", "published", "journal"): 37_541_230,
    ("paper", "venue", "conference"): 5_011_180,
}


@dataclass(frozen=True, slots=True)
class IGBShape:
    """The numbers of nodes and edges of IGB's full heterogeneous graph, multiplied by a scale.

    Attributes:
        num_nodes: number of nodes of each type, at least 2.
        num_edges: number of edges of each relation, at least 1.

    >>> IGBShape.of(0.001).num_nodes["paper"]
    269346
    """

    num_nodes: dict[str, int]
    num_edges: dict[Relation, int]

    @classmethod
    def of(cls, scale: float) -> IGBShape:
        """The counts at a scale; 1 is the full graph.

        Raises:
            ValueError: `scale` is not above 0.
        """
        if not 0 < scale < math.inf:
            raise ValueError(f"scale must be above 0, got {scale}")
        return cls(
            {kind: max(2, round(count * scale)) for kind, count in _NODES.items()},
            {relation: max(1, round(count * scale)) for relation, count in _EDGES.items()},
        )


def random_csc(
    num_senders: int,
    num_receivers: int,
    num_edges: int,
    seed: int = 0,
    *,
    out: np.ndarray | None = None,
    threads: int | None = None,
    progress: bool | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Makes a random relation with skewed degrees in CSC form, without sorting, for graphs of billions of edges.

    Args:
        num_senders: number of nodes of the source type.
        num_receivers: number of nodes of the destination type.
        num_edges: number of edges. An edge may occur more than once.
        seed: random seed.
        out: int32 or int64 [num_edges], an array or memory map that is filled with the senders; by default a new int32
            array.
        threads: number of threads; by default one for each core.
        progress: whether to draw a progress bar; None draws if stderr is a terminal.

    Returns:
        A pair: offsets, int64[num_receivers + 1]; and senders, [num_edges]. The senders of receiver v are
        `senders[offsets[v]:offsets[v + 1]]`.

    Raises:
        ValueError: a count is negative, there are edges but no nodes, or `out` has another shape or dtype.
    """
    if min(num_senders, num_receivers, num_edges) < 0 or (num_edges and not num_senders * num_receivers):
        raise ValueError(
            f"random_csc: counts must be at least 0, and edges need nodes, got {num_senders} senders, {num_receivers} "
            f"receivers, {num_edges} edges"
        )
    senders = np.empty(num_edges, np.int32 if num_senders < 2**31 else np.int64) if out is None else out
    if senders.shape != (num_edges,) or senders.dtype not in (np.int32, np.int64):
        raise ValueError(
            f"random_csc: `out` must be int32 or int64 [{num_edges}], got {list(senders.shape)} of {senders.dtype}"
        )
    if senders.dtype == np.int32 and num_senders > 2**31:
        raise ValueError(f"random_csc: `out` must be int64 for {num_senders} senders, got {senders.dtype}")
    offsets = np.zeros(num_receivers + 1, np.int64)
    rank_of = _Permutation.of(num_receivers, seed, 0)

    def degrees(_: int, start: int, stop: int) -> None:
        rank = rank_of(np.arange(start, stop, dtype=np.int64))
        ends = [np.rint(num_edges * (r / num_receivers) ** (1 / SKEW)) for r in (rank, rank + 1)]
        offsets[start + 1 : stop + 1] = ends[1] - ends[0]

    node_of = _Permutation.of(num_senders, seed, 1)

    def draw(number: int, start: int, stop: int) -> None:
        rng = np.random.default_rng([seed, 2, number])
        for first in range(start, stop, _PIECE):
            u = rng.random(min(_PIECE, stop - first))
            u = u * u * np.sqrt(u)  # u ** 2.5 without a power function
            rank = np.minimum((u * num_senders).astype(np.int64), num_senders - 1)
            senders[first : first + len(u)] = node_of(rank)

    for_blocks(degrees, num_receivers, _EDGE_BLOCK, threads=threads, label="degrees", progress=progress)
    np.cumsum(offsets, out=offsets)
    for_blocks(draw, num_edges, _EDGE_BLOCK, threads=threads, label="edges", progress=progress)
    return offsets, senders


@dataclass(frozen=True, slots=True)
class _Permutation:
    """(factor * i + shift) mod size, a permutation of 0 .. size - 1 without memory."""

    factor: int
    shift: int
    size: int

    @classmethod
    def of(cls, size: int, seed: int, stream: int) -> _Permutation:
        if size < 2:
            return cls(1, 0, max(size, 1))
        rng = np.random.default_rng([seed, stream])
        # Factors under 2^31 keep products of 64 bits exact for 2^32 nodes.
        factor = int(rng.integers(1, min(size, 2**31)))
        while math.gcd(factor, size) != 1:
            factor = factor % (min(size, 2**31) - 1) + 1
        return cls(factor, int(rng.integers(size)), size)

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        return (numbers * self.factor + self.shift) % self.size


def fill_rows(
    table: Any,
    seed: int = 0,
    *,
    threads: int | None = None,
    label: str = "features",
    progress: bool | None = None,
) -> None:
    """Fills a table with random rows in place, on all CPU cores, for speed measurements.

    Args:
        table: [rows, *row] of float32, bfloat16, float16, float8_e4m3fn or an integer dtype: a writeable numpy array or
            memory map, or a `dejax.host_gather.HostTable`. Floats get magnitudes from 1/8 to 2 with random signs;
            integers get any value.
        seed: random seed.
        threads: number of threads; by default one for each core.
        label: label of the progress bar.
        progress: whether to draw a progress bar; None draws if stderr is a terminal.

    Raises:
        TypeError: the table has another dtype.
        ValueError: the table cannot be written.

    >>> import numpy as np
    >>> from dejax.datasets import fill_rows
    >>> table = np.zeros((1000, 8), np.float32)
    >>> fill_rows(table, seed=1)
    >>> bool((abs(table) >= 1 / 8).all()), bool((abs(table) <= 2).all())
    (True, True)
    """
    dtype, shape = np.dtype(table.dtype), tuple(table.shape)
    row = math.prod(shape[1:])
    limits = _bit_limits(dtype)
    write: Callable[[int, np.ndarray], None]
    if isinstance(table, np.ndarray):
        if not table.flags.writeable:
            raise ValueError("fill_rows: `table` must be writeable, got a read-only array")

        # As integers, which numpy copies while other threads run; it holds the interpreter's lock for FP8.
        words = table.view(f"u{dtype.itemsize}")

        def write(start: int, rows: np.ndarray) -> None:
            words[start : start + len(rows)] = rows.view(words.dtype)
    else:
        write = table.write

    def fill(number: int, start: int, stop: int) -> None:
        rng = np.random.default_rng([seed, 3, number])
        for first in range(start, stop, piece):
            count = min(piece, stop - first)
            words = -(-count * row * dtype.itemsize // 8)
            bits = rng.integers(0, 2**64, words, np.uint64).view(f"u{dtype.itemsize}")[: count * row]
            if limits is not None:
                keep, put = limits
                bits &= bits.dtype.type(keep)
                bits |= bits.dtype.type(put)
            write(first, bits.view(dtype).reshape(count, *shape[1:]))

    # A multiple of 8 rows, which have whole words.
    piece = max(1, _PIECE // max(1, row * dtype.itemsize)) * 8
    size = max(1, _BYTE_BLOCK // max(1, row * dtype.itemsize))
    for_blocks(fill, shape[0] if row else 0, size, threads=threads, label=label, progress=progress)


def _bit_limits(dtype: np.dtype) -> tuple[int, int] | None:
    """The bits of a float that stay random, and those that are set: exponents of 2^-3 to 2^0, any sign and mantissa.

    None for integers, whose bits are all random.
    """
    if dtype.kind in "iu":
        return None
    known = {"float8_e4m3fn": (4, 3), "float16": (5, 10), "bfloat16": (8, 7), "float32": (8, 23)}
    if dtype.name not in known:
        raise TypeError(f"fill_rows: the dtype must be one of {', '.join(known)} or of integers, got {dtype}")
    exponent, mantissa = known[dtype.name]
    # The biased exponent of 2^-3, ending in 00 for every format: bias 2^k - 1, so 2^k - 4.
    lowest = (1 << (exponent - 1)) - 4
    sign = 1 << (exponent + mantissa)
    return sign | (0b11 << mantissa) | ((1 << mantissa) - 1), lowest << mantissa


def random_rows_on_device(rows: int, width: int, dtype: Any, seed: int = 0, *, device: Any = None) -> Array:
    """Makes random rows in device memory, block by block, for `dejax.host_gather.DeviceTable.from_array`.

    The values have the same distribution as those of `fill_rows`, but are different for the same seed.

    Args:
        rows: number of rows.
        width: number of elements of a row.
        dtype: dtype of the rows: float32, bfloat16, float16, float8_e4m3fn or an integer dtype, as in `fill_rows`.
        seed: random seed. The values may differ between devices and between versions of jax.
        device: the device; by default jax's default device.

    Returns:
        uint[rows, width], the bits of the rows as unsigned integers of the width of `dtype`. Pass the array and
        the dtype to `DeviceTable.from_array(array, dtype)`, which then needs no second array.

    Raises:
        TypeError: another dtype.

    >>> import numpy as np
    >>> from dejax.datasets import random_rows_on_device
    >>> from dejax.host_gather import DeviceTable
    >>> table = DeviceTable.from_array(random_rows_on_device(1000, 8, np.float32), np.float32)
    >>> table.shape
    (1000, 8)
    """
    import jax
    import jax.numpy as jnp

    found = np.dtype(jnp.dtype(dtype))
    limits = _bit_limits(found)
    word = np.dtype(f"u{found.itemsize}")
    block = max(1, min(rows, (64 << 20) // max(1, width * found.itemsize)))

    def make(key: Array) -> Array:
        def fill(i: Array, table: Array) -> Array:
            bits = _random_bits(jax.random.fold_in(key, i), (block, width), word)
            if limits is not None:
                bits = (bits & word.type(limits[0])) | word.type(limits[1])
            # The last block ends with the last row, and covers rows of the block before.
            return jax.lax.dynamic_update_slice(table, bits, (jnp.minimum(i * block, rows - block), 0))

        return jax.lax.fori_loop(0, -(-rows // block), fill, jnp.zeros((rows, width), word))

    with jax.default_device(device):
        # XLA's own generator: threefry makes 40 GB/s on an H200.
        return jax.jit(make)(jax.random.key(seed, impl="rbg")) if rows * width else jnp.zeros((rows, width), word)


def _random_bits(key: Array, shape: tuple[int, int], word: np.dtype) -> Array:
    """Random unsigned integers. Narrow ones are parts of 32 bits where these fit a row: jax would drop other bits."""
    import jax

    parts = 4 // word.itemsize
    if parts < 2 or shape[1] % parts:
        return jax.random.bits(key, shape, word)
    words = jax.random.bits(key, (shape[0], shape[1] // parts), np.uint32)
    return jax.lax.bitcast_convert_type(words, word).reshape(shape)


def synthetic_igb(
    scale: float,
    seed: int = 0,
    *,
    feature_width: int = FEATURE_WIDTH,
    feature_dtype: Any = None,
    threads: int | None = None,
    progress: bool | None = None,
) -> HeteroDataset:
    """Makes a random graph with the counts of IGB times `scale`, as edge lists.

    For 10^9 edges or more, use `random_csc`.

    Args:
        scale: factor of the counts. The full graph, scale 1, has 5.5 * 10^8 nodes and 5.9 * 10^9 edges.
        seed: random seed.
        feature_width: number of elements of a feature row.
        feature_dtype: dtype of random features for all node types, as in `fill_rows`; None for no features.
        threads: number of threads; by default one for each core.
        progress: whether to draw progress bars; None draws if stderr is a terminal.

    Returns:
        A HeteroDataset with random labels of 2,983 classes, and splits with the shares of IGB's.

    Raises:
        ValueError: `scale` is not above 0.
        TypeError: features of `feature_dtype` cannot be made.
    """
    shape = IGBShape.of(scale)
    edges: dict[Relation, Ends] = {}
    for number, ((source, name, destination), count) in enumerate(shape.num_edges.items()):
        offsets, senders = random_csc(
            shape.num_nodes[source],
            shape.num_nodes[destination],
            count,
            seed * 64 + number,
            threads=threads,
            progress=progress,
        )
        receivers = np.repeat(np.arange(shape.num_nodes[destination], dtype=senders.dtype), np.diff(offsets))
        edges[source, name, destination] = (senders, receivers)
    features = {}
    for number, (kind, count) in enumerate(shape.num_nodes.items() if feature_dtype is not None else ()):
        features[kind] = np.empty((count, feature_width), _named_dtype(feature_dtype))
        fill_rows(features[kind], seed * 64 + 32 + number, threads=threads, label=kind, progress=progress)
    rng = np.random.default_rng([seed, 4])
    papers = shape.num_nodes["paper"]
    labels = np.full(papers, UNLABELLED, np.int32)
    labelled = rng.permutation(papers)[: max(1, round(papers * _LABELLED_SHARE / 0.6))]
    labels[labelled] = rng.integers(0, NUM_CLASSES, len(labelled))
    cuts = [round(0.6 * len(labelled)), round(0.8 * len(labelled))]
    return HeteroDataset(
        name="synthetic-igb",
        num_nodes=dict(shape.num_nodes),
        edges=edges,
        features=features,
        labels={"paper": labels},
        num_classes={"paper": NUM_CLASSES},
        splits={
            split: {"paper": np.sort(part)}
            for split, part in zip(("train", "valid", "test"), np.split(labelled, cuts), strict=True)
        },
        description=f"Random graph with the counts of IGB's full heterogeneous graph times {scale:g}, seed {seed}; "
        "random labels.",
        check=False,
    )


def _named_dtype(dtype: Any) -> np.dtype:
    """A dtype by name, also of those that numpy does not know."""
    try:
        return np.dtype(dtype)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, str(dtype)))
