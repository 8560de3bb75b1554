"""Times as samplers compare them: `Clock` counts them from a day near the task's cutoffs, and every edge has one."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dejax.datasets import HeteroDataset
from dejax.minibatch import HeteroTopology
from dejax.minibatch.topology.hetero_topology import EdgeType

_LEAST, _MOST = np.iinfo(np.int32).min, np.iinfo(np.int32).max
DAY = 86_400
_LATEST = ", latest"


@dataclass(frozen=True, slots=True)
class Clock:
    """Times in seconds since 1970 (or in a unit of the user's) as int32, from 68 years before to 68 years after a day.

    Samples only compare times with cutoffs. So a time beyond that range, such as the year 9999 for "never", becomes the
    end of the range, and is as before later than all cutoffs, or earlier.

    Attributes:
        day: the day since 1970 from which times are counted; 0 if all cutoffs are within the range of 1970.
    """

    day: int = 0

    @classmethod
    def of(cls, cutoffs: np.ndarray, what: str) -> Clock:
        """A clock for some cutoffs.

        Raises:
            ValueError: cutoffs that are too far from each other.
        """
        if not len(cutoffs):
            return cls()
        least, most = int(cutoffs.min()), int(cutoffs.max())
        if _LEAST < least and most < _MOST:
            return cls()
        clock = cls((least + most) // 2 // DAY)
        if most - least >= _MOST - _LEAST - 2 * DAY:
            raise ValueError(
                f"{what} must be within 2**32 of each other, 136 years in seconds, got {least} and {most}; give times "
                "as dates, or numbers_since_1970 to from_tables if they are milliseconds or the like"
            )
        return clock

    def relative(self, times: Any) -> np.ndarray:
        """int32[...], times as this clock counts them."""
        origin, given = self.day * DAY, np.asarray(times)
        least, most = _LEAST + origin, _MOST + origin
        if given.dtype.kind == "f":  # cutoffs are whole: what is known at 2.5 is known from 3 on
            given = np.clip(np.ceil(given), least, most)
        return (np.clip(given.astype(np.int64), least, most) - origin).astype(np.int32)

    def cutoffs(self, times: Any) -> np.ndarray:
        """int32[...], cutoffs as this clock counts them.

        Raises:
            ValueError: a cutoff beyond its range, or with a fraction.
        """
        given, found = np.asarray(times), self.relative(times)
        if given.dtype.kind == "f" and (given != np.rint(given)).any():
            raise ValueError(
                f"cutoffs must be whole numbers, got {given[given != np.rint(given)][0]}; give the data's times in a "
                "smaller unit"
            )
        ends = np.isin(found, (_LEAST, _MOST))
        if ends.any():
            raise ValueError(
                f"cutoffs must be within 68 years of the task's cutoffs, got {given[ends][0]}; choose another time"
            )
        return found


def with_a_relation(edges: Any, tables: Iterable[str]) -> Any:
    """The edges by relation; where there are none, a relation without edges, so that samples have times."""
    first = next(iter(tables))
    none = np.zeros(0, np.int32)
    return edges or {(first, "itself", first): (none, none)}


def topology_in_time(
    data: HeteroDataset, clock: Clock, *, latest: bool | Collection[EdgeType], on_host: bool
) -> HeteroTopology:
    """The edges, all with times: those of relations without have that of what was always known.

    So each seed has a neighbourhood of its own, with its cutoff, and all relations share one list. With `latest`, each
    relation with several edges of a row is there once more, by the name "NAME, latest": a model takes a mean over the
    latest rows, and without that the one before the cutoff, such as the hour's weather, would be lost in it. In place
    of True stand the relations of that name that a trained model has.
    """
    edges = with_a_relation(data.edges, data.num_nodes)
    known = {
        relation: clock.relative(data.edge_times.get(relation, np.full(len(ends[0]), -(2**63))))
        for relation, ends in edges.items()
    }
    topology = HeteroTopology.from_edges(edges, data.num_nodes, times=known, on_host=on_host, keep_edge_ids=False)
    again = [
        dataclasses.replace(relation, edge_type=(source, name + _LATEST, target))
        for relation in topology.relations
        for source, name, target in [relation.edge_type]
        if (relation.max_degree > 1 if latest is True else (source, name + _LATEST, target) in (latest or ()))
    ]
    return dataclasses.replace(topology, relations=(*topology.relations, *again))


def is_latest(relation: tuple[str, str, str]) -> bool:
    """Whether a relation of a topology is one of `topology_in_time` for the latest edges of another."""
    return relation[1].endswith(_LATEST)
