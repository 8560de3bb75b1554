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
from dejax.training.rows import DAY, ColumnPlace, TablePlan

with optional("flax", of="dejax.training"):
    from flax import nnx

NUMBERS = ("standard", "piecewise", "periodic")
_SCALES = (1 / 24, 6 / 24, 1.0, 7.0, 30.0, 365.0)
"""Days. Of each, t / (|t| + scale) tells times of about that size apart."""
_FREQUENCIES = 8
_MOST_ONE_HOT = 32  # a product with so few rows is faster than a gather and its gradient's scatter


class TableEncoder(nnx.Module):
    """The rows of one table as vectors: its columns' encodings side by side, through two dense layers.

    | column | encoding |
    | --- | --- |
    | number | standardised; piecewise linear between quantiles (arXiv 2203.05556, section 3.2); or periodic (3.3) |
    | category, categories | a learned vector for each, and one for those that training rows did not have; their sum |
    | time | relative to the cutoff on scales from hours to years; hour and weekday, and season where data span a year |
    | vector, hashed text | standardised |

    Each has a mark for missing values, of numbers, times and vectors.

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
        self.plan, self.numbers, self.day = plan, numbers, day
        width = 0
        for place in plan.columns:
            if place.kind in ("category", "categories"):
                own = embedding_width(place.codes)
                setattr(self, f"codes_{place.name}", nnx.Embed(place.codes + 1, own, rngs=rngs))
                width += own
        self.frequencies = nnx.data(None)
        count = len(_of_kind(plan, "number"))
        if numbers == "periodic" and count:
            self.frequencies = nnx.Param(jax.random.normal(rngs.params(), (count, _FREQUENCIES)))
        width += sum(part.shape[1] for part in jax.eval_shape(self._plain, *_abstract(plan)))
        self.base = nnx.Param(jnp.zeros(hidden)) if not width else nnx.data(None)
        if width:
            self.first = nnx.Linear(width, hidden, rngs=rngs)
            self.norm = nnx.LayerNorm(hidden, rngs=rngs)
            self.second = nnx.Linear(hidden, hidden, rngs=rngs)
        self.hidden = hidden

    def __call__(self, rows: Array | None, cutoffs: Array) -> Array:
        """float32[rows, hidden].

        Args:
            rows: float32[rows, width], of `pack`; None for a table without columns, whose rows are all equal, and for
                one without rows.
            cutoffs: int[rows], seconds: what is known later is hidden.
        """
        if self.base is not None:
            return jnp.broadcast_to(self.base[...], (cutoffs.shape[0], self.hidden))
        if rows is None:
            return jnp.zeros((cutoffs.shape[0], self.hidden), jnp.float32)
        days, seconds = _divided(cutoffs)
        days = days + self.day
        parts = self._plain(rows, days, seconds)
        for place in self.plan.columns:
            if place.kind in ("category", "categories"):
                codes = rows[:, place.first : place.first + place.width]
                codes = jnp.where(_known(rows, place, days, seconds)[:, None], codes, -1).astype(jnp.int32)
                parts.append(_embedded(getattr(self, f"codes_{place.name}").embedding[...], codes, place.codes))
        h = self.norm(self.first(jnp.concatenate(parts, axis=1)))
        return nnx.relu(self.second(nnx.relu(h)))

    def _plain(self, rows: Array, days: Array, seconds: Array) -> list[Array]:
        """The encodings without embeddings."""
        parts = []
        if places := _of_kind(self.plan, "number"):
            x, missing = _columns(rows, places, days, seconds)
            parts += [self._numbers(x, missing, places), missing.astype(jnp.float32)]
        for place in _of_kind(self.plan, "time"):
            there = _known(rows, place, days, seconds) & ~jnp.isnan(rows[:, place.first])
            own = [jnp.where(there, rows[:, place.first + n], 0.0) for n in (0, 1)]
            found = _relative((own[0] - days) + (own[1] - seconds) / DAY) + _calendar(own[0], own[1], place.seasons)
            parts += [jnp.where(there[:, None], jnp.stack(found, axis=1), 0.0), (~there)[:, None].astype(jnp.float32)]
        for place in _of_kind(self.plan, "vector"):
            x = rows[:, place.first : place.first + place.width]
            there = (_known(rows, place, days, seconds) & ~jnp.isnan(x[:, 0]))[:, None]
            x = (x - np.asarray(place.mean, np.float32)) / np.asarray(place.deviation, np.float32)
            parts += [jnp.where(there, x, 0.0), (~there).astype(jnp.float32)]
        return parts

    def _numbers(self, x: Array, missing: Array, places: Sequence[ColumnPlace]) -> Array:
        mean = np.array([place.mean[0] for place in places], np.float32)
        z = jnp.where(missing, 0.0, (x - mean) / np.array([place.deviation[0] for place in places], np.float32))
        z = jnp.clip(z, -10.0, 10.0)
        if self.numbers == "periodic":
            assert self.frequencies is not None
            angle = 2 * np.pi * z[:, :, None] * self.frequencies[...]
            waves = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
            return jnp.concatenate([z, jnp.where(missing[..., None], 0.0, waves).reshape(len(x), -1)], axis=1)
        if self.numbers == "standard":
            return z
        low, high, column = _bins(places)
        if not len(column):
            return z
        share = jnp.clip((x[:, column] - low) / (high - low), 0.0, 1.0)
        return jnp.concatenate([z, jnp.where(missing[:, column], 0.0, share)], axis=1)


def embedding_width(codes: int) -> int:
    """The width of the vectors of categories: about the root of their number, from 4 to 32."""
    return int(np.clip(2 * np.ceil(np.sqrt(codes + 1) / 2) * 2, 4, 32))


class TablesEncoder(nnx.Module):
    """A `TableEncoder` for each table, called as the input projection of a model on blocks.

    Args:
        plans: by table.
        hidden, numbers, day, rngs: of `TableEncoder`.
    """

    def __init__(
        self, plans: Mapping[str, TablePlan], hidden: int, *, numbers: str, day: int = 0, rngs: nnx.Rngs
    ) -> None:
        self.tables = tuple(plans)
        for name, plan in plans.items():
            setattr(self, f"table_{name}", TableEncoder(plan, hidden, numbers=numbers, day=day, rngs=rngs))

    def __call__(self, rows: Mapping[str, Array], cutoffs: Mapping[str, Array]) -> dict[str, Array]:
        """float32[rows, hidden] by table, from packed rows and cutoffs by table."""
        return {name: getattr(self, f"table_{name}")(rows.get(name), cutoffs[name]) for name in self.tables}


def _of_kind(plan: TablePlan, kind: str) -> list[ColumnPlace]:
    return [place for place in plan.columns if place.kind == kind]


def _abstract(plan: TablePlan) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, plan.width), (1,), (1,)))


def _divided(times: Array) -> tuple[Array, Array]:
    """Whole days and seconds of the day, as float32."""
    days = times // DAY
    return days.astype(jnp.float32), (times - days * DAY).astype(jnp.float32)


def _known(rows: Array, place: ColumnPlace, days: Array, seconds: Array) -> Array:
    """Whether a column's value is known by the cutoff: bool[rows]."""
    if place.known is None:
        return jnp.ones(rows.shape[0], bool)
    day, second = rows[:, place.known], rows[:, place.known + 1]
    return (day < days) | ((day == days) & (second <= seconds))


