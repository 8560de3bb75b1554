"""The deep relational example: the same losses with its layers' inputs off the device, in less memory."""

import numpy as np

from examples.rgnn_deep import main

SMALL = "--nodes 300 --edges 1500 --width 16 --layers 6 --steps 8".split()


def test_offloaded_layers_learn_the_same():
    far, near = main(SMALL), main([*SMALL, "--offload", "remat"])
    np.testing.assert_allclose(far["losses"], near["losses"], rtol=1e-4)
    assert far["losses"][-1] < far["losses"][0]
    assert far["stored_bytes"] == 8 * 6 * 300 * 16 * 4 and near["stored_bytes"] == 0
    assert far["temp_bytes"] < near["temp_bytes"]
