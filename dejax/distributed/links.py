"""What a compiled step sends over links: the bytes of its collective operations, from the program's text."""

from __future__ import annotations

import math
import re
from typing import Any

_KINDS = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
_OPERATION = re.compile(rf"= (.*?) ({'|'.join(_KINDS)})(-start)?\((.*)")
_ARRAY = re.compile(r"\b(pred|bf16|[a-z]*\d+(?:e\d+m\d+\w*)?)\[([\d,]*)\]")


def link_bytes(compiled: Any, devices: int) -> dict[str, int]:
    """Counts the bytes that one device sends to other devices in a compiled step, by kind of collective operation.

    The count assumes the algorithms that send the fewest bytes: an all-reduce of b bytes over n devices sends 2 b (n -
    1) / n. Collectives in the body of a loop are counted once, since the compiled program does not say how often the
    loop runs.

    Args:
        compiled: a compiled step, from `jax.jit(f).lower(...).compile()` or `step.lower(...).compile()` of
            `data_parallel`.
        devices: number of devices that take part in each collective.

    Returns:
        Bytes by kind, such as "all-reduce"; kinds that do not occur are left out.

    >>> import jax, jax.numpy as jnp
    >>> from dejax.distributed import link_bytes
    >>> link_bytes(jax.jit(lambda x: x + 1).lower(jnp.ones(4)).compile(), devices=4)  # nothing is sent
    {}
    """
    found: dict[str, float] = {}
    for line in compiled.as_text().splitlines():
        match = _OPERATION.search(line)
        if match is None:
            continue
        result, kind = match[1], match[2]
        whole = _nbytes(result) if match[3] is None else _nbytes(result) // 2  # a start has operands and results
        others = devices - 1
        factor = {
            "all-reduce": 2 * others / devices,
            "all-gather": others / devices,  # of the result
            "all-to-all": others / devices,
            "reduce-scatter": others,  # of the result, which is a part
            "collective-permute": 1,
        }[kind]
        found[kind] = found.get(kind, 0) + whole * factor
    return {kind: round(size) for kind, size in found.items() if round(size)}


def _nbytes(types: str) -> int:
    total = 0
    for name, dims in _ARRAY.findall(types):
        bits = 8 if name == "pred" or name.startswith("f8") else int(re.sub(r"\D", "", name) or 0)
        total += math.prod(int(size) for size in dims.split(",") if size) * max(1, bits // 8)
    return total


__all__ = ["link_bytes"]
