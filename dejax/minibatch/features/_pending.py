"""Features that were asked for, and come while the layers of another batch run."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from jax import Array

from dejax._pytrees import pytree
from dejax.host_gather import PendingRows, gather_done
from dejax.host_gather.pipeline import gather_done_joined
from dejax.minibatch.features._formats import times_scales
from dejax.minibatch.features._joined import JoinedFeatures, places
from dejax.minibatch.sampling._layout import SampleLayout
from dejax.minibatch.sampling.blocks import join_nodes


@pytree
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PendingFeatures:
    """A read of features that `FeatureStore.gather_start` began. Call its `gather_done` once, in the same program.

    >>> import jax, jax.numpy as jnp, numpy as np
    >>> from dejax.minibatch import FeatureStore
    >>> store = FeatureStore.from_arrays({"paper": np.arange(6, dtype=np.float32).reshape(3, 2)})
    >>> @jax.jit
    ... def step(store, ids):
    ...     pending = store.gather_start({"paper": ids})
    ...     return pending.gather_done()["paper"]  # what stands between runs while the rows come
    >>> step(store, jnp.array([2]))
    Array([[4., 5.]], dtype=float32)
    """

    rows: dict[str, PendingRows]
    column_scales: dict[str, Array | None]
    dtypes: tuple[tuple[str, np.dtype], ...] = dataclasses.field(metadata={"static": True})

    def gather_done(self, *, after: Any = None) -> Any:
        """Waits for the rows and returns them by node type; with `after`, a pair (rows, after).

        `after` is a pytree of the results of the overlapped computation, as in `dejax.host_gather.gather_done`.
        """
        done = {}
        for name, dtype in self.dtypes:
            rows = gather_done(self.rows[name], after=after)
            if after is not None:
                rows, after = rows
            done[name] = times_scales(rows, dtype, None, self.column_scales[name])
        return done if after is None else (done, after)

    def gather_done_joined(self, layout: SampleLayout, *, after: Any = None) -> Any:
        """Waits for the rows like `gather_done`, and returns them as JoinedFeatures."""
        kinds = {(some.shape[1:], some.dtype, some.there, some.of_drive is None) for some in self.rows.values()}
        if len(kinds) != 1 or any(scale is not None for scale in self.column_scales.values()):
            found = self.gather_done(after=after)
            rows, after = (found, None) if after is None else found
            joined = JoinedFeatures(join_nodes(layout, rows, layout.num_hops), layout)
            return joined if after is None else (joined, after)
        names = list(self.rows)
        pieces = [(names.index(name), first, count) for name, first, count in places(layout)]
        done = gather_done_joined([*self.rows.values()], pieces, after=after)
        rows, after = (done, None) if after is None else done
        joined = JoinedFeatures(rows, layout)
        return joined if after is None else (joined, after)
