"""Makes the reference arrays next to this file with PyTorch Geometric, in float64.

Run by hand, with a CPU build of PyTorch (neither torch nor torch_geometric is needed by the tests):

    pip install torch==2.13.0 torch_geometric==2.8.1 numpy
    python tests/rgnn/data/make_pyg_arrays.py

One `.npz` for each layer, with keys `case/array`: the graph, `x`, `param_NAME` in the layout of `dejax.rgnn.library`,
the fixed `cotangent` c of the loss sum(c * out), `out`, `grad_x` and `grad_NAME`. What is written is PyTorch
Geometric's own result; only its parameters are renamed and transposed (the mapping is in the `*_case` functions). A
plain numpy evaluation of the papers' equations on the mapped parameters must agree with it, forward and in central
differences, before anything is written: that is what shows the mapping to be right.

How the parameters map (k inputs, n outputs, R edge types, T node types, H heads of d numbers, B bases or blocks):

RGCNConv
  weight [R, k, n]               weight       as it is
  weight [B, k, n], comp [R, B]  bases, coefficients
  weight [R, B, k/B, n/B]        blocks
  root [k, n], bias [n]          root, bias
  x=None: weight [R, N, n]       weight [pairs, n]: the row of pair (sender s, type t) is weight[t, s]
                                 (pairs that no edge uses have no row: nothing reads them, their gradient is zero)
  x=None: weight [B, N, n]       bases [N, B, n]: the first two axes swapped

RGATConv (additive self-attention, no mod)
  weight [R, k, H d]             weight [R, H, k, d]
  q [H d, H], k [H d, H]         attention_dst[r, h] = q[h d : (h + 1) d, h], attention_src the same of k, for every r.
    PyTorch Geometric shares q and k among the relations and lets a head see the features of the others; ours has a
    vector for each relation and head. So q and k are made block-diagonal here, and the gradients that can be compared
    are those of the diagonal blocks, which are the sums over the relations of ours: `grad_sum_attention_*` [H, d].

HGTConv
  kqv_lin.lins[t].weight [3 H d, k]   key, query, value [T, H, k, d] (rows in this order, transposed); biases [T, H, d]
  k_rel.weight[h R + r], v_rel        relation_attention, relation_message [R, H, d, d]
  p_rel[r] [1, H]                     prior [R, H]
  out_lin.lins[t].weight [n, H d]     out [T, H d, n] (transposed); bias: out_bias [T, n]
  skip[t] [1]                         skip [T] (only where k == n, as there)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch_geometric
from torch_geometric.nn import HGTConv, RGATConv, RGCNConv

HERE = Path(__file__).parent
Arrays = dict[str, np.ndarray]


# the graph: a long segment, duplicate edges, self loops, an empty relation, nodes without incoming or outgoing edges


def small_graph(rng: np.random.Generator, nodes: int, edges: int, types: int) -> Arrays:
    senders = rng.integers(0, nodes - 1, edges)
    receivers = rng.integers(1, nodes, edges)
    receivers[: edges // 3] = 3
    edge_type = rng.integers(0, types, edges)
    edge_type[edge_type == types // 2] = 0
    senders[-3:], receivers[-3:], edge_type[-3:] = senders[0], receivers[0], edge_type[0]
    senders[-4], receivers[-4] = 5, 5
    return {
        "senders": senders,
        "receivers": receivers,
        "edge_type": edge_type,
        "num_nodes": np.array(nodes),
        "num_edge_types": np.array(types),
    }


# the equations in numpy, on our parameters


def softmax_by_group(score: np.ndarray, group: np.ndarray) -> np.ndarray:
    out = np.empty_like(score)
    for g in np.unique(group):
        rows = group == g
        e = np.exp(score[rows] - score[rows].max(0))
        out[rows] = e / e.sum(0)
    return out


def sum_to(nodes: int, receivers: np.ndarray, message: np.ndarray) -> np.ndarray:
    out = np.zeros((nodes, *message.shape[1:]))
    np.add.at(out, receivers, message)
    return out


def relation_weight(p: Arrays) -> np.ndarray:
    """[R, k, n] from whichever parameters there are."""
    if "weight" in p:
        return p["weight"]
    if "coefficients" in p:
        return np.einsum("rb,bkn->rkn", p["coefficients"], p["bases"])
    r, b, k, n = p["blocks"].shape
    full = np.zeros((r, b * k, b * n))
    for i in range(b):
        full[:, i * k : (i + 1) * k, i * n : (i + 1) * n] = p["blocks"][:, i]
    return full


def rgcn(g: Arrays, x: np.ndarray | None, p: Arrays, normalization: str) -> np.ndarray:
    nodes, s, d, t = int(g["num_nodes"]), g["senders"], g["receivers"], g["edge_type"]
    if x is not None:
        message = np.einsum("ek,ekn->en", x[s], relation_weight(p)[t])
    elif "weight" in p:
        message = p["weight"][pair_of_edge(g)]
    else:
        message = np.einsum("eb,ebn->en", p["coefficients"][t], p["bases"][s])
    if normalization == "mean":
        key = d * int(g["num_edge_types"]) + t
        message = message / np.bincount(key, minlength=nodes * int(g["num_edge_types"]))[key][:, None]
    out = sum_to(nodes, d, message)
    if "root" in p:
        out = out + (p["root"] if x is None else x @ p["root"])
    return out + p["bias"] if "bias" in p else out


def pairs(g: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Types and senders of the unique (sender, type) pairs, sorted by (type, sender)."""
    unique = np.unique(g["edge_type"] * int(g["num_nodes"]) + g["senders"])
    return unique // int(g["num_nodes"]), unique % int(g["num_nodes"])


