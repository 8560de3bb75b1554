"""Integers of any width as int32."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

INT32_MAX = 2**31 - 1


def clipped_to_int32(ids: Any) -> Any:
    """Ids as int32: an id that does not fit becomes -1 or 2**31 - 1, so it stays out of range of fewer rows than that.

    A cast alone drops upper bits, and 2**32 would become 0.

    Args:
        ids: int[...], a jax or numpy array.
    """
    bounds = np.iinfo(ids.dtype)
    if bounds.max > INT32_MAX:
        clip = jnp.clip if isinstance(ids, jax.Array) else np.clip
        ids = clip(ids, max(bounds.min, -1), INT32_MAX)
    return ids.astype(np.int32)
