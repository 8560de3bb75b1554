"""Energies and forces of molecules: radial weights by edge times gathered features, summed in one kernel.

    python examples/segment_molecule.py

The message step of continuous-filter networks (SchNet, arXiv 1706.08566): atom i receives the sum over its neighbours j
of W(|r_i - r_j|) * x_j, where W is a small network of the distance with one weight for each feature. As
`jax.ops.segment_sum(w * x[senders], receivers)` it stores an array of edges by features for the product, and its
gradients more of them. `segment.gather_segment_sum(x, senders, receivers, atoms, w)` reads, multiplies and adds.
Forces are the gradient by positions, and training needs the gradient of that: operators have derivatives of every
order. The neighbours are fixed here, so that their plan is made once.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dejax import segment

Parameters = dict[str, jax.Array]
CUTOFF = 3.0
RADIAL = 16


def molecules(count: int, atoms: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Positions, senders and receivers of atoms nearer than the cutoff, and the molecule of each atom."""
    rng = np.random.default_rng(seed)
    corners = np.stack(np.meshgrid(*[np.arange(atoms)] * 3), -1).reshape(-1, 3) * 1.2
    places = [corners[rng.choice(len(corners), atoms, replace=False)] for _ in range(count)]
    positions = (np.concatenate(places) + rng.normal(0, 0.1, (count * atoms, 3))).astype(np.float32)
    owner = np.repeat(np.arange(count), atoms)
    distance = np.linalg.norm(positions[:, None] - positions[None], axis=-1)
    near = (distance < CUTOFF) & (owner[:, None] == owner[None]) & ~np.eye(len(owner), dtype=bool)
    receivers, senders = np.nonzero(near)
    return positions, senders.astype(np.int32), receivers.astype(np.int32), owner


def distances(positions: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
    difference = segment.gather(positions, senders) - segment.gather(positions, receivers)
    return jnp.sqrt((difference**2).sum(-1))


def radial(distance: jax.Array) -> jax.Array:
    """Gaussians of the distance, [edges, RADIAL], 0 at the cutoff."""
    centers = jnp.linspace(0, CUTOFF, RADIAL)
    fade = 0.5 * (1 + jnp.cos(jnp.pi * distance / CUTOFF))
    return jnp.exp(-4 * (distance[:, None] - centers) ** 2) * fade[:, None]


def energies(
    parameters: Parameters, positions: jax.Array, edges: segment.EdgePlan, owner: jax.Array, count: int
) -> jax.Array:
    """The energy of each molecule, [count]."""
    basis = radial(distances(positions, edges.by_sender.ids, edges.by_receiver.ids))
    x = jnp.broadcast_to(parameters["atom"], (positions.shape[0], parameters["atom"].shape[0]))
    for layer in range(2):
        weights = jnp.tanh(basis @ parameters[f"filter{layer}"])
        messages = segment.gather_segment_sum(x, None, None, scale=weights, plan=edges)
        x = x + jax.nn.silu(messages @ parameters[f"mix{layer}"])
    return segment.segment_sum((x @ parameters["out"])[:, 0], owner, count, indices_are_sorted=True)


def initial(width: int, key: jax.Array) -> Parameters:
    keys = jax.random.split(key, 6)
    normal = jax.random.normal
    return {
        "atom": normal(keys[0], (width,)),
        "filter0": normal(keys[1], (RADIAL, width)) / 4,
        "filter1": normal(keys[2], (RADIAL, width)) / 4,
        "mix0": normal(keys[3], (width, width)) / width**0.5 / 4,
        "mix1": normal(keys[4], (width, width)) / width**0.5 / 4,
        "out": normal(keys[5], (width, 1)) / width**0.5 / 4,
    }


def true_energies(positions: jax.Array, edges: segment.EdgePlan, owner: jax.Array, count: int) -> jax.Array:
    """A Morse potential between neighbours, which fades out at the cutoff."""
    receivers = edges.by_receiver.ids
    distance = distances(positions, edges.by_sender.ids, receivers)
    pair = ((1 - jnp.exp(1.2 - distance)) ** 2 - 1) * 0.5 * (1 + jnp.cos(jnp.pi * distance / CUTOFF))
    return segment.segment_sum(pair / 2, owner[receivers], count)


def main(arguments: list[str] | None = None) -> tuple[float, float]:
    """Trains on energies and forces; gives the first and the last loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--molecules", type=int, default=16, help="molecules of a batch")
    parser.add_argument("--atoms", type=int, default=8, help="atoms of a molecule")
    parser.add_argument("--steps", type=int, default=200, help="training steps")
    parser.add_argument("--width", type=int, default=32, help="features of an atom")
    options = parser.parse_args(arguments)
    for name, value in vars(options).items():
        if isinstance(value, int) and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    count = options.molecules
    positions, senders, receivers, owner = (jnp.asarray(a) for a in molecules(count, options.atoms))
    edges = segment.edge_plan(senders, receivers, positions.shape[0])

    def total_and_forces(function: Any, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        def total(positions: jax.Array) -> tuple[jax.Array, jax.Array]:
            found = function(positions)
            return found.sum(), found

        gradient, found = jax.grad(total, has_aux=True)(positions)
        return found, -gradient

    target = total_and_forces(lambda p: true_energies(p, edges, owner, count), positions)
    parameters = initial(options.width, jax.random.key(0))
    optimizer = optax.adam(3e-3)

    def loss(parameters: Parameters, edges: segment.EdgePlan) -> jax.Array:
        found = total_and_forces(lambda p: energies(parameters, p, edges, owner, count), positions)
        return sum((jnp.mean((f - t) ** 2) for f, t in zip(found, target, strict=True)), jnp.float32(0))

    @jax.jit
    def step(parameters: Parameters, state: Any, edges: segment.EdgePlan) -> tuple[Any, ...]:
        value, gradient = jax.value_and_grad(loss)(parameters, edges)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(parameters, updates), state, value

    state, values = optimizer.init(parameters), []
    for number in range(options.steps):
        parameters, state, value = step(parameters, state, edges)
        values.append(float(value))
        if number % 50 == 0:
            print(f"step {number}: mean square error of energies and forces {value:.4f}")
    print(f"last: {values[-1]:.4f}")
    return values[0], values[-1]


if __name__ == "__main__":
    main()
