"""The magnitudes of the columns of arrays, as powers of two: one small kernel for all arrays of a program.

Row-scaled float16 and products in float16 divide columns by these (`row_scaled`). The powers are estimates from some
rows of each array. An estimate that is wrong by a factor of some thousands costs no digits.

The columns of what is computed are estimated from those of its arguments, before it is there. A column of a product
`x[r, k] w[t, k, n]` is as large as the largest `|w[t, k, n]|` times the size of column `k` of `x`. So `Columns` is an
einsum, with maxima in the place of sums.

Contract test: `tests/pallas/test_column_powers.py`, against maxima of numpy.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dejax.pallas import _triton
from dejax.pallas._shapes import divide, lanes, next_power_of_two
from dejax.pallas._tiles import broadcast, where
from dejax.pallas.formats.row_scaled import finite_magnitude, max_magnitude, powers_of, powers_of_tile, whole_max

# Elements that a program reads at a time: fewer where neighbours belong to one column, because each is then a memory
# sector of its own.
_ELEMENTS, _ELEMENTS_APART = 16384, 2048
_TOGETHER = 8  # float32 elements of a memory sector
_MOST_ELEMENTS = 8 * _ELEMENTS  # the most elements that a program reads in all
MAX_COLUMNS = 4096  # the most columns of which a program holds the powers
_WARPS = 16
_AHEAD = 3  # arrays whose elements a program loads before it needs them: 32 registers of a thread each, at most
_LARGEST = np.float32(3e38)
_NOTHING = np.float32(2.0**-126)  # the power of columns that belong to no part and are zeros

# The axis of an array's rows in the subscripts of `Columns`.
ROWS = "#"


@dataclass(frozen=True, slots=True)
class Columns:
    """A source whose columns have the magnitude of the largest product of their factors' elements.

    Attributes:
      factors: (source, subscripts) of each; a source is the number of an array, or other columns. At most one factor is
        an array. A letter stands for each axis, as in an einsum, `ROWS` for rows of which a sample will do.
      out: the letters of the columns' axes.
      sizes: (letter, size) of all letters.
    """

    factors: tuple[tuple[int | Source, str], ...]
    out: str
    sizes: tuple[tuple[str, int], ...]

    @property
    def size(self) -> int:
        sizes = dict(self.sizes)
        return math.prod(sizes[c] for c in self.out)

    @property
    def arguments(self) -> tuple[Source, ...]:
        return tuple(f for f, _ in self.factors if not isinstance(f, int))

    @property
    def arrays(self) -> tuple[int, ...]:
        return tuple(f for f, _ in self.factors if isinstance(f, int))


@dataclass(frozen=True, slots=True)
class Placed:
    """A source whose columns have the magnitude of the largest of several sources that are placed along an axis.

    It stands for sums, concatenations and slices.

    Attributes:
      parts: (columns, start): where the part begins along `axis`, negative where it loses its first columns.
      axis: the axis.
      shape: the shape of the columns.
    """

    parts: tuple[tuple[Source, int], ...]
    axis: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def arguments(self) -> tuple[Source, ...]:
        return tuple(part for part, _ in self.parts)

    @property
    def arrays(self) -> tuple[int, ...]:
        return ()

    @property
    def inner(self) -> int:
        return math.prod(self.shape[self.axis + 1 :])

    def length(self, part: Source) -> int:
        """The length of a part along the axis."""
        return part.size // (self.size // self.shape[self.axis])


Source = Columns | Placed
Arrays = Sequence[jax.Array] | Mapping[int, jax.Array]


def of_array(number: int, shape: tuple[int, ...], kept: tuple[int, ...]) -> Columns:
    """The columns of an array along its axes `kept`, in that order; its first axis is rows."""
    letters = ROWS + "abcdefghijklmnopqrstuvwxyz"[: len(shape) - 1]
    sizes = tuple(zip(letters, shape, strict=True))
    return Columns(((number, letters),), "".join(letters[a] for a in kept), sizes)


def tree(source: Source) -> list[Source]:
    """A source and all sources on which it depends, arguments first."""
    found: dict[Source, None] = {}
    for argument in source.arguments:
        found.update(dict.fromkeys(tree(argument)))
    return [*found, source]


def column_powers(
    arrays: Arrays, sources: Sequence[Source], *, interpret: bool | None = None
) -> list[tuple[jax.Array, jax.Array]]:
    """A power of two near the largest magnitude of each column.

    Args:
      arrays: floating-point arrays by number.
      sources: columns of these arrays, or of what will be computed of them.
      interpret: run the kernel interpreted; by default where there is no GPU.

    Returns:
      For each source float32[columns] and the same as bfloat16, powers of two from 2^-126 to 2^126. A column of which
      only zeros were read has the largest power of all columns, or 1 if all elements that were read are zeros.
      Infinities and NaN are left out.
    """
    found: dict[int, tuple[jax.Array, jax.Array]] = {}
    in_kernel: list[int] = []
    for i, source in enumerate(sources):
        if all(s.size <= MAX_COLUMNS and all(arrays[a].size for a in s.arrays) for s in tree(source)):
            in_kernel.append(i)
        else:
            powers = plain(arrays, source)
            found[i] = powers, powers.astype(jnp.bfloat16)
    if in_kernel:
        found.update(zip(in_kernel, _in_kernel(arrays, [sources[i] for i in in_kernel], interpret), strict=True))
    return [found[i] for i in range(len(sources))]


def plain(arrays: Arrays, source: Source) -> jax.Array:
    """The powers of `source`, measured on all rows, in plain JAX."""
    if isinstance(source, Placed):
        largest = jnp.zeros(source.shape, jnp.float32)
        for part, start in source.parts:
            shape = tuple(source.length(part) if a == source.axis else s for a, s in enumerate(source.shape))
            behind = source.shape[source.axis] - start - shape[source.axis]
            edges = [(start, behind, 0) if a == source.axis else (0, 0, 0) for a in range(len(shape))]
            largest = jnp.maximum(largest, lax.pad(plain(arrays, part).reshape(shape), np.float32(0), edges))
        return jnp.maximum(largest.reshape(-1), _NOTHING)
    sizes = dict(source.sizes)
    reduced = "".join(c for c in sizes if c not in source.out)
    letters = source.out + reduced
    largest = jnp.ones((1,) * len(letters), jnp.float32)
    for factor, subscripts in source.factors:
        if isinstance(factor, int):
            values = finite_magnitude(lax.stop_gradient(arrays[factor]))
        else:
            values = plain(arrays, factor).reshape([sizes[c] for c in subscripts])
        values = jnp.transpose(values, sorted(range(len(subscripts)), key=lambda a: letters.index(subscripts[a])))
        values = values.reshape([sizes[c] if c in subscripts else 1 for c in letters])
        largest = jnp.minimum(largest * values, _LARGEST)
    largest = jnp.max(largest, axis=tuple(range(len(source.out), len(letters))), initial=0)
    return powers_of(jnp.broadcast_to(largest, [sizes[c] for c in source.out]).reshape(-1))


def _in_kernel(arrays: Arrays, sources: Sequence[Source], interpret: bool | None) -> list[tuple[jax.Array, jax.Array]]:
    used = list(dict.fromkeys(a for source in sources for s in tree(source) for a in s.arrays))
    jobs = [job for i, source in enumerate(sources) for job in _jobs(source, i)]
    inner = [s.size for job in jobs for s in job.scratch]
    n = len(sources)
    results = _triton.pallas_call(
        functools.partial(_kernel, jobs=tuple(jobs), used=used, num_sources=n),
        name="column_powers",
        num_programs=len(jobs),
        out_shape=[
            *(jax.ShapeDtypeStruct((s.size,), jnp.float32) for s in sources),
            *(jax.ShapeDtypeStruct((s.size,), jnp.bfloat16) for s in sources),
            *(jax.ShapeDtypeStruct((size,), jnp.float32) for size in inner),
        ],
        num_warps=_WARPS,
        num_stages=1,
        interpret=_triton.use_interpreter(interpret),
    )(*(lax.stop_gradient(arrays[a]) for a in used))
    return list(zip(results[:n], results[n : 2 * n], strict=True))


@dataclass(frozen=True, slots=True)
class _Job:
    """The work of one program: it stores the powers of `source` as a part of a result.

    Attributes:
      source: what is estimated.
      result: the number of the result.
      whole: the result's columns; `source` itself, or a concatenation that it is a part of.
      start: where the part begins along the axis of the concatenation, negative where it loses its first columns.
    """

    source: Source
    result: int
    whole: Source
    start: int = 0

    @property
    def scratch(self) -> list[Source]:
        """The sources on which the job's source depends, arguments first."""
        return tree(self.source)[:-1]

    def place(self) -> tuple[jax.Array, jax.Array]:
        """The position in the result of each column of the source, and which columns belong there."""
        column = _columns_of(self.source)
        inside = column < self.source.size
        if not isinstance(self.whole, Placed) or self.whole is self.source:
            return where(inside, column, self.source.size), inside
        rest, within = divide(column, self.whole.inner)
        before, at = divide(rest, self.whole.length(self.source))
        size, at = self.whole.shape[self.whole.axis], at + np.int32(self.start)
        inside &= (at >= 0) & (at < size)
        return where(inside, (before * size + at) * self.whole.inner + within, self.whole.size), inside