def pair_of_edge(g: Arrays) -> np.ndarray:
    return np.unique(g["edge_type"] * int(g["num_nodes"]) + g["senders"], return_inverse=True)[1]


def rgat(g: Arrays, x: np.ndarray, p: Arrays, softmax: str, concat: bool) -> np.ndarray:
    nodes, s, d, t = int(g["num_nodes"]), g["senders"], g["receivers"], g["edge_type"]
    z_src = np.einsum("ek,ehkd->ehd", x[s], p["weight"][t])
    z_dst = np.einsum("ek,ehkd->ehd", x[d], p["weight"][t])
    score = (z_src * p["attention_src"][t]).sum(-1) + (z_dst * p["attention_dst"][t]).sum(-1)
    score = np.where(score > 0, score, 0.2 * score)
    group = d if softmax == "dst" else d * int(g["num_edge_types"]) + t
    out = sum_to(nodes, d, softmax_by_group(score, group)[..., None] * z_src)
    out = out.reshape(nodes, -1) if concat else out.mean(1)
    return out + p["bias"] if "bias" in p else out


def gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1.0 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2.0)))


def hgt(g: Arrays, x: np.ndarray, p: Arrays) -> np.ndarray:
    nodes, s, d, t, kind = int(g["num_nodes"]), g["senders"], g["receivers"], g["edge_type"], g["node_type"]
    key, query, value = (
        np.einsum("vk,vhkd->vhd", x, p[n][kind]) + p[f"{n}_bias"][kind] for n in ("key", "query", "value")
    )
    attend = np.einsum("ehd,ehdf->ehf", key[s], p["relation_attention"][t])
    score = (attend * query[d]).sum(-1) * p["prior"][t] / math.sqrt(key.shape[-1])
    message = np.einsum("ehd,ehdf->ehf", value[s], p["relation_message"][t])
    total = gelu(sum_to(nodes, d, softmax_by_group(score, d)[..., None] * message).reshape(nodes, -1))
    out = np.einsum("vf,vfn->vn", total, p["out"][kind]) + p["out_bias"][kind]
    if "skip" not in p:
        return out
    gate = 1.0 / (1.0 + np.exp(-p["skip"][kind]))[:, None]
    return gate * out + (1.0 - gate) * x


