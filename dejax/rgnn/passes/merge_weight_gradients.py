"""Two outer sums of the same rows are one instance, where one of them is with a few numbers a row.

The gradient of a typed weight is with wide rows, that of a vector which the same rows met with one number for each
head: rows that are at hand for the one give the other.
"""

from __future__ import annotations

from dataclasses import replace

from dejax.rgnn.ir.intra import Instance, Kernels, Outer, fits_beside


def pair(kernels: Kernels) -> Kernels:
    """Makes pairs of a program's outer sums; its instances are in order, and are so after it."""
    instances = list(kernels.instances)
    for narrow in kernels.instances:
        if not isinstance(narrow, Outer):
            continue
        wider = [o for o in instances if isinstance(o, Outer) and o is not narrow and _fits(kernels, o, narrow)]
        for wide in wider:
            both = replace(wide, narrow_out=narrow.out, narrow=narrow.y, narrow_spec=narrow.spec)
            ordered = _together(instances, wide, narrow, both)
            if ordered is not None:
                instances = ordered
                break
    return replace(kernels, instances=tuple(instances))


def _fits(kernels: Kernels, wide: Outer, narrow: Outer) -> bool:
    """Whether one pass over the rows can give both sums."""
    ops = kernels.program.ops
    if wide.narrow is not None or narrow.narrow is not None:
        return False
    where = [
        (o.x.value, o.x.access, o.x.via, o.x.part, o.y.access, o.y.via, o.via, ops[o.out].dtype) for o in (wide, narrow)
    ]
    numbers = ops[narrow.y.name]
    return (
        where[0] == where[1]
        and numbers.width < ops[wide.y.name].width
        and fits_beside(wide.spec, narrow.spec, numbers.shape)
    )


def _together(instances: list[Instance], wide: Outer, narrow: Outer, both: Outer) -> list[Instance] | None:
    """The instances with one in the place of the later or the earlier of two; None where neither is in order."""
    first, last = sorted((instances.index(wide), instances.index(narrow)))
    before, between, after = instances[:first], instances[first + 1 : last], instances[last + 1 :]
    given = set(instances[first].writes)
    if given.isdisjoint(v for i in (*between, instances[last]) for v in i.reads):
        return [*before, *between, both, *after]
    made = {v for i in (instances[first], *between) for v in i.writes}
    if made.isdisjoint(instances[last].reads):
        return [*before, both, *between, *after]
    return None