def _jobs(source: Source, result: int) -> list[_Job]:
    """The jobs of a result: one program for each of the parts that lie side by side, which run at the same time."""
    if isinstance(source, Placed):
        ends = [(start, start + source.length(part)) for part, start in source.parts]
        clipped = sorted((max(a, 0), min(b, source.shape[source.axis])) for a, b in ends)
        edges = [0, *(edge for pair in clipped for edge in pair), source.shape[source.axis]]
        if all(edges[i] == edges[i + 1] for i in range(0, len(edges), 2)):
            return [_Job(part, result, source, start) for part, start in source.parts]
    return [_Job(source, result, source)]


def _kernel(*refs: Any, jobs: tuple[_Job, ...], used: Sequence[int], num_sources: int) -> None:
    (program,) = _triton.program_ids()
    arrays, results = dict(zip(used, refs, strict=False)), refs[len(used) :]
    inner = iter(results[2 * num_sources :])
    for i, job in enumerate(jobs):
        scratch = {s: next(inner) for s in job.scratch}
        stored = results[job.result], results[num_sources + job.result]
        one = functools.partial(_estimate, job, arrays, stored, scratch)
        if len(jobs) == 1:
            one()
        else:
            _triton.when(program == i, one)


def _estimate(job: _Job, arrays: Mapping[int, Any], results: tuple[Any, Any], scratch: dict[Source, Any]) -> None:
    """Stores the powers of the job's source, computed from the powers of the sources on which it depends."""
    steps = tree(job.source)
    # Latency of memory takes most of the time: the next arrays' elements are loaded while these are reduced.
    coming = [s for s in steps if isinstance(s, Columns)]
    loaded: dict[Source, _Elements] = {}
    for s in steps:
        column = _columns_of(s)
        if isinstance(s, Placed):
            found = _placed(s, scratch)
        else:
            while coming and len(loaded) < _AHEAD:
                following = coming.pop(0)
                loaded[following] = _Elements(following, arrays, scratch)
            largest = where(column < s.size, loaded.pop(s).largest(), 0.0)
            found = powers_of_tile(largest, whole_max(largest))
        inside = column < s.size
        if s in scratch:
            _triton.store(scratch[s], (where(inside, column, s.size),), found, inside)
            _triton.barrier()
        else:
            index, inside = job.place()
            for ref in results:
                _triton.store(ref, (index,), found, inside)


