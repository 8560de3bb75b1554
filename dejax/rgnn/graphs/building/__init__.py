"""Builders of the tables of a graph, on the host and inside `jax.jit`, and the sorting that they do."""
