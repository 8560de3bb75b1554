"""`Topology`: lists of any integer dtype, on the host or the device, weights in either form, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.host_gather import CachedTable, HostTable, Topology, sample_neighbors

neighbors = jax.jit(sample_neighbors, static_argnames=("fan_out", "replace"))


def test_starts_of_2_31_edges_need_64_bits() -> None:
    starts, senders = np.array([0, 2**31]), np.broadcast_to(np.int32(0), 2**31)
    for on_host in (False, True):
        with pytest.raises(ValueError, match=r"`starts` of 2\*\*31 or more.*64-bit mode"):
            Topology.from_csc(starts, senders, num_nodes=1, on_host=on_host)
    wide = HostTable.from_numpy(np.array([0, 1, 2]))
    with pytest.raises(ValueError, match="64-bit mode"):
        Topology.from_csc(wide, np.array([0, 1], np.int32), num_nodes=2)
    with pytest.raises(ValueError, match="`num_nodes` must be from 0 to"):
        Topology.from_csc(starts, senders, num_nodes=2**31)
    with jax.enable_x64(True):
        made = Topology.from_csc(np.array([0, 1, 2]), np.array([1, 0]), num_nodes=2)
        big = Topology(jnp.asarray([0, 1, 2], jnp.int64), made.senders, None, 2)
        got = neighbors(jax.random.key(0), big, jnp.array([1, 0]), fan_out=1)
        assert got.senders.tolist() == [[0], [1]] and got.edges.dtype == jnp.int64


@pytest.mark.parametrize("dtype", ["int16", "uint16", "uint8", "int64", "uint64", ">i4", ">u2"])
@pytest.mark.parametrize("on_host", [False, True])
def test_lists_of_any_integers(dtype: str, on_host: bool) -> None:
    starts, senders = np.array([0, 2, 2, 5]).astype(dtype), np.array([1, 2, 0, 1, 2]).astype(dtype)
    made = Topology.from_csc(starts, senders, num_nodes=3, on_host=on_host)
    got = neighbors(jax.random.key(0), made, np.array([2, 1, 0]), fan_out=3)
    assert [sorted(row) for row in got.senders.tolist()] == [[0, 1, 2], [-1, -1, -1], [-1, 1, 2]]
    if dtype in ("int16", "uint16", "uint8"):
        placed = Topology(HostTable.from_numpy(starts), HostTable.from_numpy(senders), None, 3)
        again = neighbors(jax.random.key(0), placed, np.array([2, 1, 0]), fan_out=3)
        np.testing.assert_array_equal(again.senders, got.senders)


def test_lists_of_floats_are_refused() -> None:
    with pytest.raises(TypeError, match="`starts` must be integers, got float64"):
        Topology.from_csc(np.array([0.0, 1.0]), np.array([0]), num_nodes=1)
    with pytest.raises(TypeError, match="`senders` must be integers, got float64"):
        Topology.from_csc(np.array([0, 1]), np.array([0.5]), num_nodes=1)


def test_lists_in_cached_tables() -> None:
    starts, senders = np.array([0, 2, 5], np.int32), np.array([1, 0, 0, 1, 1], np.int32)
    lists = [CachedTable.from_ids(HostTable.from_numpy(x), [1]) for x in (starts, senders)]
    weights = CachedTable.from_ids(HostTable.from_numpy(np.ones(5, np.float32)), [0])
    for given in (None, weights):
        topology = Topology.from_csc(*lists, weights=given, num_nodes=2)
        got = sample_neighbors(jax.random.key(0), topology, np.array([0, 1]), 3, max_degree=3)
        assert [sorted(row) for row in got.senders.tolist()] == [[-1, 0, 1], [0, 1, 1]]


def test_running_sums_in_place_of_weights() -> None:
    starts, weights = np.array([0, 3, 3, 5]), np.array([1.0, 0.0, 3.0, 2.0, 2.0])
    sums = np.array([1, 1, 4, 2, 4], np.float32)
    by_sums = Topology.from_csc(starts, np.array([0, 1, 2, 0, 1]), sums, num_nodes=3)
    by_weights = Topology.from_csc(starts, np.array([0, 1, 2, 0, 1]), weights=weights, num_nodes=3)
    jax.tree.map(np.testing.assert_array_equal, by_sums, by_weights)
    on_host = Topology.from_csc(starts, np.array([0, 1, 2, 0, 1]), HostTable.from_numpy(sums), num_nodes=3)
    jax.tree.map(np.testing.assert_array_equal, on_host, by_weights)


def test_bad_weights_are_refused() -> None:
    for wrong in ([1.0], [1.0, -1.0], [1.0, np.nan], [np.inf, 1.0]):
        with pytest.raises(ValueError, match="finite and not negative, one for each edge"):
            Topology.from_csc([0, 2], [0, 0], weights=wrong, num_nodes=1)
    with pytest.raises(ValueError, match="not both"):
        Topology.from_csc([0, 1], [0], [1.0], weights=[1.0], num_nodes=1)
    with pytest.raises(TypeError, match="must be concrete: make the topology outside of jitted functions"):
        jax.jit(lambda w: Topology.from_csc([0, 1], [0], weights=w, num_nodes=1).starts)(jnp.ones(1))
