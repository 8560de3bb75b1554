"""Scores of edges as triples (source, edge type, destination): DistMult, ComplEx, RotatE.

Each gives one score for each edge, in the user's order of edges. To score other triples than those that messages pass
along, make a graph of them.
"""

from __future__ import annotations

from typing import Any

from dejax.rgnn.compiler import functional as F
from dejax.rgnn.compiler.frontend import GraphSymbol, ProgramError, Symbol
from dejax.rgnn.compiler.program import program


@program
def distmult(g: GraphSymbol, x: Any, relation: Any) -> Symbol:
    """Scores triples by DistMult (Yang et al., arXiv 1412.6575).

    For an edge of type r from j to i the score is the sum over l of x_jl z_rl x_il.

    Args:
      g: the graph whose edges are the triples to score.
      x: [N, k] embeddings of the entities.
      relation: z, [R, k], embeddings of the edge types.

    Returns:
      [E], the score of each edge.

    >>> import jax.numpy as jnp
    >>> from dejax import rgnn
    >>> triples = rgnn.RelGraph.from_edges([0, 1], [1, 0], [0, 1], num_nodes=2)
    >>> rgnn.zoo.distmult(triples, jnp.array([[1.0], [2.0]]), jnp.array([[3.0], [5.0]]))  # 1 * 3 * 2, 2 * 5 * 1
    Array([ 6., 10.], dtype=float32)
    """
    return F.dot(g.src(x) * g.per_edge_type(relation), g.dst(x))


def _halves(x: Symbol, name: str) -> tuple[Symbol, Symbol]:
    if len(x.shape) != 1 or x.shape[0] % 2:
        raise ProgramError(f"{name} must have rows of an even width, real parts first, got feature shape {x.shape}")
    half = x.shape[0] // 2
    return x[:half], x[half:]


@program
def complex_(g: GraphSymbol, x: Any, relation: Any) -> Symbol:
    """Scores triples by ComplEx (Trouillon et al., arXiv 1606.06357, equation 9).

    For an edge of type r from j to i the score is Re(sum over l of x_jl z_rl conj(x_il)).

    Args:
      g: the graph whose edges are the triples to score.
      x: [N, 2 k] embeddings of the entities: k real parts, then k imaginary parts.
      relation: z, [R, 2 k], embeddings of the edge types: k real parts, then k imaginary parts.

    Returns:
      [E], the score of each edge.

    >>> import jax.numpy as jnp
    >>> from dejax import rgnn
    >>> triples = rgnn.RelGraph.from_edges([0], [1], [0], num_nodes=2)
    >>> rgnn.zoo.complex_(triples, jnp.array([[0.0, 1.0], [2.0, 0.0]]), jnp.array([[0.0, 1.0]]))  # Re(i * i * 2)
    Array([-2.], dtype=float32)
    """
    (a, b), (c, d) = _halves(g.node(x), "complex_: x"), _halves(g.per_edge_type(relation), "complex_: relation")
    real = g.src(a) * c - g.src(b) * d
    imaginary = g.src(a) * d + g.src(b) * c
    return F.dot(real, g.dst(a)) + F.dot(imaginary, g.dst(b))


@program
def rotate(g: GraphSymbol, x: Any, phase: Any, margin: float = 0.0) -> Symbol:
    """Scores triples by RotatE (Sun et al., arXiv 1902.10197).

    For an edge of type r from j to i the score is margin - sum over l of |x_jl exp(i phase_rl) - x_il|.

    Args:
      g: the graph whose edges are the triples to score.
      x: [N, 2 k] embeddings of the entities: k real parts, then k imaginary parts.
      phase: [R, k], a rotation for each edge type, in radians.
      margin: the paper's gamma.

    Returns:
      [E], the score of each edge. Where a modulus is 0, its gradient is 0.

    >>> import jax.numpy as jnp
    >>> from dejax import rgnn
    >>> triples = rgnn.RelGraph.from_edges([0], [1], [0], num_nodes=2)
    >>> x, phase = jnp.array([[1.0, 0.0], [2.0, 0.0]]), jnp.zeros((1, 1))  # no rotation: the distance of 1 and 2
    >>> rgnn.zoo.rotate(triples, x, phase, margin=9.0)
    Array([8.], dtype=float32)
    """
    a, b = _halves(g.node(x), "rotate: x")
    angle = g.per_edge_type(phase)
    c, d = F.cos(angle), F.sin(angle)
    real = g.src(a) * c - g.src(b) * d - g.dst(a)
    imaginary = g.src(a) * d + g.src(b) * c - g.dst(b)
    square = real * real + imaginary * imaginary
    apart = square > 0
    return margin - F.where(apart, F.sqrt(F.where(apart, square, 1.0)), 0.0).sum()
