"""Encoders of tables' rows inside a model, trained with it: packed rows and cutoffs in, vectors of one width out.

A value that is known later than a row's cutoff is a missing value. Times enter relative to the cutoff, and by their
parts of the calendar.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax._optional import optional
from dejax.segment import gather
from dejax.training.tables.rows import ColumnPlace, TablePlan
from dejax.training.tables.seed_times import DAY

with optional("flax", of="dejax.training"):
    from flax import nnx

NUMBERS = ("standard", "piecewise", "periodic")
_SCALES = (1 / 24, 6 / 24, 1.0, 7.0, 30.0, 365.0)
"""Days. Of each, t / (|t| + scale) tells times of about that size apart."""
_FREQUENCIES = 8
_MOST_ONE_HOT = 256  # a product with so few rows is faster than a gather and its gradient's scatter


class TableEncoder(nnx.Module):
    """The rows of one table as vectors: its columns' encodings side by side, through two dense layers.

    | column | encoding |
    | --- | --- |
    | number | standardised; piecewise linear between quantiles (arXiv 2203.05556, section 3.2); or periodic (3.3) |
    | category, categories | a learned vector for each, and one for those that training rows did not have; their sum |
    | time | relative to the cutoff on scales from hours to years; hour and weekday, and season where data span a year |
    | vector, hashed text | standardised |

    Each has a mark for missing values, of numbers, times and vectors. The columns of one kind are encoded together; the
    vectors of categories have the width of the first dense layer's result, to which they are added.

    Args:
        plan: where the columns stand.
        hidden: width of the result.
        numbers: one of `NUMBERS`.
        day: the day since 1970 from which cutoffs are counted.
        rngs: stream `params`.
    """

    def __init__(
        self, plan: TablePlan, hidden: int, *, numbers: str = "standard", day: int = 0, rngs: nnx.Rngs
    ) -> None:
        if numbers not in NUMBERS:
            raise ValueError(f"numbers must be one of {', '.join(NUMBERS)}, got {numbers!r}")
        self.plan, self.numbers, self.day, self.hidden = plan, numbers, day, hidden
        count = len(plan.of_kind("number"))
        self.frequencies = nnx.data(None)
        if numbers == "periodic" and count:
            self.frequencies = nnx.Param(jax.random.normal(rngs.params(), (count, _FREQUENCIES)))
        codes = sum(place.codes + 1 for place in plan.of_kind("category", "categories"))
        self.codes = nnx.Embed(codes, hidden, rngs=rngs) if codes else nnx.data(None)
        abstract = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
        vectors = {place.name: abstract(1, place.width) for place in plan.apart}
        parts = jax.eval_shape(self._plain, abstract(1, plan.width), abstract(1), abstract(1), vectors)
        width = sum(part.shape[1] for part in parts)
        self.first = nnx.Linear(width, hidden, rngs=rngs) if width else nnx.data(None)
        self.base = nnx.data(None) if width or codes else nnx.Param(jnp.zeros(hidden))
        if width or codes:
            self.norm = nnx.LayerNorm(hidden, rngs=rngs)
            self.second = nnx.Linear(hidden, hidden, rngs=rngs)

    def __call__(self, rows: Array | None, cutoffs: Array, vectors: Mapping[str, Array] | None = None) -> Array:
        """float32[rows, hidden].

        Args:
            rows: float32[rows, width], of `pack`; None for a table without columns, whose rows are all equal, and for
                one without rows.
            cutoffs: int[rows], seconds from `day` on: what is known later is hidden.
            vectors: float32[rows, width] by column, of those that are not packed (`dejax.training.tables.rows.apart`).
        """
        if self.base is not None:
            return jnp.broadcast_to(self.base[...], (cutoffs.shape[0], self.hidden))
        vectors = vectors or {}
        if rows is None and not vectors:
            return jnp.zeros((cutoffs.shape[0], self.hidden), jnp.float32)
        rows = jnp.zeros((cutoffs.shape[0], 0), jnp.float32) if rows is None else rows
        days, seconds = _divided(cutoffs)
        plain = self._plain(rows, days, seconds, vectors)
        found = [] if self.first is None else [self.first(jnp.concatenate(plain, axis=1))]
        if self.codes is not None:
            found.append(_summed(self.codes.embedding[...], self._codes(rows, days, seconds)))
        return nnx.relu(self.second(nnx.relu(self.norm(sum(found[1:], start=found[0])))))

    def _plain(self, rows: Array, days: Array, seconds: Array, vectors: Mapping[str, Array]) -> list[Array]:
        """The encodings without categories, [rows, width] each."""
        parts = []
        if places := self.plan.of_kind("number"):
            x = _values(rows, places)
            there = self._known(places, rows, days, seconds) & jnp.isfinite(x)
            parts += [*self._numbers(jnp.where(there, x, 0.0), there, places), (~there).astype(jnp.float32)]
        if places := self.plan.of_kind("time"):
            times = _values(rows, places).reshape(-1, len(places), 2)
            there = self._known(places, rows, days, seconds) & ~jnp.isnan(times[:, :, 0])
            times = jnp.where(there[:, :, None], times, 0.0)
            relative = _relative((times[:, :, 0] - days[:, None]) + (times[:, :, 1] - seconds[:, None]) / DAY)
            seasons = np.array([place.seasons for place in places])
            found = jnp.concatenate([relative, _calendar(times[:, :, 0] + self.day, times[:, :, 1], seasons)], axis=2)
            found = jnp.where(there[:, :, None], found, 0.0)
            parts += [found.reshape(-1, found.shape[1] * found.shape[2]), (~there).astype(jnp.float32)]
        for place in [*self.plan.of_kind("vector"), *self.plan.apart]:
            x = vectors[place.name] if place.apart else _values(rows, [place])
            known = self._known([place], rows, days, seconds) & jnp.isfinite(x).all(1, keepdims=True)
            x = (x - np.asarray(place.mean, np.float32)) / np.asarray(place.deviation, np.float32)
            parts += [jnp.where(known, x, 0.0), (~known).astype(jnp.float32)]
        return parts

    def _known(self, places: Sequence[ColumnPlace], rows: Array, days: Array, seconds: Array) -> Array:
        """Whether the values of columns are known by the cutoff: bool[rows, columns], or [rows, 1] where all are."""
        if all(place.known is None for place in places):
            return jnp.ones((rows.shape[0], 1), bool)
        times = rows[:, self.plan.known :].reshape(rows.shape[0], -1, 2)
        day, second = days[:, None], seconds[:, None]
        known = (times[:, :, 0] < day) | ((times[:, :, 0] == day) & (times[:, :, 1] <= second))
        return jnp.stack([known[:, p.known] if p.known is not None else jnp.ones_like(known[:, 0]) for p in places], 1)

    def _numbers(self, x: Array, there: Array, places: Sequence[ColumnPlace]) -> list[Array]:
        z = jnp.where(there, jnp.clip(x, -10.0, 10.0), 0.0)
        more = None
        if self.numbers == "periodic":
            assert self.frequencies is not None
            angle = 2 * np.pi * z[:, :, None] * self.frequencies[...]
            more = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=2)
        elif self.numbers == "piecewise":
            low, high = _bins(places)
            more = jnp.clip((x[:, :, None] - low) / (high - low), 0.0, 1.0)
        if more is None:
            return [z]
        return [z, jnp.where(there[:, :, None], more, 0.0).reshape(-1, more.shape[1] * more.shape[2])]

    def _codes(self, rows: Array, days: Array, seconds: Array) -> Array:
        """The rows of `codes` of all categories, int32[rows, values], -1 for none.

        A category that training rows did not have has the last row of its column.
        """
        places = self.plan.of_kind("category", "categories")
        widths = [place.width for place in places]
        most = np.repeat([place.codes for place in places], widths).astype(np.int32)
        first = np.repeat(np.cumsum([0, *(place.codes + 1 for place in places[:-1])]), widths).astype(np.int32)
        codes = _values(rows, places).astype(jnp.int32)
        known = self._known([place for place in places for _ in range(place.width)], rows, days, seconds)
        return jnp.where(known & (codes >= 0), jnp.minimum(codes, most) + first, -1)


class TablesEncoder(nnx.Module):
    """A `TableEncoder` for each table, called as the input projection of a model on blocks.

    Args:
        plans: the plan of each table.
        hidden, numbers, day, rngs: as of `TableEncoder`.
    """

    def __init__(
        self, plans: Mapping[str, TablePlan], hidden: int, *, numbers: str, day: int = 0, rngs: nnx.Rngs
    ) -> None:
        self.tables = tuple(plans)
        for name, plan in plans.items():
            setattr(self, f"table_{name}", TableEncoder(plan, hidden, numbers=numbers, day=day, rngs=rngs))

    def __call__(self, rows: Mapping[str, Array], cutoffs: Mapping[str, Array]) -> dict[str, Array]:
        """float32[rows, hidden] by table, from packed rows and cutoffs by table."""
        found = {}
        for name in self.tables:
            encoder = getattr(self, f"table_{name}")
            vectors = {
                place.name: rows[apart_name(name, place.name)]
                for place in encoder.plan.apart
                if apart_name(name, place.name) in rows  # not for a table without rows
            }
            found[name] = encoder(rows.get(name), cutoffs[name], vectors)
        return found


def apart_name(table: str, column: str) -> str:
    """The name of the vectors of a column in a feature store that has tables' rows by their names."""
    return f"vectors {table}.{column}"


