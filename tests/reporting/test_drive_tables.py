"""What a report says of tables on a drive."""

import jax
import numpy as np

import dejax
from dejax.host_gather import CachedTable
from tests.host_gather.rows import IDS, ROWS, on_drive


def test_rows_by_place_and_waits() -> None:
    table = CachedTable.from_ids(on_drive(ROWS, 5), [4])
    page = dejax.report(jax.jit(lambda table, ids: table[ids].sum()), table, np.resize(IDS, 70), calls=1)
    (moved,) = [each for each in page.traffic if each.direction == "from disk"]
    assert "50 rows of a table on a drive: 20 from the device" in moved.what and "did not come from" in moved.note
    assert "rows of tables on a drive" in page.waits and "from the drive" in str(page)
    (cache,) = [leaf for leaf in page.leaves if "cache of a drive" in leaf.path]
    assert cache.nbytes == 5 * 24 and cache.on_host
