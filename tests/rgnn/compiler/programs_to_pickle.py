"""Programs of a module that a new process can import."""

from __future__ import annotations

from typing import Any

from dejax import rgnn


@rgnn.program
def decorated(g: Any, x: Any) -> Any:
    return g.sum_to_dst(g.src(x))


def plain(g: Any, x: Any) -> Any:
    return g.mean_to_dst(g.src(x))


wrapped = rgnn.program(plain, backend="xla")


class Holder:
    @rgnn.program
    def method(g: Any, x: Any) -> Any:
        return g.max_to_dst(g.src(x))


@rgnn.program
def typed(g: Any, x: Any, weight: Any) -> Any:
    return g.sum_to_dst(g.src(x) @ g.per_edge_type(weight))
