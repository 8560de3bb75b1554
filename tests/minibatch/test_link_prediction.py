"""Decoders against complex arithmetic, losses against their formulas, ranks against a slow exact reference."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.minibatch import (
    DECODERS,
    LinkRanks,
    binary_cross_entropy,
    complex_bilinear,
    distmult,
    dot,
    link_ranks,
    reciprocal,
    rotate,
    rotate_decoder,
    softmax_cross_entropy,
)
from tests.cases import slow_but

RNG = np.random.default_rng(0)


def to_complex(x: np.ndarray) -> np.ndarray:
    half = x.shape[-1] // 2
    return x[..., :half].astype(np.float64) + 1j * x[..., half:].astype(np.float64)


REFERENCE = {
    "dot": lambda h, r, t: (h.astype(np.float64) * t).sum(-1),
    "distmult": lambda h, r, t: (h.astype(np.float64) * r * t).sum(-1),
    "complex": lambda h, r, t: (to_complex(h) * to_complex(r) * to_complex(t).conj()).real.sum(-1),
    "rotate": lambda h, r, t: -np.abs(to_complex(h) * np.exp(1j * r.astype(np.float64)) - to_complex(t)).sum(-1),
}
FUNCTIONS = {"dot": lambda h, r, t: dot(h, t), "distmult": distmult, "complex": complex_bilinear, "rotate": rotate}


def embeddings(name: str, heads: int, relations: int, tails: int, *, integers: bool = False):
    width = 6
    make = (lambda *shape: RNG.integers(-2, 3, shape)) if integers else (lambda *shape: RNG.standard_normal(shape))
    h, t = make(heads, width).astype(np.float32), make(tails, width).astype(np.float32)
    r = make(relations, DECODERS[name].relation_width(width) or 1).astype(np.float32)
    if integers and name == "rotate":  # without imaginary parts, so that moduli are integers: sums of roots would round
        h[:, width // 2 :], t[:, width // 2 :], r[:] = 0, 0, 0
    return h, r, t


@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name: str) -> None:
    h, r, t = embeddings(name, 5, 5, 5)
    want = REFERENCE[name](h, r, t)
    decoder = DECODERS[name]
    relation = None if name == "dot" else r
    np.testing.assert_allclose(FUNCTIONS[name](h, r, t), want, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(decoder.score(h, relation, t), want, rtol=2e-5, atol=2e-5)
    tails = decoder.score_all(decoder.query_tail(h, relation), jnp.asarray(t))
    heads = decoder.score_all(decoder.query_head(t, relation), jnp.asarray(h))
    np.testing.assert_allclose(np.diag(tails), want, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(np.diag(heads), want, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(tails, REFERENCE[name](h[:, None], r[:, None], t[None]), rtol=2e-5, atol=2e-5)
    if name != "dot":  # heads are asked for as tails of the inverse relation
        both = reciprocal(decoder)
        asked = both.score_all(both.query_head(t, jnp.concatenate([0 * r, r], axis=1)), jnp.asarray(h))
        np.testing.assert_allclose(np.diag(asked), REFERENCE[name](t, r, h), rtol=2e-5, atol=2e-5)
    # Leading axes broadcast.
    np.testing.assert_allclose(FUNCTIONS[name](h[:, None], r[:, None], t[None]), tails, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", DECODERS)
def test_gradients_of_decoders(name: str) -> None:
    h, r, t = embeddings(name, 3, 3, 3)
    found = jax.jit(jax.grad(lambda *xs: FUNCTIONS[name](*xs).sum(), argnums=(0, 1, 2)))(h, r, t)
    for k, x in enumerate((h, r, t)):
        direction = RNG.standard_normal(x.shape)
        moved = [[y.astype(np.float64) for y in (h, r, t)] for _ in range(2)]
        moved[0][k] += 1e-6 * direction
        moved[1][k] -= 1e-6 * direction
        slope = (REFERENCE[name](*moved[0]).sum() - REFERENCE[name](*moved[1]).sum()) / 2e-6
        np.testing.assert_allclose((np.asarray(found[k], np.float64) * direction).sum(), slope, rtol=1e-4, atol=1e-4)


def test_the_gradient_of_a_distance_of_zero_is_zero() -> None:
    x = jnp.array([1.0, 2.0, 0.5, -1.0])
    gradient = jax.jit(jax.grad(lambda h: rotate(h, jnp.zeros(2), x)))(x)
    np.testing.assert_array_equal(gradient, np.zeros(4))
    assert rotate(x, jnp.zeros(2), x, margin=3.0) == 3.0 and rotate_decoder(3.0).score(x, jnp.zeros(2), x) == 3.0
    with pytest.raises(ValueError, match="even width"):
        complex_bilinear(x[:3], x[:3], x[:3])


def test_losses() -> None:
    p, n = RNG.standard_normal(4) * 3, RNG.standard_normal((4, 3)) * 3
    mask, some = np.array([True, True, False, True]), RNG.random((4, 3)) < 0.6

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    all_terms = np.concatenate([-np.log(sigmoid(p)), -np.log(1 - sigmoid(n)).ravel()])
    np.testing.assert_allclose(binary_cross_entropy(jnp.asarray(p), jnp.asarray(n)), all_terms.mean(), rtol=1e-5)
    masked = np.concatenate([-np.log(sigmoid(p[mask])), -np.log(1 - sigmoid(n[mask])).ravel()])
    got = binary_cross_entropy(jnp.asarray(p), jnp.asarray(n), mask=jnp.asarray(mask))
    np.testing.assert_allclose(got, masked.mean(), rtol=1e-5)
    chosen = np.concatenate([-np.log(sigmoid(p[mask])), -np.log(1 - sigmoid(n[some]))])
    got = binary_cross_entropy(jnp.asarray(p), jnp.asarray(n), mask=jnp.asarray(mask), negative_mask=jnp.asarray(some))
    np.testing.assert_allclose(got, chosen.mean(), rtol=1e-5)
    flat = np.concatenate([-np.log(sigmoid(p)), -np.log(1 - sigmoid(n[:, 0])), -np.log(1 - sigmoid(n[:3, 1]))])
    got = binary_cross_entropy(jnp.asarray(p), jnp.asarray(np.concatenate([n[:, 0], n[:3, 1]])))
    np.testing.assert_allclose(got, flat.mean(), rtol=1e-5)

    each = [-np.log(np.exp(p[i]) / (np.exp(p[i]) + np.exp(n[i][some[i]]).sum())) for i in range(4)]
    got = softmax_cross_entropy(jnp.asarray(p), jnp.asarray(n), negative_mask=jnp.asarray(some))
    np.testing.assert_allclose(got, np.mean(each), rtol=1e-5)
    got = softmax_cross_entropy(jnp.asarray(p), jnp.asarray(n), mask=jnp.asarray(mask), negative_mask=jnp.asarray(some))
    np.testing.assert_allclose(got, np.mean(np.array(each)[mask]), rtol=1e-5)
    with pytest.raises(ValueError, match="must be .4, k."):
        softmax_cross_entropy(jnp.asarray(p), jnp.asarray(n[:3]))


@pytest.mark.parametrize("loss", [binary_cross_entropy, softmax_cross_entropy])
def test_losses_of_large_scores_and_nothing(loss) -> None:
    p, n = jnp.array([300.0, -300.0]), jnp.array([[-400.0], [500.0]])
    value, gradient = jax.jit(jax.value_and_grad(loss))(p, n)
    assert np.isfinite(value) and np.isfinite(gradient).all()
    none = jnp.zeros(2, bool)
    value, gradient = jax.jit(jax.value_and_grad(lambda p: loss(p, n, mask=none)))(p)
    assert value == 0 and not np.asarray(gradient).any()
    assert loss(jnp.zeros(0), jnp.zeros((0, 3))) == 0
    # An edge of which no negative counts is right by itself.
    got = softmax_cross_entropy(p, n, negative_mask=jnp.zeros((2, 1), bool))
    assert got == 0


def slow_ranks(name, h, r, t, triples, known, side):
    """Exact for integers: one triple after the other, one candidate after the other."""
    true = {tuple(row) for row in known}
    out = []
    for head, relation, tail in triples:
        candidates = range(len(t) if side == "tail" else len(h))
        score = {c: REFERENCE[name](*((h[head], r[relation], t[c]) if side == "tail" else (h[c], r[relation], t[tail])))
                 for c in candidates}  # fmt: skip
        own = tail if side == "tail" else head
        rank = 1.0
        for c in candidates:
            other = (head, relation, c) if side == "tail" else (c, relation, tail)
            if c != own and other not in true:
                rank += (score[c] > score[own]) + 0.5 * (score[c] == score[own])
        out.append(rank)
    return np.array(out)


@pytest.mark.parametrize(
    ("name", "batch_size"),
    slow_but([("rotate", 7)], itertools.product(DECODERS, (None, 1, 7))),
)
def test_filtered_ranks_are_exact(name: str, batch_size: int | None) -> None:
    relations = 1 if name == "dot" else 4
    h, r, t = embeddings(name, 11, relations, 9, integers=True)
    known = np.stack([RNG.integers(0, n, 120) for n in (11, relations, 9)], axis=1)
    triples = np.concatenate([known[:12], np.stack([RNG.integers(0, n, 6) for n in (11, relations, 9)], axis=1)])
    given = None if name == "dot" else r
    for true in (known, known[:0]):
        found = link_ranks(name, h, given, t, triples, known=true, batch_size=batch_size)
        for side in ("tail", "head"):
            want = slow_ranks(name, h, r, t, triples.tolist(), true.tolist(), side)
            np.testing.assert_array_equal(getattr(found, side), want)
    np.testing.assert_array_equal(link_ranks(name, h, given, t, triples).tail, found.tail)
    only = link_ranks(name, h, given, t, triples, known=known, sides=["head"])
    assert only.tail.size == 0 and only.ranks.size == len(triples)


def test_measures() -> None:
    ranks = LinkRanks(np.array([1.0, 2.5]), np.array([4.0]))
    assert ranks.mrr == pytest.approx((1 + 0.4 + 0.25) / 3) and ranks.mean_rank == 2.5
    assert [ranks.hits(k) for k in (1, 2, 3, 10)] == pytest.approx([1 / 3, 1 / 3, 2 / 3, 1])
    assert repr(ranks) == "LinkRanks(ranks=3, mrr=0.5500, hits@1=0.3333, hits@3=0.6667, hits@10=1.0000, mean_rank=2.5)"
    entities = np.ones((3, 2), np.float32)
    nothing = link_ranks("dot", entities, None, entities, [])
    assert np.isnan(nothing.mrr) and np.isnan(nothing.hits(1)) and np.isnan(nothing.mean_rank)


def test_ties_and_nan() -> None:
    entities = np.ones((5, 2), np.float32)
    assert link_ranks("dot", entities, None, entities, [[0, 0, 3]]).ranks.tolist() == [3, 3]
    entities[3] = np.nan
    assert link_ranks("dot", entities, None, entities, [[0, 0, 3]], sides=["tail"]).tail.tolist() == [5]
    # One NaN counts as better, three equal scores as half.
    assert link_ranks("dot", entities, None, entities, [[0, 0, 1]], sides=["tail"]).tail.tolist() == [3.5]


def test_equal_embeddings_tie_wherever_they_stand() -> None:
    """Products on a CPU add in another order in the last columns: with 4,097 equal entities the last one was apart."""
    entities = np.tile(RNG.standard_normal(64).astype(np.float32), (4097, 1))
    relations, triples = RNG.standard_normal((40, 64)).astype(np.float32), RNG.integers(0, [4097, 40, 4097], (40, 3))
    assert set(link_ranks("distmult", entities, relations, entities, triples, batch_size=5).ranks) == {2049}


def test_scores_of_embeddings_of_16_bits_are_float32() -> None:
    entities = RNG.standard_normal((300, 8)).astype(jnp.bfloat16)
    triples = RNG.integers(0, 300, (20, 3)) * [1, 0, 1]
    wide = entities.astype(np.float32)
    want = link_ranks("dot", wide, None, wide, triples)
    np.testing.assert_array_equal(link_ranks("dot", entities, None, entities, triples).ranks, want.ranks)


@pytest.mark.slow
def test_a_planted_structure_is_found_after_training() -> None:
    """DistMult on a symmetric block structure: most filtered test ranks are near the best after some steps."""
    groups, size = 6, 8
    pairs = [(i, j) for i in range(groups * size) for j in range(groups * size) if i != j and i // size == j // size]
    triples = np.array([(i, 0, j) for i, j in pairs])[RNG.permutation(len(pairs))]
    train, test = triples[:-60], triples[-60:]
    params = (jnp.asarray(RNG.standard_normal((groups * size, 16)), jnp.float32) * 0.3, jnp.ones((1, 16)))

    @jax.jit
    def step(params, key):
        def loss(params):
            entities, relations = params
            h, r, t = (jnp.asarray(train[:, k]) for k in range(3))
            corrupt = jax.random.randint(key, (len(train), 4), 0, len(entities))
            positive = distmult(entities[h], relations[r], entities[t])
            negative = distmult(entities[h][:, None], relations[r][:, None], entities[corrupt])
            return softmax_cross_entropy(positive, negative)

        return jax.tree.map(lambda x, g: x - 4.0 * g, params, jax.grad(loss)(params))

    before = link_ranks("distmult", params[0], params[1], params[0], test, known=triples)
    for k in range(100):
        params = step(params, jax.random.key(k))
    after = link_ranks("distmult", params[0], params[1], params[0], test, known=triples)
    # Rank 1 is often the node itself, whose own edge is no known triple.
    assert after.hits(3) > 0.9 and after.mrr > 2 * before.mrr


def test_progress(capsys) -> None:
    entities = np.ones((5, 2), np.float32)
    link_ranks("dot", entities, None, entities, [[0, 0, 3]] * 3, progress=True, batch_size=2)
    assert "rank links" in capsys.readouterr().err


BAD = {
    "`decoder` must be one of dot, distmult": {"decoder": "transe"},
    r"`relations` must be \[relations, 2\] for distmult, got None": {"relations": None},
    r"`relations` must be \[relations, 2\] for distmult, got \(2, 3\)": {"relations": np.ones((2, 3))},
    r"`relations` must be None for dot": {"decoder": "dot"},
    "of one width": {"tails": np.ones((4, 3))},
    "heads of `triples` must be from 0 to 4": {"triples": [[5, 0, 0]]},
    "relations of `triples` must be from 0 to 1": {"triples": [[0, 2, 0]]},
    "tails of `known` must be from 0 to 3": {"known": [[0, 0, 4]]},
    "`triples` must be integers": {"triples": [[0, 1]]},
    "`sides` must be": {"sides": ["tails"]},
    "`batch_size` must be at least 1": {"batch_size": 0},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(message: str) -> None:
    given = {"decoder": "distmult", "heads": np.ones((5, 2)), "relations": np.ones((2, 2)), "tails": np.ones((4, 2))}
    given |= {"triples": [[0, 0, 0]], **BAD[message]}
    with pytest.raises(ValueError, match=message):
        link_ranks(**given)