def _divided(times: Array) -> tuple[Array, Array]:
    """Whole days and seconds of the day, as float32."""
    days = times // DAY
    return days.astype(jnp.float32), (times - days * DAY).astype(jnp.float32)


def _values(rows: Array, places: Sequence[ColumnPlace]) -> Array:
    """The values of columns that lie side by side."""
    return rows[:, places[0].first : places[-1].first + places[-1].width]


def _bins(places: Sequence[ColumnPlace]) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper ends of bins, float32[columns, bins]; a column with fewer bins has some without values."""
    most = max([1, *(len(place.edges) - 1 for place in places)])
    far = float(np.finfo(np.float32).max) / 4
    low, high = (np.full((len(places), most), value, np.float32) for value in (far, 2 * far))
    for n, place in enumerate(places):
        low[n, : max(0, len(place.edges) - 1)] = place.edges[:-1]
        high[n, : max(0, len(place.edges) - 1)] = place.edges[1:]
    return low, high


def _relative(days: Array) -> Array:
    """A time relative to the cutoff, on several scales: [rows, times, scales]."""
    days = days[:, :, None]
    size = jnp.abs(days)
    return jnp.concatenate(
        [days / (size + np.array(_SCALES, np.float32)), jnp.sign(days) * jnp.log1p(size * 24) / 4], 2
    )


def _calendar(days: Array, seconds: Array, seasons: np.ndarray) -> Array:
    """Hour of the day, day of the week (1970 began on a Thursday), and day of the year, as angles: [rows, times, n].

    `seasons`: bool[times], of which times the day of the year counts; of the others it is 0.
    """
    day, whole = seconds / DAY, days + seconds / DAY
    turns = [day, 2 * day, whole / 7.0 % 1.0, *([whole / 365.2425 % 1.0] if seasons.any() else [])]
    angles = 2 * np.pi * jnp.stack(turns, axis=2)
    found = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=2)
    if seasons.all() or not seasons.any():
        return found
    of_season = np.arange(found.shape[2]) % len(turns) == 3
    return jnp.where(seasons[:, None] | ~of_season, found, 0.0)


def _summed(table: Array, codes: Array) -> Array:
    """The sum of the rows of codes, [rows, width]; -1 for none."""
    if table.shape[0] <= _MOST_ONE_HOT:
        counts = jax.nn.one_hot(codes, table.shape[0], dtype=table.dtype).sum(1)
        return counts @ table
    return gather(table, codes.reshape(-1)).reshape(*codes.shape, -1).sum(1)
