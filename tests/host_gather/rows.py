"""Rows of a table, ids some of which are out of range, and the ids of rows that lie on the device."""

import numpy as np

ROWS = np.random.default_rng(0).standard_normal((50, 6)).astype(np.float32)
IDS = np.array([4, 17, 4, -1, 50, 3, 0])
HOT = [4, 0, 49, 17]
