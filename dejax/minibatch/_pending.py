"""Features that were asked for, and come while the layers of another batch run."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax.host_gather import PendingRows, gather_done


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PendingFeatures:
    """A gather that `FeatureStore.gather_start` began; `gather_done` takes the rows, once, in the same program.

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

    rows: dict[str, PendingRows | Array]
    column_scales: dict[str, Array | None]
    dtypes: tuple[tuple[str, np.dtype], ...] = dataclasses.field(metadata={"static": True})

    def gather_done(self, *, after: Any = None) -> Any:
        """The rows by type; with `after`, (rows, after): see `dejax.host_gather.gather_done`."""
        done = {}
        for name, dtype in self.dtypes:
            started = self.rows[name]
            if isinstance(started, Array):
                done[name] = started
                continue
            rows = gather_done(started, after=after)
            if after is not None:
                rows, after = rows
            scale = self.column_scales[name]
            done[name] = rows if scale is None else (rows.astype(jnp.float32) * scale).astype(dtype)
        return done if after is None else (done, after)
