"""Decoders and losses of link prediction: plain differentiable functions of embeddings.

A score is high for a triple (head, relation, tail) that is likely true. Leading axes broadcast, so that one relation or
one head meets many tails; the last axis has the elements.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array


def dot(head: Array, tail: Array) -> Array:
    """sum_i h_i t_i: the inner product, for one relation.

    Args:
        head: float[..., d].
        tail: float[..., d].

    Returns:
        float[...].
    """
    return (head * tail).sum(-1)


def distmult(head: Array, relation: Array, tail: Array) -> Array:
    """sum_i h_i r_i t_i (DistMult, arXiv 1412.6575). Head and tail have equal roles.

    Args:
        head: float[..., d].
        relation: float[..., d], the diagonal of the relation's matrix.
        tail: float[..., d].

    Returns:
        float[...].
    """
    return (head * relation * tail).sum(-1)


def complex_bilinear(head: Array, relation: Array, tail: Array) -> Array:
    """Re(sum_i h_i r_i conj(t_i)) (ComplEx, arXiv 1606.06357).

    Args:
        head: float[..., 2 d]: real parts, then imaginary parts.
        relation: float[..., 2 d], likewise.
        tail: float[..., 2 d], likewise.

    Returns:
        float[...].

    >>> complex_bilinear(jnp.array([0.0, 1]), jnp.array([0.0, 1]), jnp.array([2.0, 0]))  # i * i * 2
    Array(-2., dtype=float32)
    """
    return (_complex_product(head, relation) * tail).sum(-1)


def rotate(head: Array, relation: Array, tail: Array, *, margin: float = 0.0) -> Array:
    """margin - sum_i |h_i e^(i r_i) - t_i| (RotatE, arXiv 1902.10197): the relation rotates each complex element.

    Args:
        head: float[..., 2 d]: real parts, then imaginary parts.
        relation: float[..., d]: angles in radians.
        tail: float[..., 2 d], as `head`.
        margin: the paper's gamma.

    Returns:
        float[...].

    >>> rotate(jnp.array([1.0, 0]), jnp.array([jnp.pi]), jnp.array([-1.0, 0])).round(3)
    Array(-0., dtype=float32)
    """
    return margin - _distance(_rotated(head, relation), tail)


@dataclasses.dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder as a query and its similarity to candidates, so that one product scores all of them.

    `score(h, r, t) = similarity(query_tail(h, r), t) = similarity(query_head(t, r), h)`.

    Attributes:
        name: its name.
        query_tail: (heads, relations) -> float[..., k], what a true tail is like.
        query_head: (tails, relations) -> float[..., k], what a true head is like.
        distance: whether candidates are compared by distance, not by an inner product.
        pairs: whether an entity's vector holds complex numbers: real parts, then imaginary parts.
        margin: what a distance is subtracted from.
        relation_width: (width of entities) -> width of relations; 0 if there are none.

    >>> import jax.numpy as jnp
    >>> from dejax.minibatch import Decoder, link_ranks
    >>> weighted = Decoder("weighted", lambda h, r: h * r, lambda t, r: t * r, relation_width=lambda width: width)
    >>> entities, relations = jnp.array([[1.0, 0.0], [0.0, 1.0]]), jnp.array([[1.0, 2.0]])
    >>> link_ranks(weighted, entities, relations, entities, [[1, 0, 1]]).tail
    array([1.])
    """

    name: str
    query_tail: Callable[[Array, Array | None], Array]
    query_head: Callable[[Array, Array | None], Array]
    distance: bool = False
    pairs: bool = False
    margin: float = 0.0
    relation_width: Callable[[int], int] = lambda width: width

    def score(self, head: Array, relation: Array | None, tail: Array) -> Array:
        """The scores, float[...], of heads, relations and tails, which are float[..., d]."""
        return self.similarity(self.query_tail(head, relation), tail)

    def similarity(self, query: Array, candidate: Array) -> Array:
        """The scores, float[...], of queries and candidates, which are float[..., k]."""
        return self.margin - _distance(query, candidate) if self.distance else (query * candidate).sum(-1)

    def score_all(self, query: Array, candidates: Array) -> Array:
        """float[n, candidates] from queries float[n, k] and candidates float[candidates, k], without TF32."""
        if self.distance:
            return self.margin - _distance(query[:, None], candidates[None])
        return jnp.matmul(query, candidates.T, precision=jax.lax.Precision.HIGHEST)


def rotate_decoder(margin: float = 0.0) -> Decoder:
    """RotatE's decoder with a margin. Ranks do not depend on the margin.

    >>> import jax.numpy as jnp
    >>> from dejax.minibatch import link_ranks, rotate_decoder
    >>> entities, relations = jnp.array([[1.0, 0.0], [-1.0, 0.0]]), jnp.array([[jnp.pi]])
    >>> link_ranks(rotate_decoder(margin=9.0), entities, relations, entities, [[0, 0, 1]]).head
    array([1.])
    """
    return Decoder(
        "rotate", _rotated, _rotated_back, distance=True, pairs=True, margin=margin, relation_width=lambda w: w // 2
    )