def _columns_of(s: Source) -> jax.Array:
    return lanes(next_power_of_two(s.size), 1, 2)


def _placed(s: Placed, scratch: dict[Source, Any]) -> jax.Array:
    column = _columns_of(s)
    rest, within = divide(column, s.inner)
    before, at = divide(rest, s.shape[s.axis])
    largest = lax.full(column.shape, _NOTHING)
    for part, start in s.parts:
        length, here = s.length(part), at - start
        inside = (column < s.size) & (here >= 0) & (here < length)
        index = where(inside, (before * length + here) * s.inner + within, 0)
        largest = _triton.maximum(largest, _triton.load(scratch[part], (index,), inside))
    return largest


class _Elements:
    """The products of elements whose largest magnitude is wanted.

    Elements of arrays are loaded at once where one tile holds all of them, else a tile at a time.
    """

    def __init__(self, s: Columns, arrays: Mapping[int, Any], scratch: dict[Source, Any]) -> None:
        self.columns, self.arrays, self.scratch = s, arrays, scratch
        self.sample = _Sample.of(s)
        self.loaded = self._load(np.int32(0)) if self.sample.steps == 1 else None

    def largest(self) -> jax.Array:
        """float32[1, columns]."""
        if self.loaded is not None:
            return self._largest_of(*self.loaded)
        step = np.int32(self.sample.at_a_time)
        return _triton.fori_loop(
            np.int32(0),
            np.int32(self.sample.steps),
            lambda i, largest: _triton.maximum(largest, self._largest_of(*self._load(i * step))),
            lax.full(_columns_of(self.columns).shape, np.float32(0)),
        )

    def _load(self, first: Any) -> tuple[dict[str, jax.Array], jax.Array, list[jax.Array]]:
        """The indices of elements, the mask of those that exist, and the elements of arrays, loaded."""
        s, column = self.columns, _columns_of(self.columns)
        entry = lanes(self.sample.at_a_time, 0, 2) + first
        inside = (column < s.size) & (entry < self.sample.entries)
        at = self.sample.at(column, entry)
        found = []
        for factor, subscripts in s.factors:
            if isinstance(factor, int):
                index = tuple(lax.broadcast_in_dim(at[c], inside.shape, (0, 1)) for c in subscripts)
                found.append(finite_magnitude(_triton.load(self.arrays[factor], index, inside)))
        return at, inside, found

    def _largest_of(self, at: dict[str, jax.Array], inside: jax.Array, values: list[jax.Array]) -> jax.Array:
        for factor, subscripts in self.columns.factors:
            if not isinstance(factor, int):
                # A tile of one axis, mostly: elements of a row, or of a column, have the same power.
                index = self.sample.flat(subscripts, at)
                values = [*values, _triton.load(self.scratch[factor], (index,))]
        shape = np.broadcast_shapes(*(x.shape for x in values))
        product = functools.reduce(
            lambda x, y: _triton.minimum(broadcast(x, shape) * broadcast(y, shape), _LARGEST), values
        )
        if not self.columns.arrays:  # whose elements that do not exist were loaded as zeros
            product = where(inside, product, 0.0)
        return max_magnitude(product, 0)


