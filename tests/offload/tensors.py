"""Tensors that are stored in one program and fetched in another, and the size of a store's files."""

import functools
import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np

from dejax.offload.activations import calls

KIB, MIB = 1 << 10, 1 << 20
call_numbers = itertools.count(1 << 20, 1 << 10)


def on_disk(path) -> int:
    """Size of a store's files, by the file system."""
    places = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
    return sum(os.stat(place).st_blocks * 512 for place in places)


class Tensors:
    """Stores tensors of the given sizes in one program, and fetches them in reverse order in another."""

    def __init__(self, sizes):
        rngs = [np.random.default_rng(i) for i in range(len(sizes))]
        self.xs = [jnp.asarray(rng.integers(0, 255, n, np.uint8)) for rng, n in zip(rngs, sizes, strict=True)]
        sites = [next(call_numbers) for _ in sizes]

        def put(xs):
            handles = []
            for x, site in zip(xs, sites, strict=True):
                (x, _) = jax.lax.optimization_barrier((x, handles[-1:]))  # in this order
                handles.append(calls.store(x, binding=0, site=site, ring_bytes=0))
            return handles

        def fetch(handles):
            outs = []
            for handle, x, site in reversed(list(zip(handles, self.xs, sites, strict=True))):
                outs.append(calls.fetch(handle, x, outs[-1:], binding=0, site=site))
            return outs[::-1]

        self.put, self.fetch = jax.jit(put), jax.jit(fetch)

    def run(self):
        handles = jax.block_until_ready(self.put(self.xs))
        return self.check(handles)

    def check(self, handles):
        for got, want in zip(self.fetch(handles), self.xs, strict=True):
            np.testing.assert_array_equal(got, want)


@functools.cache
def tensors_of(*sizes):
    """Tensors that tests share, because their programs take longer to compile than to run. Each test has its store."""
    return Tensors(sizes)
