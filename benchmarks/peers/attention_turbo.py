"""Attention by turbo-gnn (arXiv 2605.31500), for `attention.py`: one line of JSON for each case.

    python benchmarks/peers/attention_turbo.py '{"cases": [...], "seconds": 0.2}'

It needs turbo-gnn, built from its sources against the torch that is installed. Its autotuning chooses the launch of the
forward pass and the split by degree, as its users would switch it on; backward has its defaults.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import turbo_gnn

from benchmarks.attention_inputs import edges_of, rows_of
from benchmarks.clock import rounds

AUTOTUNE = turbo_gnn.AutotuneConfig(warmup=3, iters=10)


def graph_of(nodes: int, edges: int) -> Any:
    senders, receivers = (torch.from_numpy(x.astype(np.int64)) for x in edges_of(nodes, edges))
    graph = turbo_gnn.AdjacencyForwardBackwardWithNodeBuckets
    index = torch.stack((senders, receivers)).cuda()
    return graph.from_edge_list(index, num_nodes=nodes, index_dtype=torch.int32, is_directed=True).to("cuda")


def call_of(model: str, graph: Any, rows: dict[str, torch.Tensor]) -> Any:
    how = {"autotune": True, "autotune_config": AUTOTUNE}
    if model == "gatv2":
        weights = rows["attention"]
        return lambda: turbo_gnn.gatv2_aggr(
            graph, rows["destination"], x_neighbors=rows["source"], attention_weights=weights, negative_slope=0.2, **how
        )
    scale = rows["key"].shape[-1] ** -0.5
    return lambda: turbo_gnn.graph_transformer_aggr(
        # It calls Q what is read at sources.
        graph,
        rows["key"],
        Q=rows["key"],
        K=rows["query"],
        V=rows["value"],
        scale=scale,
        **how,
    )


def measure(case: dict[str, Any], graph: Any, seconds: float) -> dict[str, Any]:
    arrays = rows_of(case["model"], case["nodes"], case["heads"], case["width"])
    rows = {name: torch.from_numpy(x).cuda() for name, x in arrays.items()}
    forward = call_of(case["model"], graph, rows)
    begin = time.perf_counter()
    with torch.no_grad():
        first = forward()
        tuned = time.perf_counter() - begin
        found = {"forward": _ms(forward, seconds)}
    for x in rows.values():
        x.requires_grad_(True)
    ones = torch.ones_like(first)

    def training() -> Any:
        return torch.autograd.grad(forward(), list(rows.values()), ones)

    found["training"] = _ms(training, seconds)
    sample = first.reshape(case["nodes"], case["heads"], case["width"])[:: max(1, case["nodes"] // 100)]
    return {**case, **found, "autotuning_s": tuned, "sample": sample.cpu().double().numpy().round(7).tolist()}


def _ms(call: Any, seconds: float) -> float:
    def wait(_: Any) -> None:
        torch.cuda.synchronize()

    once = rounds(call, warm_up=2, wait=wait)[0]
    calls = max(2, min(50, int(seconds / once)))
    return min(rounds(call, calls, fewest=3, warm_up=0, wait=wait)) * 1e3


def main() -> None:
    given = json.loads(sys.argv[1])
    graph, counts = None, None
    for case in given["cases"]:
        if counts != (case["nodes"], case["edges"]):
            counts = case["nodes"], case["edges"]
            graph = graph_of(*counts)
        print(json.dumps(measure(case, graph, given["seconds"])), flush=True)


if __name__ == "__main__":
    main()