# PyTorch Geometric, and the check of one against the other


def to_numpy(x: torch.Tensor | None) -> np.ndarray:
    assert x is not None
    return x.detach().numpy().copy()


def randomise(layer: torch.nn.Module, seed: int) -> None:
    """Every parameter is drawn anew, so that no bias is zero and no prior one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.6)


def check(name: str, run: Callable[[np.ndarray | None, Arrays], np.ndarray], case: Arrays) -> None:
    """Numpy's output and central differences agree with what PyTorch Geometric gave."""
    params = {k.removeprefix("param_"): v for k, v in case.items() if k.startswith("param_")}
    x = case.get("x")
    np.testing.assert_allclose(run(x, params), case["out"], rtol=1e-10, atol=1e-10, err_msg=name)

    def loss(x: np.ndarray | None, params: Arrays) -> float:
        return float((case["cotangent"] * run(x, params)).sum())

    def differences(array: np.ndarray, evaluate: Callable[[np.ndarray], float]) -> np.ndarray:
        grad, step = np.empty_like(array), 1e-5
        for i in np.ndindex(array.shape):
            up, down = array.copy(), array.copy()
            up[i] += step
            down[i] -= step
            grad[i] = (evaluate(up) - evaluate(down)) / (2 * step)
        return grad

    if x is not None:
        np.testing.assert_allclose(
            differences(x, lambda a: loss(a, params)), case["grad_x"], rtol=1e-5, atol=1e-7, err_msg=name
        )
    for key, value in params.items():
        grad = differences(value, lambda a, key=key: loss(x, params | {key: a}))
        want = case.get(f"grad_{key}")
        if want is None:
            want, grad = case[f"grad_sum_{key}"], grad.sum(0)
        np.testing.assert_allclose(grad, want, rtol=1e-5, atol=1e-7, err_msg=f"{name} {key}")
    print(f"  {name}: agrees ({len(params)} parameters, largest output {np.abs(case['out']).max():.3g})")


def backward(out: torch.Tensor, seed: int) -> np.ndarray:
    cotangent = np.random.default_rng(seed).normal(size=tuple(out.shape))
    (out * torch.from_numpy(cotangent)).sum().backward()
    return cotangent


def rgcn_case(g: Arrays, x: np.ndarray | None, n: int, normalization: str, seed: int, **options: object) -> Arrays:
    nodes, types = int(g["num_nodes"]), int(g["num_edge_types"])
    aggr = {"mean": "mean", "sum": "add"}[normalization]
    layer = RGCNConv(nodes if x is None else x.shape[1], n, types, aggr=aggr, **options)  # type: ignore[arg-type]
    randomise(layer, seed)
    xt = None if x is None else torch.from_numpy(x.copy()).requires_grad_()
    out = layer(xt, torch.from_numpy(np.stack([g["senders"], g["receivers"]])), torch.from_numpy(g["edge_type"]))
    case = {"cotangent": backward(out, seed), "out": to_numpy(out)}
    if xt is not None:
        case |= {"x": to_numpy(xt), "grad_x": to_numpy(xt.grad)}
    for kind, of in (("param", lambda p: p), ("grad", lambda p: p.grad)):
        weight = to_numpy(of(layer.weight))
        if layer.num_bases is not None:
            case[f"{kind}_bases"] = weight if x is not None else weight.swapaxes(0, 1).copy()
            case[f"{kind}_coefficients"] = to_numpy(of(layer.comp))
        elif layer.num_blocks is not None:
            case[f"{kind}_blocks"] = weight
        else:
            case[f"{kind}_weight"] = weight if x is not None else weight[pairs(g)]
        for name in ("root", "bias"):
            if getattr(layer, name) is not None:
                case[f"{kind}_{name}"] = to_numpy(of(getattr(layer, name)))
    return case


