"""Idioms that users of PyTorch Geometric, DGL and plain JAX write, and the same functions in the form by hand."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from dejax import rgnn
from dejax.rgnn import RelGraph

K, H = 64, 4
D = K // H
B = 4


@dataclass(frozen=True)
class Idiom:
    """Two ways of writing one function, and the shapes of its arrays; N, E and R stand for nodes, edges, edge types."""

    written: Any
    by_hand: Any
    arrays: str

    def shapes(self, g: RelGraph) -> list[tuple[int, ...]]:
        sides = {"N": g.num_nodes, "E": g.num_edges, "R": g.num_edge_types, "K": K, "H": H, "D": D, "B": B}
        return [eval(f"({shape},)", sides) for shape in re.findall(r"\[(.*?)\]", self.arrays)]


IDIOMS: dict[str, Idiom] = {}


def idiom(by_hand: Any, arrays: str) -> Any:
    def register(written: Any) -> Any:
        IDIOMS[written.__name__] = Idiom(rgnn.program(written), rgnn.program(by_hand), arrays)
        return written

    return register


def _message_by_hand(g: Any, x: Any, e: Any, w: Any, v: Any) -> Any:
    h, w = g.node(x), g.shared(w)
    m = rgnn.relu(g.src(h @ w[:K]) + g.dst(h @ w[K : 2 * K]) + g.edge(e) @ w[2 * K :])
    return g.sum_to_dst(m) @ g.shared(v)


@idiom(_message_by_hand, "x[N, K] e[E, 16] w[2*K+16, K] v[K, K]")
def message_of_a_concatenation(g: Any, x: Any, e: Any, w: Any, v: Any) -> Any:
    m = rgnn.relu(rgnn.concatenate([g.src(x), g.dst(x), g.edge(e)]) @ g.shared(w))
    return g.sum_to_dst(m @ g.shared(v))


def _typed_by_hand(g: Any, x: Any, w: Any) -> Any:
    w = g.per_edge_type(w)
    return g.sum_to_dst(g.src(x) @ w[:K] + g.dst(x) @ w[K:])


@idiom(_typed_by_hand, "x[N, K] w[R, 2*K, K]")
def typed_message_of_a_concatenation(g: Any, x: Any, w: Any) -> Any:
    return g.sum_to_dst(rgnn.concatenate([g.src(x), g.dst(x)]) @ g.per_edge_type(w))


def _score_by_hand(g: Any, x: Any, w: Any, a: Any) -> Any:
    z, a = g.node(x) @ g.shared(w), g.shared(a)
    score = g.dst(rgnn.dot(z, a[:K])) + g.src(rgnn.dot(z, a[K:]))
    return g.sum_to_dst(rgnn.edge_softmax(rgnn.leaky_relu(score)) * g.src(z))


@idiom(_score_by_hand, "x[N, K] w[K, K] a[2*K]")
def score_of_a_concatenation(g: Any, x: Any, w: Any, a: Any) -> Any:
    z = g.node(x) @ g.shared(w)
    score = rgnn.concatenate([g.dst(z), g.src(z)]) @ g.shared(a)
    return g.sum_to_dst(rgnn.edge_softmax(rgnn.leaky_relu(score)) * g.src(z))


@idiom(
    lambda g, x, e, w, b: g.sum_to_dst(g.src(x) * g.edge(e)) @ g.shared(w) + g.sum_to_dst(1.0) * g.shared(b),
    "x[N, K] e[E] w[K, K] b[K]",
)
def shared_product_of_messages(g: Any, x: Any, e: Any, w: Any, b: Any) -> Any:
    return g.sum_to_dst((g.src(x) * g.edge(e)) @ g.shared(w) + g.shared(b))


def _transformer(g: Any, query: Any, key: Any, value: Any) -> Any:
    attention = rgnn.edge_softmax(rgnn.dot(g.dst(query), g.src(key)))
    return g.sum_to_dst(attention[:, None] * g.src(value)).reshape(K)


def _transformer_by_hand(g: Any, x: Any, q: Any, k: Any, v: Any) -> Any:
    heads = [g.shared(w).reshape(K, H * (K // H)) for w in (q, k, v)]
    # Weights with heads, of the columns of each.
    stacked = [[w[:, i * K // H : (i + 1) * K // H][None] for i in range(H)] for w in heads]
    return _transformer(g, *(g.node(x) @ rgnn.concatenate(parts, axis=0) for parts in stacked))


@idiom(_transformer_by_hand, "x[N, K] q[K, K] k[K, K] v[K, K]")
def heads_by_reshape(g: Any, x: Any, q: Any, k: Any, v: Any) -> Any:
    return _transformer(g, *((g.node(x) @ g.shared(w)).reshape(H, K // H) for w in (q, k, v)))


def _turned(g: Any, x: Any, phase: Any) -> tuple[Any, Any, Any]:
    h, angle = g.node(x), g.per_edge_type(phase)
    a, b, c, d = h[: K // 2], h[K // 2 :], rgnn.cos(angle), rgnn.sin(angle)
    return h, g.src(a) * c - g.src(b) * d, g.src(a) * d + g.src(b) * c


def _rotation_by_hand(g: Any, x: Any, phase: Any) -> Any:
    h, real, imaginary = _turned(g, x, phase)
    real, imaginary = real - g.dst(h[: K // 2]), imaginary - g.dst(h[K // 2 :])
    return rgnn.sqrt((real * real + imaginary * imaginary).sum() + 1e-9)


@idiom(_rotation_by_hand, "x[N, K] phase[R, K//2]")
def rotation_of_a_concatenation(g: Any, x: Any, phase: Any) -> Any:
    h, real, imaginary = _turned(g, x, phase)
    apart = rgnn.concatenate([real, imaginary]) - g.dst(h)
    return rgnn.sqrt((apart * apart).sum() + 1e-9)


def cat(*values, axis=-1):
    return rgnn.concatenate(list(values), axis=axis)


@idiom(
    lambda g, x, e, c: (lambda s: g.sum_to_dst(s[0] * g.src(x) + s[1] * g.dst(x) + s[2] * g.edge(e)))(
        [g.shared(c)[i] for i in range(3)]
    ),
    "x[N, K] e[E, K] c[3]",
)
def stack_weighted(g, x, e, c):
    m = rgnn.stack([g.src(x), g.dst(x), g.edge(e)])
    return g.sum_to_dst((m * g.shared(c)[:, None]).sum(0))


@idiom(
    lambda g, x, e, c: (lambda s: g.sum_to_dst(s[0] * g.src(x) + s[1] * g.dst(x) + s[2] * g.edge(e)))(
        [g.shared(c)[i] for i in range(3)]
    ),
    "x[N, K] e[E, K] c[3]",
)
def stack_mean_last(g, x, e, c):
    m = rgnn.stack([g.src(x), g.dst(x), g.edge(e)], axis=-1)
    return g.sum_to_dst(m @ g.shared(c))


def att(g, q, k, v):
    a = rgnn.edge_softmax(rgnn.dot(g.dst(q), g.src(k)) * 0.25)
    return g.sum_to_dst(a[:, None] * g.src(v)).reshape(K)


def split_heads(w):
    return w.reshape(K, H, D)


def whead(g, w):
    w = g.shared(w)
    return cat(*[w[:, i * D : (i + 1) * D][None] for i in range(H)], axis=0)


def _qkv_hand(g, x, w):
    w = g.shared(w)
    ws = [w[:, i * K : (i + 1) * K] for i in range(3)]
    h = g.node(x)
    return att(g, *(h @ cat(*[u[:, i * D : (i + 1) * D][None] for i in range(H)], axis=0) for u in ws))


@idiom(_qkv_hand, "x[N, K] w[K, 3*K]")
def qkv_slices(g, x, w):
    y = g.node(x) @ g.shared(w)
    q, k, v = y[:K], y[K : 2 * K], y[2 * K :]
    return att(g, *(t.reshape(H, D) for t in (q, k, v)))


@idiom(_qkv_hand, "x[N, K] w[K, 3*K]")
def qkv_reshape(g, x, w):
    q, k, v = (g.node(x) @ g.shared(w)).reshape(3, H, D)
    return att(g, q, k, v)


def _kv_hand(g, x, q, w):
    w = g.per_edge_type(w)

    def hd(u):
        return cat(*[u[:, i * D : (i + 1) * D][None] for i in range(H)], axis=0)

    a = rgnn.edge_softmax(rgnn.dot(g.dst(g.node(x) @ hd(g.shared(q))), g.src(x) @ hd(w[:, :K])))
    return g.sum_to_dst(a[:, None] * (g.src(x) @ hd(w[:, K:]))).reshape(K)


@idiom(_kv_hand, "x[N, K] q[K, K] w[R, K, 2*K]")
def kv_typed_slices(g, x, q, w):
    kv = g.src(x) @ g.per_edge_type(w)
    k, v = kv[:K].reshape(H, D), kv[K:].reshape(H, D)
    a = rgnn.edge_softmax(rgnn.dot(g.dst((g.node(x) @ g.shared(q)).reshape(H, D)), k))
    return g.sum_to_dst(a[:, None] * v).reshape(K)


@idiom(
    lambda g, x, w, b: rgnn.relu(g.mean_to_dst(g.src(x) @ g.per_edge_type(w)) + g.mean_to_dst(g.per_edge_type(b))),
    "x[N, K] w[R, K, K] b[R, K]",
)
def typed_bias_mean(g, x, w, b):
    return rgnn.relu(g.mean_to_dst(g.src(x) @ g.per_edge_type(w) + g.per_edge_type(b)))


@idiom(
    lambda g, x, w, b: g.sum_to_dst(rgnn.relu(g.src(x) @ g.per_edge_type(w) + g.per_edge_type(b))),
    "x[N, K] w[R, K, K] b[R, K]",
)
def typed_bias_relu(g, x, w, b):
    return g.sum_to_dst(rgnn.relu(g.per_edge_type(b) + g.src(x) @ g.per_edge_type(w)))


@idiom(lambda g, x, w: g.mean_to_dst(g.src(x)) @ g.shared(w)[:K] + g.node(x) @ g.shared(w)[K:], "x[N, K] w[2*K, K]")
def sage_concat(g, x, w):
    return cat(g.mean_to_dst(g.src(x)), g.node(x)) @ g.shared(w)


def _gcn_hand(g, x, w):
    out, inn = g.sum_to_src(1.0), g.sum_to_dst(1.0)
    h = (g.node(x) @ g.shared(w)) * rgnn.rsqrt(rgnn.maximum(out, 1.0))
    return g.sum_to_dst(g.src(h)) * rgnn.rsqrt(rgnn.maximum(inn, 1.0))


@idiom(_gcn_hand, "x[N, K] w[K, K]")
def gcn_pow(g, x, w):
    d = g.node(1.0) if 0 else rgnn.maximum(g.sum_to_src(1.0), 1.0)
    e = rgnn.maximum(g.sum_to_dst(1.0), 1.0)
    n = g.src(d**-0.5) * g.dst(e**-0.5)
    return g.sum_to_dst(n * (g.src(x) @ g.shared(w)))


def sc(g, z, a):
    z = g.node(z)
    a = g.shared(a)
    return rgnn.leaky_relu(g.src(z @ a[:K]) + g.dst(z @ a[K:]))


def _softmax_hand(g, x, a):
    return g.sum_to_dst(rgnn.edge_softmax(sc(g, x, a)) * g.src(x))


@idiom(_softmax_hand, "x[N, K] a[2*K]")
def softmax_explicit(g, x, a):
    s = sc(g, x, a)
    p = rgnn.exp(s - g.dst(g.max_to_dst(s)))
    return g.sum_to_dst(p / g.dst(g.sum_to_dst(p)) * g.src(x))


@idiom(_softmax_hand, "x[N, K] a[2*K]")
def softmax_explicit_eps(g, x, a):
    s = sc(g, x, a)
    p = rgnn.exp(s - rgnn.stop_gradient(g.dst(g.max_to_dst(s))))
    return g.sum_to_dst(p / (g.dst(g.sum_to_dst(p)) + 1e-16) * g.src(x))


@idiom(_softmax_hand, "x[N, K] a[2*K]")
def softmax_no_max(g, x, a):
    p = rgnn.exp(sc(g, x, a))
    return g.sum_to_dst(p / g.dst(g.sum_to_dst(p)) * g.src(x))


@idiom(_softmax_hand, "x[N, K] a[2*K]")
def softmax_late_division(g, x, a):
    p = rgnn.exp(sc(g, x, a))
    return g.sum_to_dst(p * g.src(x)) / (g.sum_to_dst(p) + 1e-16)


def _heads_hand(g, x, q, k, v):
    return att(g, *(g.node(x) @ whead(g, w) for w in (q, k, v)))


@idiom(_heads_hand, "x[N, K] q[K, K] k[K, K] v[K, K]")
def qk_mul_sum(g, x, q, k, v):
    q, k, v = ((g.node(x) @ g.shared(w)).reshape(H, D) for w in (q, k, v))
    s = (g.dst(q) * g.src(k)).sum(-1) / 4.0
    a = rgnn.edge_softmax(s)
    return g.sum_to_dst((g.src(v) * a[:, None]).reshape(K))


@idiom(_heads_hand, "x[N, K] q[K, K] k[K, K] v[K, K]")
def heads_on_edges(g, x, q, k, v):
    q = (g.dst(x) @ g.shared(q)).reshape(H, D)
    k = (g.src(x) @ g.shared(k)).reshape(H, D)
    v = (g.src(x) @ g.shared(v)).reshape(H, D)
    s = (q * k).sum(-1, keepdims=True) * 0.25
    return g.sum_to_dst(rgnn.edge_softmax(s) * v).reshape(K)


@idiom(_heads_hand, "x[N, K] q[K, K] k[K, K] v[K, K]")
def heads_loop_slices(g, x, q, k, v):
    q, k, v = (g.node(x) @ g.shared(w) for w in (q, k, v))
    out = []
    for i in range(H):
        c = slice(i * D, (i + 1) * D)
        a = rgnn.edge_softmax(rgnn.dot(g.dst(q[c]), g.src(k[c])) * 0.25)
        out.append(g.sum_to_dst(a * g.src(v[c])))
    return cat(*out)


@idiom(
    lambda g, x, q, k, v: att(g, *(g.node(x) @ g.shared(w) for w in (q, k, v))),
    "x[N, K] q[H, K, D] k[H, K, D] v[H, K, D]",
)
def heads_loop_weights(g, x, q, k, v):
    q, k, v = (g.shared(w) for w in (q, k, v))
    out = []
    h = g.node(x)
    for i in range(H):
        a = rgnn.edge_softmax(rgnn.dot(g.dst(h @ q[i]), g.src(h @ k[i])) * 0.25)
        out.append(g.sum_to_dst(a * g.src(h @ v[i])))
    return cat(*out)


def _rgat_hand(g, x, w, a):
    z = g.src(x) @ g.per_edge_type(w)
    s = rgnn.leaky_relu(rgnn.dot(z, g.per_edge_type(a)))
    return g.sum_to_dst(rgnn.edge_softmax(s)[:, None] * z).reshape(K)


@idiom(_rgat_hand, "x[N, K] w[R, H, K, D] a[R, H, D]")
def rgat_heads_loop(g, x, w, a):
    w, a = g.per_edge_type(w), g.per_edge_type(a)
    out = []
    for i in range(H):
        z = g.src(x) @ w[i]
        s = rgnn.leaky_relu(rgnn.dot(z, a[i]))
        out.append(g.sum_to_dst(rgnn.edge_softmax(s) * z))
    return cat(*out)


@idiom(_rgat_hand, "x[N, K] w[R, H, K, D] a[R, H, D]")
def rgat_mul_sum(g, x, w, a):
    z = g.src(x) @ g.per_edge_type(w)
    s = rgnn.leaky_relu((z * g.per_edge_type(a)).sum(-1))
    return g.sum_to_dst(rgnn.edge_softmax(s)[:, None] * z).reshape(K)


@idiom(
    lambda g, x, r, w: g.sum_to_dst(g.src(x) @ g.per_edge_type(w) + g.per_edge_type(r) @ g.per_edge_type(w)),
    "x[N, K] r[R, K] w[R, K, K]",
)
def relation_added_then_typed(g, x, r, w):
    return g.sum_to_dst((g.src(x) + g.per_edge_type(r)) @ g.per_edge_type(w))


@idiom(
    lambda g, x, r, w: g.max_to_dst(g.src(g.node(x) @ g.shared(w)) + g.per_edge_type(r) @ g.shared(w)),
    "x[N, K] r[R, K] w[K, K]",
)
def compgcn_add_max(g, x, r, w):
    return g.max_to_dst((g.src(x) + g.per_edge_type(r)) @ g.shared(w))


@idiom(lambda g, x, r: rgnn.dot(g.src(x) * g.per_edge_type(r), g.dst(x)), "x[N, K] r[R, K]")
def distmult(g, x, r):
    return (g.src(x) * g.per_edge_type(r) * g.dst(x)).sum(-1)


@idiom(lambda g, x, r: rgnn.sqrt(rgnn.square(g.src(x) + g.per_edge_type(r) - g.dst(x)).sum() + 1e-9), "x[N, K] r[R, K]")
def transe(g, x, r):
    d = g.src(x) + (g.per_edge_type(r) - g.dst(x))
    return rgnn.sqrt((d**2).sum(-1) + 1e-9)


@idiom(
    lambda g, x, w: g.sum_to_dst(rgnn.relu(g.src(g.node(x) @ g.shared(w)) + g.dst(g.node(x) @ g.shared(w)))),
    "x[N, K] w[K, K]",
)
def shared_sum(g, x, w):
    return g.sum_to_dst(rgnn.relu((g.src(x) + g.dst(x)) @ g.shared(w)))


def _edgeconv(g, x, w):
    h, w = g.node(x), g.shared(w)
    return g.max_to_dst(rgnn.relu(g.dst(h @ (w[:K] - w[K:])) + g.src(h @ w[K:])))


def _basis(g, x, a, v):
    w = (g.per_edge_type(a) @ g.shared(v).reshape(B, K * K)).reshape(K, K)
    return g.sum_to_dst(g.src(x) @ w)


@idiom(_basis, "x[N, K] a[R, B] v[B, K, K]")
def basis_mul_sum(g, x, a, v):
    return g.sum_to_dst(g.src(x) @ (g.per_edge_type(a)[:, None, None] * g.shared(v)).sum(0))


@idiom(_basis, "x[N, K] a[R, B] v[B, K, K]")
def basis_of_messages(g, x, a, v):
    a, v = g.per_edge_type(a), g.shared(v)
    m = sum(a[b] * (g.src(x) @ v[b]) for b in range(B))
    return g.sum_to_dst(m)


@idiom(_basis, "x[N, K] a[R, B] v[B, K, K]")
def loop_over_relations(g, x, a, v):
    total = 0.0
    for b in range(B):
        total = total + g.sum_to_dst((g.src(x) @ g.shared(v)[b]) * g.per_edge_type(a)[b])
    return total


@idiom(_basis, "x[N, K] a[R, B] v[B, K, K]")
def basis_of_nodes(g, x, a, v):
    y = g.node(x) @ g.shared(v)
    return g.sum_to_dst((g.src(y) * g.per_edge_type(a)[:, None]).sum(0))


@idiom(_basis, "x[N, K] a[R, B] v[B, K, K]")
def basis_on_edges(g, x, a, v):
    return g.sum_to_dst((g.per_edge_type(a)[:, None] * (g.src(x) @ g.shared(v))).sum(0))


@idiom(lambda g, x, w: g.sum_to_dst(g.src(x).reshape(4, 16) @ g.per_edge_type(w)).reshape(K), "x[N, K] w[R, 4, 16, 16]")
def block_diagonal_loop(g, x, w):
    w = g.per_edge_type(w)
    x = g.src(x)
    return g.sum_to_dst(cat(*[x[16 * i : 16 * i + 16] @ w[i] for i in range(4)]))


def _gated(g, x, a, b, v):
    h = g.node(x)
    gate = rgnn.sigmoid(g.src(h @ g.shared(a)) + g.dst(h @ g.shared(b)))
    return g.sum_to_dst(gate * g.src(h @ g.shared(v))) / (g.sum_to_dst(gate) + 1e-6)


@idiom(_gated, "x[N, K] a[K, K] b[K, K] v[K, K]")
def gated_on_edges(g, x, a, b, v):
    gate = rgnn.sigmoid(g.src(x) @ g.shared(a) + g.dst(x) @ g.shared(b))
    eta = gate / (g.dst(g.sum_to_dst(gate)) + 1e-6)
    return g.sum_to_dst(eta * (g.src(x) @ g.shared(v)))


def _cg(g, x, e, f, s):
    h, f, s = g.node(x), g.shared(f), g.shared(s)

    def p(w):
        return g.dst(h @ w[:K]) + g.src(h @ w[K : 2 * K]) + g.edge(e) @ w[2 * K :]

    return g.sum_to_dst(rgnn.sigmoid(p(f)) * rgnn.softplus(p(s)))


@idiom(_cg, "x[N, K] e[E, 8] f[2*K+8, K] s[2*K+8, K]")
def cgcnn(g, x, e, f, s):
    z = cat(g.dst(x), g.src(x), g.edge(e))
    return g.sum_to_dst(rgnn.sigmoid(z @ g.shared(f)) * rgnn.softplus(z @ g.shared(s)))


def _glu(g, x, w):
    h, w = g.node(x), g.shared(w)
    a, b = (g.dst(h @ w[:K, c]) + g.src(h @ w[K:, c]) for c in (slice(0, K), slice(K, 2 * K)))
    return g.sum_to_dst(rgnn.sigmoid(a) * b)


@idiom(_glu, "x[N, K] w[2*K, 2*K]")
def glu(g, x, w):
    y = cat(g.dst(x), g.src(x)) @ g.shared(w)
    return g.sum_to_dst(rgnn.sigmoid(y[:K]) * y[K:])


@idiom(
    lambda g, x, e, w1, w2: g.sum_to_dst(rgnn.relu(g.edge(e) @ g.shared(w1))) @ g.shared(w2) + g.sum_to_dst(g.src(x)),
    "x[N, K] e[E, 8] w1[8, 16] w2[16, K]",
)
def edge_mlp_added(g, x, e, w1, w2):
    return g.sum_to_dst(g.src(x) + rgnn.relu(g.edge(e) @ g.shared(w1)) @ g.shared(w2))


@idiom(lambda g, x, e, w: g.sum_to_dst(g.src(x)) + g.sum_to_dst(g.edge(e)) @ g.shared(w), "x[N, K] e[E, 8] w[8, K]")
def gine_linear(g, x, e, w):
    return g.sum_to_dst(g.src(x) + g.edge(e) @ g.shared(w))


@idiom(
    lambda g, x, e, w, n: g.sum_to_dst(g.src(x) * g.edge(n)) + g.sum_to_dst(g.edge(e) * g.edge(n)) @ g.shared(w),
    "x[N, K] e[E, 8] w[8, K] n[E]",
)
def gine_linear_scaled(g, x, e, w, n):
    return g.sum_to_dst((g.src(x) + g.edge(e) @ g.shared(w)) * g.edge(n))


@idiom(
    lambda g, x, e, w: (
        g.sum_to_dst(g.src(x) @ g.per_edge_type(w)) + g.sum_to_dst(g.edge(e)) @ g.shared(jnp.ones((8, K), np.float32))
    ),
    "x[N, K] e[E, 8] w[R, K, K]",
)
def typed_plus_edge(g, x, e, w):
    return g.sum_to_dst(g.src(x) @ g.per_edge_type(w) + g.edge(e) @ g.shared(jnp.ones((8, K), np.float32)))


def ln(h):
    m = h.mean(keepdims=True)
    v = rgnn.square(h - m).mean(keepdims=True)
    return (h - m) * rgnn.rsqrt(v + 1e-5)


@idiom(lambda g, x, w: g.sum_to_dst(g.src(ln(g.node(x))) @ g.per_edge_type(w)), "x[N, K] w[R, K, K]")
def ln_on_edges(g, x, w):
    return g.sum_to_dst(ln(g.src(x)) @ g.per_edge_type(w))


@idiom(lambda g, x: g.sum_to_dst(g.src(ln(g.node(x)))), "x[N, K]")
def ln_on_edges_sum(g, x):
    return g.sum_to_dst(ln(g.src(x)))


@idiom(
    lambda g, x: (lambda u: g.sum_to_dst(rgnn.edge_softmax(rgnn.dot(g.src(u), g.dst(u))) * g.src(x)))(
        g.node(x) / rgnn.sqrt(rgnn.square(g.node(x)).sum(-1, keepdims=True) + 1e-9)
    ),
    "x[N, K]",
)
def cosine_on_edges(g, x):
    def n(v):
        return v / rgnn.sqrt((v * v).sum(-1, keepdims=True) + 1e-9)

    return g.sum_to_dst(rgnn.edge_softmax((n(g.src(x)) * n(g.dst(x))).sum(-1)) * g.src(x))


@idiom(
    lambda g, x, a: g.sum_to_dst(
        rgnn.edge_softmax(sc(g, x, a)) * g.src(g.node(x).astype(jnp.bfloat16)).astype(jnp.float32)
    ),
    "x[N, K] a[2*K]",
)
def cast_values(g, x, a):
    return g.sum_to_dst(rgnn.edge_softmax(sc(g, x, a)) * g.src(x).astype(jnp.bfloat16).astype(jnp.float32))


def _heads_T_hand(g, x, w):
    w = g.shared(w).reshape(K, D, H)
    return g.node(x) @ cat(*[w[:, :, i].reshape(1, K, D) for i in range(H)], axis=0)


@idiom(lambda g, x, q, k, v: att(g, *(_heads_T_hand(g, x, w) for w in (q, k, v))), "x[N, K] q[K, K] k[K, K] v[K, K]")
def heads_transposed(g, x, q, k, v):
    return att(g, *((g.node(x) @ g.shared(w)).reshape(D, H).T for w in (q, k, v)))


@idiom(lambda g, x, w, n: g.sum_to_dst(g.edge(n) * (g.src(x) @ g.per_edge_type(w))), "x[N, K] w[R, K, K] n[E]")
def scaled_before_typed(g, x, w, n):
    return g.sum_to_dst((g.edge(n) * g.src(x)) @ g.per_edge_type(w))


@idiom(lambda g, x, w, n: g.max_to_dst(g.edge(n) * g.src(g.node(x) @ g.shared(w))), "x[N, K] w[K, K] n[E]")
def scaled_before_shared_max(g, x, w, n):
    return g.max_to_dst((g.edge(n) * g.src(x)) @ g.shared(w))


@idiom(lambda g, x, w: g.sum_to_dst(rgnn.relu(g.src(g.node(x) @ g.shared(w)) / g.in_degree())), "x[N, K] w[K, K]")
def divided_before(g, x, w):
    return g.sum_to_dst(rgnn.relu((g.src(x) / g.in_degree()) @ g.shared(w)))


@idiom(
    lambda g, x, w, b: g.sum_to_dst(rgnn.sigmoid(g.per_edge_type(b)) * (g.src(x) @ g.per_edge_type(w))),
    "x[N, K] w[R, K, K] b[R]",
)
def gate_by_type(g, x, w, b):
    return g.sum_to_dst((rgnn.sigmoid(g.per_edge_type(b)) * g.src(x)) @ g.per_edge_type(w))


@idiom(
    lambda g, x, y, w: g.sum_to_dst(rgnn.relu(g.src(g.node(x) + g.node(y)) @ g.per_edge_type(w))),
    "x[N, K] y[N, K] w[R, K, K]",
)
def same_weight_twice(g, x, y, w):
    return g.sum_to_dst(rgnn.relu(g.src(x) @ g.per_edge_type(w) + g.src(y) @ g.per_edge_type(w)))


@idiom(
    lambda g, x, w, u: g.sum_to_dst(rgnn.relu(g.src(x) @ (g.per_edge_type(w) + g.shared(u)))),
    "x[N, K] w[R, K, K] u[K, K]",
)
def same_rows_twice(g, x, w, u):
    return g.sum_to_dst(rgnn.relu(g.src(x) @ g.per_edge_type(w) + g.src(x) @ g.shared(u)))


@idiom(
    lambda g, x, w, u: g.sum_to_dst(g.src(x) @ g.per_edge_type(w)) + g.sum_to_dst(g.src(x)) @ g.shared(u),
    "x[N, K] w[R, K, K] u[K, K]",
)
def typed_plus_shared(g, x, w, u):
    return g.sum_to_dst(g.src(x) @ g.per_edge_type(w) + g.src(x) @ g.shared(u))


@idiom(
    lambda g, x, w: (lambda m: g.sum_to_dst(rgnn.relu(m)) + g.max_to_dst(m))(g.src(x) @ g.per_edge_type(w)),
    "x[N, K] w[R, K, K]",
)
def shared_projection(g, x, w):
    return g.sum_to_dst(rgnn.relu(g.src(x) @ g.per_edge_type(w))) + g.max_to_dst(g.src(x) @ g.per_edge_type(w))


@idiom(
    lambda g, x, w, p: (lambda m: g.node(p) * g.max_to_dst(m) + (1 - g.node(p)) * g.mean_to_dst(m))(
        g.src(x) @ g.per_edge_type(w)
    ),
    "x[N, K] w[R, K, K] p[N]",
)
def max_mean_mixture(g, x, w, p):
    m = g.src(x) @ g.per_edge_type(w)
    p = g.node(p)
    return p * g.max_to_dst(m) + (1 - p) * g.sum_to_dst(m) / rgnn.maximum(g.sum_to_dst(1.0), 1.0)


def _film(g, x, w, f):
    f = g.per_edge_type(f)
    return g.sum_to_dst(rgnn.relu((g.dst(x) @ f[:, :K]) * (g.src(x) @ g.per_edge_type(w)) + g.dst(x) @ f[:, K:]))


@idiom(_film, "x[N, K] w[R, K, K] f[R, K, 2*K]")
def film(g, x, w, f):
    y = g.dst(x) @ g.per_edge_type(f)
    gamma, beta = y[:K], y[K:]
    return g.sum_to_dst(rgnn.relu(gamma * (g.src(x) @ g.per_edge_type(w)) + beta))


def _gru_hand(g, x, w, wi, wh):
    m = g.sum_to_dst(g.src(x) @ g.per_edge_type(w))
    h = g.node(x)
    wi, wh = g.shared(wi), g.shared(wh)
    i = [m @ wi[:, j * K : (j + 1) * K] for j in range(3)]
    q = [h @ wh[:, j * K : (j + 1) * K] for j in range(3)]
    r, z = rgnn.sigmoid(i[0] + q[0]), rgnn.sigmoid(i[1] + q[1])
    n = rgnn.tanh(i[2] + r * q[2])
    return (1 - z) * n + z * h


@idiom(_gru_hand, "x[N, K] w[R, K, K] wi[K, 3*K] wh[K, 3*K]")
def gru_slices(g, x, w, wi, wh):
    m = g.sum_to_dst(g.src(x) @ g.per_edge_type(w))
    h = g.node(x)
    i = m @ g.shared(wi)
    q = h @ g.shared(wh)
    r, z = rgnn.sigmoid(i[:K] + q[:K]), rgnn.sigmoid(i[K : 2 * K] + q[K : 2 * K])
    n = rgnn.tanh(i[2 * K :] + r * q[2 * K :])
    return (1 - z) * n + z * h


@idiom(
    lambda g, x, r: (lambda h: g.sum_to_dst(g.src(cat(h[1:], h[:1])) * g.per_edge_type(r)))(g.node(x)),
    "x[N, K] r[R, K]",
)
def roll_on_edges(g, x, r):
    m = g.src(x)
    return g.sum_to_dst(cat(m[1:], m[:1]) * g.per_edge_type(r))


def _rot_pairs_hand(g, x, p):
    h = g.node(x).reshape(K // 2, 2)
    re, im = h[:, 0], h[:, 1]
    c, s = rgnn.cos(g.per_edge_type(p)), rgnn.sin(g.per_edge_type(p))
    a = g.sum_to_dst(g.src(re) * c - g.src(im) * s)
    b = g.sum_to_dst(g.src(re) * s + g.src(im) * c)
    return cat(a[:, None], b[:, None], axis=1).reshape(K)


@idiom(_rot_pairs_hand, "x[N, K] p[R, K//2]")
def rotation_pairs(g, x, p):
    h = g.src(x).reshape(K // 2, 2)
    re, im = h[:, 0], h[:, 1]
    c, s = rgnn.cos(g.per_edge_type(p)), rgnn.sin(g.per_edge_type(p))
    return g.sum_to_dst(cat((re * c - im * s)[:, None], (re * s + im * c)[:, None], axis=1).reshape(K))


def _schnet(g, x, pos, mu, f1, f2, w):
    d = rgnn.sqrt(rgnn.square(g.src(pos) - g.dst(pos)).sum(-1, keepdims=True) + 1e-9)
    rbf = rgnn.exp(-10.0 * rgnn.square(d - g.shared(mu)))
    return g.sum_to_dst(g.src(g.node(x) @ g.shared(w)) * (rgnn.softplus(rbf @ g.shared(f1)) @ g.shared(f2)))


@idiom(
    lambda g, x, w1, b, w2, c: (lambda m: g.sum_to_dst(g.src(m)) @ g.shared(w2) + g.sum_to_dst(1.0) * g.shared(c))(
        rgnn.relu(g.node(x) @ g.shared(w1) + g.shared(b))
    ),
    "x[N, K] w1[K, K] b[K] w2[K, K] c[K]",
)
def message_mlp(g, x, w1, b, w2, c):
    m = rgnn.relu(g.src(x) @ g.shared(w1) + g.shared(b)) @ g.shared(w2) + g.shared(c)
    return g.sum_to_dst(m)


@idiom(
    lambda g, x, w, n: g.sum_to_dst((g.src(x) @ g.per_edge_type(w)) * g.edge(n)[:, None]).reshape(K),
    "x[N, K] w[R, H, K, D] n[E, H]",
)
def heads_scalar_broadcast(g, x, w, n):
    m = g.src(x) @ g.per_edge_type(w)
    return cat(*[g.sum_to_dst(m[i] * g.edge(n)[i]) for i in range(H)])


@idiom(
    lambda g, x, w, n: g.sum_to_dst((g.src(x) @ g.per_edge_type(w)) * g.edge(n)[:, None]).reshape(K),
    "x[N, K] w[R, H, K, D] n[E, H]",
)
def heads_scalar_flat(g, x, w, n):
    m = (g.src(x) @ g.per_edge_type(w)) * g.edge(n)[:, None]
    return g.sum_to_dst(m.reshape(K))


@idiom(
    lambda g, x: (lambda h: 0.9 * g.mean_to_dst(g.src(h)) + 0.1 * g.node(x))(
        0.9 * g.mean_to_dst(g.src(x)) + 0.1 * g.node(x)
    ),
    "x[N, K]",
)
def appnp(g, x):
    h = g.node(x)
    for _ in range(2):
        h = g.sum_to_dst(0.9 * g.src(h) / g.in_degree()) + 0.1 * g.node(x)
    return h


# Idioms whose two forms the canonical passes make one program, by the pass that does.
WAYS = {
    "cse": ["shared_projection"],
    "plain_forms": ["softmax_explicit", "softmax_explicit_eps", "distmult", "rgat_mul_sum", "heads_scalar_flat"],
    "stack_heads": ["rgat_heads_loop", "block_diagonal_loop", "heads_scalar_broadcast"],
    "slice_weights": ["film", "gru_slices"],
    "split_products": ["typed_message_of_a_concatenation", "sage_concat"],
    "split_rows": ["rotation_of_a_concatenation"],
    "scale_products": ["gate_by_type"],
    "combine_products": ["same_rows_twice"],
}
