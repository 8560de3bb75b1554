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
    """The inner product of head and tail: sum_i h_i t_i. A score for graphs with one relation.

    Args:
        head: float[..., d].
        tail: float[..., d].

    Returns:
        float[...], the scores.
    """
    return (head * tail).sum(-1)


def distmult(head: Array, relation: Array, tail: Array) -> Array:
    """The DistMult score of triples (arXiv 1412.6575): sum_i h_i r_i t_i. It is symmetric in head and tail.

    Args:
        head: float[..., d].
        relation: float[..., d], the diagonal of the relation's matrix.
        tail: float[..., d].

    Returns:
        float[...], the scores.
    """
    return (head * relation * tail).sum(-1)


def complex_bilinear(head: Array, relation: Array, tail: Array) -> Array:
    """The ComplEx score of triples (arXiv 1606.06357): Re(sum_i h_i r_i conj(t_i)) for complex vectors.

    Args:
        head: float[..., 2 d]: d real parts, then d imaginary parts.
        relation: float[..., 2 d], in the same form.
        tail: float[..., 2 d], in the same form.

    Returns:
        float[...], the scores.

    >>> complex_bilinear(jnp.array([0.0, 1]), jnp.array([0.0, 1]), jnp.array([2.0, 0]))  # i * i * 2
    Array(-2., dtype=float32)
    """
    return (_complex_product(head, relation) * tail).sum(-1)


def rotate(head: Array, relation: Array, tail: Array, *, margin: float = 0.0) -> Array:
    """The RotatE score of triples (arXiv 1902.10197): margin - sum_i |h_i e^(i r_i) - t_i| for complex vectors h and t.

    Args:
        head: float[..., 2 d]: d real parts, then d imaginary parts.
        relation: float[..., d], the angles in radians by which the relation rotates the elements of the head.
        tail: float[..., 2 d], in the form of `head`.
        margin: the paper's gamma.

    Returns:
        float[...], the scores.

    >>> rotate(jnp.array([1.0, 0]), jnp.array([jnp.pi]), jnp.array([-1.0, 0])).round(3)
    Array(-0., dtype=float32)
    """
    return margin - _distance(_rotated(head, relation), tail)


@dataclasses.dataclass(frozen=True, slots=True)
class Decoder:
    """A scoring function for triples (head, relation, tail) in a form that scores all entities by one matrix product.

    It combines two parts of a triple into a query vector, and compares the query with candidates for the third part:
    `score(h, r, t) = similarity(query_tail(h, r), t) = similarity(query_head(t, r), h)`.

    Attributes:
        name: name of the decoder.
        query_tail: function `(heads, relations) -> float[..., k]`, the query vectors for tails.
        query_head: function `(tails, relations) -> float[..., k]`, the query vectors for heads.
        distance: whether the similarity is `margin` minus the distance of query and candidate; otherwise it is their
            inner product.
        pairs: whether vectors of entities are complex numbers: real parts, then imaginary parts.
        margin: the number from which a distance is subtracted, with `distance`.
        relation_width: function from the width of entity vectors to the width of relation vectors, 0 if there are none.

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
        """The scores, float[...], of heads, relations and tails, whose arrays are float[..., d]."""
        return self.similarity(self.query_tail(head, relation), tail)

    def similarity(self, query: Array, candidate: Array) -> Array:
        """The scores, float[...], of pairs of a query and a candidate, whose arrays are float[..., k]."""
        return self.margin - _distance(query, candidate) if self.distance else (query * candidate).sum(-1)

    def score_all(self, query: Array, candidates: Array) -> Array:
        """The score of each query float[n, k] with each candidate float[m, k]: float[n, m]. Computed without TF32."""
        if self.distance:
            return self.margin - _distance(query[:, None], candidates[None])
        return jnp.matmul(query, candidates.T, precision=jax.lax.Precision.HIGHEST)


def rotate_decoder(margin: float = 0.0) -> Decoder:
    """Makes a RotatE `Decoder` with a margin. Ranks do not depend on the margin.

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
    """Adds reciprocal relations to a decoder (Lacroix et al., arXiv 1806.07297).

    Each relation r gets a second relation r^-1, and the head of (?, r, t) is ranked as the tail of (t, r^-1, ?). A
    relation's vector is the vector of r followed by the vector of r^-1. The method `score` of the returned decoder
    scores (h, r, t) by the vector of r alone, that is, t as a tail.

    >>> import jax.numpy as jnp
    >>> from dejax.minibatch import DECODERS, link_ranks, reciprocal
    >>> entities, relations = jnp.array([[1.0, 0.0], [0.0, 1.0]]), jnp.array([[0.0, 0.0, 1.0, 1.0]])
    >>> link_ranks(reciprocal(DECODERS["distmult"]), entities, relations, entities, [[0, 0, 0]]).head
    array([1.])
    """

    def half(relation: Array | None, second: bool) -> Array | None:
        if relation is None:
            raise ValueError(
                f"reciprocal: `decoder` must have relations, got {decoder.name}, which has none; leave `reciprocal` out"
            )
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
"""The decoders by name: "dot", "distmult", "complex" and "rotate"."""


# -------------------------------------------------------------------------------------------- losses


def binary_cross_entropy(
    positive: Array, negative: Array, *, mask: Array | None = None, negative_mask: Array | None = None
) -> Array:
    """The binary cross-entropy of scores of true and false edges, as in R-GCN (arXiv 1703.06103).

        loss = mean over all scores of  -log s(positive)  and  -log(1 - s(negative)) ,    s(x) = 1 / (1 + e^-x)

    Args:
        positive: float[n], scores of true edges.
        negative: float[n, k], scores of k false edges (negatives) for each true edge; or any other shape.
        mask: bool[n], False for padding.
        negative_mask: bool of the shape of `negative`, False for padding; by default `mask` for each row.

    Returns:
        float[]; 0 if everything is padding.

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
    """The cross-entropy of choosing each true edge among its own negatives: mean of -log(e^p / (e^p + sum_j e^n_j)).

    Args:
        positive: float[n], scores p of true edges.
        negative: float[n, k], scores of k false edges (negatives) for each true edge.
        mask: bool[n], False for padding.
        negative_mask: bool[n, k], False for negatives that do not count.

    Returns:
        float[]; 0 if everything is padding.

    Raises:
        ValueError: `negative` has not the shape [n, k].
    """
    if negative.ndim != 2 or negative.shape[0] != positive.shape[0]:
        raise ValueError(f"softmax_cross_entropy: `negative` must be [{positive.shape[0]}, k], got {negative.shape}")
    if negative_mask is not None:
        negative = jnp.where(negative_mask, negative, -math.inf)
    each = jax.nn.logsumexp(jnp.concatenate([positive[:, None], negative], axis=1), axis=1) - positive
    if mask is None:
        return each.sum() / max(1, positive.shape[0])
    return jnp.where(mask, each, 0).sum() / jnp.maximum(mask.sum(), 1)