def rgat_case(g: Arrays, x: np.ndarray, d: int, heads: int, softmax: str, concat: bool, seed: int) -> Arrays:
    types, k = int(g["num_edge_types"]), x.shape[1]
    mechanism = {"dst": "across-relation", "relation": "within-relation"}[softmax]
    layer = RGATConv(k, d, types, heads=heads, attention_mechanism=mechanism, concat=concat)
    randomise(layer, seed)
    diagonal = torch.block_diag(*[torch.ones(d, 1)] * heads)
    with torch.no_grad():
        layer.q *= diagonal
        layer.k *= diagonal
    xt = torch.from_numpy(x.copy()).requires_grad_()
    out = layer(xt, torch.from_numpy(np.stack([g["senders"], g["receivers"]])), torch.from_numpy(g["edge_type"]))
    case = {"cotangent": backward(out, seed), "out": to_numpy(out), "x": to_numpy(xt), "grad_x": to_numpy(xt.grad)}

    def vectors(a: torch.Tensor | None) -> np.ndarray:
        return np.stack([to_numpy(a)[h * d : (h + 1) * d, h] for h in range(heads)])

    for kind, of in (("param", lambda p: p), ("grad", lambda p: p.grad)):
        case[f"{kind}_weight"] = to_numpy(of(layer.weight)).reshape(types, k, heads, d).transpose(0, 2, 1, 3).copy()
        case[f"{kind}_bias"] = to_numpy(of(layer.bias))
    for name, parameter in (("attention_src", layer.k), ("attention_dst", layer.q)):
        case[f"param_{name}"] = np.repeat(vectors(parameter)[None], types, 0)
        case[f"grad_sum_{name}"] = vectors(parameter.grad)
    return case


NODE_TYPES = ["author", "paper"]
RELATIONS = [("author", "writes", "paper"), ("paper", "cites", "paper"), ("paper", "written_by", "author")]


def hgt_case(g: Arrays, x: np.ndarray, n: int, heads: int, seed: int) -> Arrays:
    first = int((g["node_type"] == 0).sum())
    spans = {"author": slice(0, first), "paper": slice(first, int(g["num_nodes"]))}
    k, d, types = x.shape[1], n // heads, len(RELATIONS)
    layer = HGTConv(k, n, (NODE_TYPES, RELATIONS), heads=heads)
    randomise(layer, seed)
    inputs = {t: torch.from_numpy(x[spans[t]].copy()).requires_grad_() for t in NODE_TYPES}
    edges = {}
    for i, (source, relation, target) in enumerate(RELATIONS):
        rows = g["edge_type"] == i
        local = np.stack([g["senders"][rows] - spans[source].start, g["receivers"][rows] - spans[target].start])
        edges[source, relation, target] = torch.from_numpy(local)
    result = layer(inputs, edges)
    out = torch.cat([result[t] for t in NODE_TYPES])
    case = {
        "cotangent": backward(out, seed),
        "out": to_numpy(out),
        "x": x,
        "grad_x": np.concatenate([to_numpy(inputs[t].grad) for t in NODE_TYPES]),
    }
    for kind, of in (("param", lambda p: p), ("grad", lambda p: p.grad)):
        kqv = [layer.kqv_lin.lins[t] for t in NODE_TYPES]
        for i, name in enumerate(("key", "query", "value")):
            rows = slice(i * n, (i + 1) * n)
            weights = [to_numpy(of(lin.weight))[rows].T.reshape(k, heads, d).transpose(1, 0, 2) for lin in kqv]
            case[f"{kind}_{name}"] = np.stack(weights)
            case[f"{kind}_{name}_bias"] = np.stack([to_numpy(of(lin.bias))[rows].reshape(heads, d) for lin in kqv])
        for name, lin in (("relation_attention", layer.k_rel), ("relation_message", layer.v_rel)):
            case[f"{kind}_{name}"] = to_numpy(of(lin.weight)).reshape(heads, types, d, d).swapaxes(0, 1).copy()
        case[f"{kind}_prior"] = np.concatenate([to_numpy(of(layer.p_rel["__".join(r)])) for r in RELATIONS])
        case[f"{kind}_out"] = np.stack([to_numpy(of(layer.out_lin.lins[t].weight)).T for t in NODE_TYPES])
        case[f"{kind}_out_bias"] = np.stack([to_numpy(of(layer.out_lin.lins[t].bias)) for t in NODE_TYPES])
        if k == n:
            case[f"{kind}_skip"] = np.concatenate([to_numpy(of(layer.skip[t])) for t in NODE_TYPES])
    return case