def reciprocal(decoder: Decoder) -> Decoder:
    """A decoder whose relations have a second vector, by which heads are asked for (Lacroix et al., arXiv 1806.07297).

    A head of (?, r, t) is found as the tail of (t, r^-1, ?), where r^-1 is a relation of its own. A relation's vector
    is that of r, then that of r^-1. `score` is the score of the tail.

    >>> import jax.numpy as jnp
    >>> from dejax.minibatch import DECODERS, link_ranks, reciprocal
    >>> entities, relations = jnp.array([[1.0, 0.0], [0.0, 1.0]]), jnp.array([[0.0, 0.0, 1.0, 1.0]])
    >>> link_ranks(reciprocal(DECODERS["distmult"]), entities, relations, entities, [[0, 0, 0]]).head
    array([1.])
    """

    def half(relation: Array | None, second: bool) -> Array | None:
        if relation is None:
            raise ValueError(f"reciprocal: {decoder.name} has no relations, so there are no inverse ones; leave it out")
        width = relation.shape[-1] // 2
        return relation[..., width:] if second else relation[..., :width]

    return dataclasses.replace(
        decoder,
        name=f"reciprocal {decoder.name}",
        query_tail=lambda head, relation: decoder.query_tail(head, half(relation, False)),
        query_head=lambda tail, relation: decoder.query_tail(tail, half(relation, True)),
        relation_width=lambda width: 2 * decoder.relation_width(width),
    )


def _complex_product(x: Array, y: Array | None) -> Array:
    a, b, c, d = *_parts(x), *_parts(y)
    return jnp.concatenate([a * c - b * d, a * d + b * c], axis=-1)


def _conjugate_product(x: Array, y: Array | None) -> Array:
    """x conj(y): Re(h r conj(t)) = Re(h conj(t conj(r)))."""
    a, b, c, d = *_parts(x), *_parts(y)
    return jnp.concatenate([a * c + b * d, b * c - a * d], axis=-1)


def _rotated(x: Array, angles: Array | None) -> Array:
    assert angles is not None
    return _complex_product(x, jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1))


def _rotated_back(x: Array, angles: Array | None) -> Array:
    assert angles is not None
    return _rotated(x, -angles)


def _distance(x: Array, y: Array) -> Array:
    a, b = _parts(x - y)
    square = a * a + b * b
    there = square > 0  # The square root has no derivative at 0. Take 0 there, as for |x| of a real x.
    return jnp.where(there, jnp.sqrt(jnp.where(there, square, 1)), 0).sum(-1)


def _parts(x: Array | None) -> tuple[Array, Array]:
    assert x is not None
    if x.shape[-1] % 2:
        raise ValueError(
            f"complex embeddings must have an even width, real parts and then imaginary parts, got {x.shape[-1]}"
        )
    return x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]


def _times(x: Array, y: Array | None) -> Array:
    assert y is not None
    return x * y


DECODERS: dict[str, Decoder] = {
    "dot": Decoder("dot", lambda x, _: x, lambda x, _: x, relation_width=lambda _: 0),
    "distmult": Decoder("distmult", _times, _times),
    "complex": Decoder("complex", _complex_product, _conjugate_product, pairs=True),
    "rotate": rotate_decoder(),
}
"""Decoders by name: dot, distmult, complex, rotate."""


# -------------------------------------------------------------------------------------------- losses


def binary_cross_entropy(
    positive: Array, negative: Array, *, mask: Array | None = None, negative_mask: Array | None = None
) -> Array:
    """-mean(log s(positive), log(1 - s(negative))) over all scores, s(x) = 1 / (1 + e^-x) (R-GCN, arXiv 1703.06103).

    Args:
        positive: float[n], scores of true edges.
        negative: float[n, k] scores of k negatives for each, or of any shape.
        mask: bool[n], which edges count; padding does not.
        negative_mask: bool of `negative`'s shape; by default `mask` for each row.

    Returns:
        float[]; 0 if nothing counts.

    >>> import jax.numpy as jnp
    >>> from dejax.minibatch import binary_cross_entropy
    >>> binary_cross_entropy(jnp.array([20.0]), jnp.array([[-20.0, -20.0]])).round(3)  # all right, and sure
    Array(0., dtype=float32)
    """
    mask = jnp.ones(positive.shape, bool) if mask is None else mask
    if negative_mask is None:
        rows = negative.ndim and negative.shape[:1] == positive.shape
        per_row = mask.reshape(-1, *[1] * (negative.ndim - 1)) if rows else jnp.ones((), bool)
        negative_mask = jnp.broadcast_to(per_row, negative.shape)
    total = jnp.where(mask, jax.nn.softplus(-positive), 0).sum()
    total += jnp.where(negative_mask, jax.nn.softplus(negative), 0).sum()
    return total / jnp.maximum(mask.sum() + negative_mask.sum(), 1)


def softmax_cross_entropy(
    positive: Array, negative: Array, *, mask: Array | None = None, negative_mask: Array | None = None
) -> Array:
    """mean of -log(e^p / (e^p + sum_j e^n_j)): each true edge against its own negatives.

    Args:
        positive: float[n], scores of true edges.
        negative: float[n, k], scores of k negatives for each.
        mask: bool[n], which edges count; padding does not.
        negative_mask: bool[n, k], which negatives count.

    Returns:
        float[]; 0 if nothing counts.

    Raises:
        ValueError: negatives that are not [n, k].
    """
    if negative.ndim != 2 or negative.shape[0] != positive.shape[0]:
        raise ValueError(f"softmax_cross_entropy: `negative` must be [{positive.shape[0]}, k], got {negative.shape}")
    if negative_mask is not None:
        negative = jnp.where(negative_mask, negative, -math.inf)
    each = jax.nn.logsumexp(jnp.concatenate([positive[:, None], negative], axis=1), axis=1) - positive
    if mask is None:
        return each.sum() / max(1, positive.shape[0])
    return jnp.where(mask, each, 0).sum() / jnp.maximum(mask.sum(), 1)
