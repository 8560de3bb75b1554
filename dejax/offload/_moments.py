"""What a step layer by layer asks of an optimizer and its state: dependences, places, shardings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.extend import core

from dejax.offload._state_store import is_on_disk

_HOST = jax.memory.Space.Host
Tier = Literal["device", "host", "disk"]


def needs_of(eqn: Any, inner: Any, needs: dict[Any, frozenset[int]]) -> list[frozenset[int]]:
    """What each result of an equation depends on; looks into jitted functions."""
    given = [frozenset() if isinstance(v, core.Literal) else needs.get(v, frozenset()) for v in eqn.invars]
    if eqn.primitive.name in ("jit", "pjit") and isinstance(inner, core.ClosedJaxpr):
        inside = dict(zip(inner.jaxpr.invars, given, strict=True))
        for one in inner.jaxpr.eqns:
            inside.update(zip(one.outvars, needs_of(one, one.params.get("jaxpr"), inside), strict=True))
        return [frozenset() if isinstance(v, core.Literal) else inside.get(v, frozenset()) for v in inner.jaxpr.outvars]
    return [frozenset().union(*given)] * len(eqn.outvars)


def depends_on_inputs(fn: Callable[..., Any], *shapes: Any) -> list[bool]:
    """For each result of a function, whether it depends on an argument's values."""
    closed = jax.make_jaxpr(fn)(*shapes)
    needs = {var: frozenset((0,)) for var in closed.jaxpr.invars}
    for eqn in closed.jaxpr.eqns:
        needs.update(zip(eqn.outvars, needs_of(eqn, eqn.params.get("jaxpr"), needs), strict=True))
    return [not isinstance(v, core.Literal) and bool(needs.get(v)) for v in closed.jaxpr.outvars]


def shardings_of(moments: Any, params: Any) -> list[Any]:
    """For each array of an optimizer's state: the sharding of the parameter of its name and shape, or replicated."""
    known, mesh = {}, None
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, jax.sharding.NamedSharding):
            mesh = sharding.mesh
            known[jax.tree_util.keystr(path), leaf.shape] = sharding.spec
    if mesh is None:
        return [None] * len(jax.tree.leaves(moments))
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(moments):
        names = [jax.tree_util.keystr(path[k:]) for k in range(len(path) + 1)]  # a single array has no name
        spec = next((known[name, leaf.shape] for name in names if (name, leaf.shape) in known), None)
        found.append(jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec() if spec is None else spec))
    return found


def tier_of(x: Any) -> Tier:
    if is_on_disk(x):
        return "disk"
    return "host" if getattr(jax.typeof(x), "memory_space", None) == _HOST else "device"
