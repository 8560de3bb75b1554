"""Inner products of edges from which only scalars follow: a traversal that loads their rows anyway computes them once.

The gradient of a softmax is the difference of an inner product and its mean over a segment. RGAT sums that gradient in
scalars alone, so three narrow traversals follow one wide traversal. The wide traversal, which sums gradients by source,
loads both rows of an edge and stores the inner product. The narrow traversals then make the mean and the sums of
scalars.
"""

from __future__ import annotations

from dejax.rgnn.ir.inter import Space
from dejax.rgnn.passes.kernels._traversal_plans import NARROWER, Fusion


def products_to_share(fusion: Fusion) -> dict[int, list[int]]:
    """The inner products and scalars of edges that the traversal of a reduction of rows stores, by that reduction.

    Other traversals load them. Each value is stored by one traversal at most.
    """
    ops = fusion.program.ops
    sums = [i for i, op in enumerate(ops) if op.name == "reduce" and op.attr("via") != "all"]
    sums = [i for i in sums if i not in fusion.written and ops[ops[i].args[0]].space == Space.EDGE]
    cones = {i: fusion.cone([ops[i].args[0]], set()) for i in sums}
    found: dict[int, list[int]] = {}
    stored: set[int] = set()
    for value, op in enumerate(ops):
        if op.space != Space.EDGE or not fusion.in_registers(value) or not fusion.narrows(value):
            continue
        readers = [i for i in sums if value in cones[i][0]]
        if value in stored or not _several_sums_of_scalars(fusion, value, readers):
            continue
        product, rows = fusion.cone([value], set())
        for i in sums:
            body, leaves = cones[i]
            via = ops[i].attr("via")
            if ops[i].width >= NARROWER * op.width and all(
                v in leaves or fusion.read_once_per_row(v, via) for v in rows
            ):
                scalars = _scalars_for_others(fusion, body, product, op.width)
                new = [v for v in dict.fromkeys((value, *scalars)) if v not in stored]
                found.setdefault(i, []).extend(new)
                stored.update(new)
                break
    return found


def _several_sums_of_scalars(fusion: Fusion, value: int, readers: list[int]) -> bool:
    """Whether several reductions need the value: reductions of scalars only, by different maps, one after another."""
    ops = fusion.program.ops
    if len({ops[i].attr("via") for i in readers}) < 2 or any(ops[i].width > ops[value].width for i in readers):
        return False
    return any(fusion.depends_on((ops[i].args[0],), {j}) for i in readers for j in readers if i != j)


def _scalars_for_others(fusion: Fusion, body: list[int], product: list[int], width: int) -> list[int]:
    """Scalars of a traversal that others use, too: with these stored, the others need none of the traversal's rows."""
    ops, inside = fusion.program.ops, {*body, *product}
    read = [
        v for v in body
        if ops[v].width <= width and ops[v].name not in ("const", "reshape", "cast")
        and any(u not in inside and ops[u].space == Space.EDGE for u in fusion.users[v])
    ]  # fmt: skip

    def follows(value: int) -> bool:
        """Whether a scalar is another one of `read`, times or over a scalar of the destination."""
        others = [a for a in ops[value].args if a not in read]
        one = len(others) < len(ops[value].args)
        return one and all(ops[a].name == "gather" and ops[a].attr("via") == "dst" for a in others)

    return [v for v in read if not follows(v)]


def store_common_summands(fusion: Fusion) -> None:
    """Where several traversals sum the same scalars of edges, the one that reads edges in order stores the scalars."""
    for traversal in fusion.traversals:
        if traversal.via != "destination_pair":
            continue
        for value in dict.fromkeys(a.value for a in traversal.accumulators if a.kind == "sum"):
            shared = any(o is not traversal and value in (a.value for a in o.accumulators) for o in fusion.traversals)
            if shared and fusion.in_registers(value) and not any(value in o.stored for o in fusion.traversals):
                fusion.extend(traversal.stored, [value])
