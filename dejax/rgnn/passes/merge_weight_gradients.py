"""Two grouped weight gradients of the same rows are one instance, where one of them is with a few scalars a row.

The gradient of a typed weight sums products with wide rows. The gradient of a vector that the same rows met sums
products with one scalar for each head. A kernel that has loaded the rows for the one computes the other, too.
"""

from __future__ import annotations

from dataclasses import replace

from dejax.rgnn.ir.intra import Instance, Kernels, WeightGradient
from dejax.rgnn.ir.templates import takes_narrow_rows


def merge_weight_gradients(kernels: Kernels) -> Kernels:
    """Merges pairs of a program's weight gradients; the instances stay in an order in which they can run."""
    instances = list(kernels.instances)
    for narrow in kernels.instances:
        if not isinstance(narrow, WeightGradient) or narrow not in instances:  # it has taken a narrower one already
            continue
        wider = [
            o for o in instances if isinstance(o, WeightGradient) and o is not narrow and _fits(kernels, o, narrow)
        ]
        for wide in wider:
            both = replace(wide, narrow_out=narrow.out, narrow=narrow.y, narrow_spec=narrow.spec)
            ordered = _with_one(instances, wide, narrow, both)
            if ordered is not None:
                instances = ordered
                break
    return replace(kernels, instances=tuple(instances))


def _fits(kernels: Kernels, wide: WeightGradient, narrow: WeightGradient) -> bool:
    """Whether one pass over the rows can compute both."""
    ops = kernels.program.ops
    if wide.narrow is not None or narrow.narrow is not None:
        return False
    where = [
        (o.x.value, o.x.access, o.x.via, o.x.part, o.y.access, o.y.via, o.via, ops[o.out].dtype) for o in (wide, narrow)
    ]
    scalars = ops[narrow.y.name]
    return (
        where[0] == where[1]
        and scalars.width < ops[wide.y.name].width
        and takes_narrow_rows(wide.spec, narrow.spec, scalars.shape)
    )


def _with_one(
    instances: list[Instance], wide: WeightGradient, narrow: WeightGradient, both: WeightGradient
) -> list[Instance] | None:
    """The instances with one in the place of the later or the earlier of two; None where neither order can run."""
    first, last = sorted((instances.index(wide), instances.index(narrow)))
    before, between, after = instances[:first], instances[first + 1 : last], instances[last + 1 :]
    given = set(instances[first].writes)
    if given.isdisjoint(v for i in (*between, instances[last]) for v in i.reads):
        return [*before, *between, both, *after]
    made = {v for i in (instances[first], *between) for v in i.writes}
    if made.isdisjoint(instances[last].reads):
        return [*before, both, *between, *after]
    return None