@dataclass(frozen=True, slots=True)
class _Sample:
    """The elements of each column that are read: some rows, and of each row as many elements as there is time for.

    Attributes:
      columns: what is estimated.
      rows: how many rows are read.
      others: (letter, size) of the other axes that are reduced.
      read: elements of a row's `others` that are read for each column.
      at_a_time: elements that are read at a time for each column, a power of two.
    """

    columns: Columns
    rows: int
    others: tuple[tuple[str, int], ...]
    read: int
    at_a_time: int

    @classmethod
    def of(cls, s: Columns) -> _Sample:
        sizes = dict(s.sizes)
        others = tuple((c, n) for c, n in s.sizes if c not in s.out and c != ROWS)
        columns, each = next_power_of_two(s.size), math.prod(n for _, n in others)
        apart = any(isinstance(f, int) and subscripts[-1] not in s.out for f, subscripts in s.factors)
        elements = max((_ELEMENTS_APART if apart else _ELEMENTS) // columns, _TOGETHER if apart else 1)
        read = min(each, max(_MOST_ELEMENTS // columns, elements))
        rows = min(sizes.get(ROWS, 1), max(elements // read, 1))
        return cls(s, rows, others, read, min(next_power_of_two(rows * read), max(_ELEMENTS // columns, 1)))

    @property
    def entries(self) -> int:
        return self.rows * self.read

    @property
    def steps(self) -> int:
        return -(-self.entries // self.at_a_time)

    def at(self, column: jax.Array, entry: jax.Array) -> dict[str, jax.Array]:
        """The index along each axis."""
        sizes = dict(self.columns.sizes)
        row, other = divide(entry, self.read)
        each = math.prod(n for _, n in self.others)
        found = {ROWS: _spread(row, self.rows, sizes.get(ROWS, 1))}
        rest = _spread(other, self.read, each)
        for letters, index in ((self.columns.out, column), ("".join(c for c, _ in self.others), rest)):
            for c in reversed(letters):
                index, found[c] = divide(index, sizes[c])
        return found

    def flat(self, subscripts: str, at: dict[str, jax.Array]) -> jax.Array:
        """The index into columns of these axes, side by side, or one of them where `at` has elements that do not exist.

        Axes along which it does not change have size 1.
        """
        sizes, index = dict(self.columns.sizes), lax.full((1, 1), np.int32(0))
        for c in subscripts:
            if sizes[c] > 1:
                index = index * np.int32(sizes[c]) + at[c]
        return lax.min(index, lax.full(index.shape, np.int32(math.prod(sizes[c] for c in subscripts) - 1)))


def _spread(index: jax.Array, chosen: int, size: int) -> jax.Array:
    """Maps the numbers below `chosen` to numbers below `size`, evenly spread."""
    if chosen >= size:
        return index
    stride = np.float32((size - 1) / max(chosen - 1, 1))
    return lax.min((index.astype(jnp.float32) * stride).astype(jnp.int32), np.int32(size - 1))
