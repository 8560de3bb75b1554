"""`Clock`: times of a data set as the int32 that samplers compare, counted from a day near the task's cutoffs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

_LEAST, _MOST = np.iinfo(np.int32).min, np.iinfo(np.int32).max
_DAY = 86_400


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
        clock = cls((least + most) // 2 // _DAY)
        if most - least >= _MOST - _LEAST - 2 * _DAY:
            raise ValueError(
                f"{what} must be within 2**32 of each other, 136 years in seconds, got {least} and {most}; give times "
                "as dates, or numbers_since_1970 to from_tables if they are milliseconds or the like"
            )
        return clock

    def relative(self, times: Any) -> np.ndarray:
        """int32[...], times as this clock counts them."""
        origin = self.day * _DAY
        return (np.clip(np.asarray(times, np.int64), _LEAST + origin, _MOST + origin) - origin).astype(np.int32)

    def cutoffs(self, times: Any) -> np.ndarray:
        """int32[...], cutoffs as this clock counts them.

        Raises:
            ValueError: a cutoff beyond its range.
        """
        given, found = np.asarray(times, np.int64), self.relative(times)
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
