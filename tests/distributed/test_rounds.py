"""The rounds of an exchange send every row once and little padding; cuts are the least."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dejax.distributed.full_graph._cut import least_cut
from dejax.distributed.full_graph._rounds import SLACK, num_slots, plan_rounds, slots_of_pair


@settings(max_examples=60)
@given(st.integers(1, 6), st.integers(0, 2**32 - 1), st.sampled_from([1.0, SLACK, 2.0]))
def test_rounds_hold_what_is_needed(parts: int, seed: int, slack: float) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 50, (parts, parts)) * rng.integers(0, 2, (parts, parts))
    np.fill_diagonal(rows, 0)
    rounds = plan_rounds(rows, slack)
    for p, q in itertools.product(range(parts), repeat=2):
        if p != q:
            assert slots_of_pair(rounds, p, q).shape[0] >= rows[p, q]
    for some in rounds:
        for side in zip(*some.pairs, strict=True):
            assert len(set(side)) == len(some.pairs)
    assert sum(some.rows_sent for some in rounds) <= slack * rows.sum()
    assert num_slots(rounds) == max((some.start + some.rows for some in rounds), default=0)


@settings(max_examples=60)
@given(st.integers(1, 7), st.integers(0, 2**32 - 1))
def test_the_cut_is_the_least(values: int, seed: int) -> None:
    """Against all sets of values."""
    rng = np.random.default_rng(seed)
    arguments = {i: [a for a in range(i) if rng.random() < 0.4] for i in range(values)}
    weights = {i: int(rng.integers(1, 9)) for i in range(values)}
    readers = [i for i in range(values) if rng.random() < 0.4] or [values - 1]

    def separates(chosen: tuple[int, ...]) -> bool:
        def known(i: int) -> bool:
            return i in chosen or (bool(arguments[i]) and all(map(known, arguments[i])))

        return all(map(known, readers))

    sets = itertools.chain.from_iterable(itertools.combinations(range(values), n) for n in range(values + 1))
    least = min(sum(weights[i] for i in some) for some in sets if separates(some))
    found = least_cut(arguments, weights, readers)
    assert separates(tuple(found)) and sum(weights[i] for i in found) == least
