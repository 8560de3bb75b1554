"""Byte order of numpy arrays: jax takes those of this machine alone."""

from __future__ import annotations

from typing import Any

import numpy as np


def native_order(array: Any) -> Any:
    """A numpy array in this machine's byte order; other values unchanged."""
    if isinstance(array, np.ndarray | np.generic) and not array.dtype.isnative:
        return np.asarray(array, array.dtype.newbyteorder("="))
    return array
