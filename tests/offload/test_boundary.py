"""The size of the device's ring."""

from dejax.offload.activations import boundary


def test_the_ring_is_no_larger_than_the_bus_needs():
    balance = boundary._FLOPS_PER_BYTE  # operations while the bus moves a byte
    k = 512
    one, several = [100 * k], [60 * k, 30 * k, 10 * k]
    assert boundary.ring_bytes(one, flops=balance * 100 * k) == 100 * k
    assert boundary.ring_bytes(one, flops=0) == 800 * k
    assert boundary.ring_bytes(several, flops=balance * 100 * k) == 100 * k  # a layer's worth
    assert boundary.ring_bytes(several, flops=0) == 8 * 100 * k // 3  # eight tensors of middle size
    assert boundary.ring_bytes([20 * k] * 5, flops=0) == 200 * k  # two layers' worth
    assert boundary.ring_bytes([k + 1], flops=float("inf")) == 2 * k  # a tensor of odd size fits
    assert boundary.ring_bytes([], flops=0) == 0