def _columns(rows: Array, places: Sequence[ColumnPlace], days: Array, seconds: Array) -> tuple[Array, Array]:
    """Numbers of several columns, [rows, columns], 0 where missing or not known, and which are."""
    x = jnp.stack([rows[:, place.first] for place in places], axis=1)
    known = {place.known: _known(rows, place, days, seconds) for place in places}
    there = jnp.stack([known[place.known] for place in places], axis=1) & jnp.isfinite(x)
    return jnp.where(there, x, 0.0), ~there


def _bins(places: Sequence[ColumnPlace]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lower and upper ends of the bins of all columns, and the column of each."""
    low = [edge for place in places for edge in place.edges[:-1]]
    high = [edge for place in places for edge in place.edges[1:]]
    column = [number for number, place in enumerate(places) for _ in place.edges[1:]]
    return np.array(low, np.float32), np.array(high, np.float32), np.array(column, np.int32)


def _relative(days: Array) -> list[Array]:
    """A time relative to the cutoff, on several scales."""
    return [days / (jnp.abs(days) + scale) for scale in _SCALES] + [
        jnp.sign(days) * jnp.log1p(jnp.abs(days) * 24.0) / 4.0
    ]


def _calendar(days: Array, seconds: Array, seasons: bool) -> list[Array]:
    """Hour of the day, day of the week (1970 began on a Thursday), and day of the year, as angles."""
    turns = [seconds / DAY, 2 * seconds / DAY, (days + seconds / DAY) / 7.0 % 1.0]
    if seasons:
        turns.append((days + seconds / DAY) / 365.2425 % 1.0)
    angles = [2 * np.pi * turn for turn in turns]
    return [of(angle) for angle in angles for of in (jnp.sin, jnp.cos)]


def _embedded(table: Array, codes: Array, known: int) -> Array:
    """The sum of the vectors of codes, [rows, width]; codes that training rows did not have share the last vector."""
    there = codes >= 0
    codes = jnp.where(there, jnp.minimum(codes, known), -1)
    if table.shape[0] <= _MOST_ONE_HOT:
        counts = jax.nn.one_hot(codes, table.shape[0], dtype=table.dtype).sum(1)
        return counts @ table
    return jnp.where(there[..., None], table[codes], 0.0).sum(1)