def hgt_graph(rng: np.random.Generator) -> Arrays:
    """5 authors, then 8 papers; node 4 and node 12 receive nothing."""
    first, nodes = 5, 13
    ranges = {"author": (0, first), "paper": (first, nodes)}
    senders, receivers, edge_type = [], [], []
    for i, (source, _, target) in enumerate(RELATIONS):
        count = (9, 14, 7)[i]
        senders.append(rng.integers(*ranges[source], count))
        receivers.append(rng.integers(ranges[target][0], ranges[target][1] - 1, count))
        edge_type.append(np.full(count, i))
    order = rng.permutation(30)
    graph = {"senders": senders, "receivers": receivers, "edge_type": edge_type}
    graph = {key: np.concatenate(value)[order] for key, value in graph.items()}
    node_type = (np.arange(nodes) >= first).astype(np.int64)
    return graph | {
        "node_type": node_type,
        "num_nodes": np.array(nodes),
        "num_edge_types": np.array(len(RELATIONS)),
        "num_node_types": np.array(len(NODE_TYPES)),
    }


def write(layer: str, cases: dict[str, Arrays]) -> None:
    flat = {f"{name}/{key}": value for name, case in cases.items() for key, value in case.items()}
    path = HERE / f"pyg_{layer}.npz"
    np.savez_compressed(path, **flat)
    print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB, {len(cases)} cases")


def main() -> None:
    torch.set_default_dtype(torch.float64)
    rng = np.random.default_rng(2024)
    print(f"torch {torch.__version__}, torch_geometric {torch_geometric.__version__}")
    g = small_graph(rng, nodes=11, edges=36, types=4)
    x = rng.normal(size=(11, 6))

    cases = {}
    for normalization in ("mean", "sum"):
        for variant, given, options in (
            ("full", x, {}),
            ("bare", x, {"root_weight": False, "bias": False}),
            ("bases", x, {"num_bases": 3}),
            ("blocks", x, {"num_blocks": 2}),
            ("featureless", None, {}),
            ("featureless_bases", None, {"num_bases": 2}),
        ):
            name = f"{normalization}_{variant}"
            case = rgcn_case(g, given, 4, normalization, seed=len(cases), **options)
            check(name, lambda a, p, m=normalization: rgcn(g, a, p, m), case)
            cases[name] = g | case
    write("rgcn", cases)

    cases = {}
    for softmax in ("dst", "relation"):
        for heads, concat in ((1, True), (3, True), (2, False)):
            name = f"{softmax}_{heads}_{'concat' if concat else 'mean'}"
            case = rgat_case(g, x, 4, heads, softmax, concat, seed=len(cases))
            check(name, lambda a, p, m=softmax, c=concat: rgat(g, a, p, m, c), case)
            cases[name] = g | case
    write("rgat", cases)

    cases = {}
    g = hgt_graph(rng)
    for name, k in (("skip", 6), ("plain", 5)):
        case = hgt_case(g, rng.normal(size=(13, k)), 6, 2, seed=len(cases))
        check(name, lambda a, p: hgt(g, a, p), case)
        cases[name] = g | case
    write("hgt", cases)


if __name__ == "__main__":
    main()
