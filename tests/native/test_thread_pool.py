"""The threads of the CPU handlers."""

import os
import subprocess
import sys


def test_number_of_threads_can_be_set_and_several_gather_rows() -> None:
    # More than three ranges of native/tables/table_gather.cc, of rows that fill none of them.
    code = (
        "import numpy as np; from dejax import _native as n; from dejax.host_gather import HostTable\n"
        "rows = np.arange(17 << 12, dtype=np.int32).reshape(-1, 17)\n"
        "ids = np.random.default_rng(0).integers(0, len(rows), 7_001, np.int32)\n"
        "np.testing.assert_array_equal(HostTable.from_numpy(rows)[ids], rows[ids]); print(n.num_threads())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "DEJAX_NUM_THREADS": "3", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert ran.stdout.strip() == "3", ran.stderr
