"""Whether barriers stand between the FFI calls of a lowered program and the slices around them."""

import math
import re
from collections.abc import Collection

_BARRIER = "stablehlo.optimization_barrier"
_MADE_WHOLE = (_BARRIER, "stablehlo.sort", "stablehlo.constant")
_LEAST = 128  # bytes: XLA folds only slices that begin at a multiple of this


def without_barrier(text: str, whole: Collection[str] = ()) -> list[str]:
    """Operands and results of `dejax_*` calls that XLA may fold a slice into, as "<call>: operand <type>".

    Args:
        text: StableHLO.
        whole: types of operands and results that are arrays of their own, written in place: tables and the like.
    """
    return [each for function in text.split("func.func")[1:] for each in _of_function(function, whole)]


def _of_function(text: str, whole: Collection[str]) -> list[str]:
    operation: dict[str, str] = {}  # of each value
    same: dict[str, str] = {}  # value -> the value that it equals, apart from sharding
    users: dict[str, set[str]] = {}
    calls: list[tuple[str, str, list[str], list[str], list[str]]] = []
    latest: dict[str, str] = {}  # a name is used again in the next region: here each value has its own

    def value(name: str) -> str:
        own, _, number = name.partition("#")
        own = latest.get(own, own) + ("#" + number if number else "")
        return same.get(own, own)

    for line_number, line in enumerate(text.splitlines()):
        made = re.match(r"\s*(?:(%\w+)(?::\d+)? = )?(\"?[\w.]+\"?)(?: @(\w+))?(.*)", line)
        if made is None:
            continue
        result, name, target, rest = made[1], made[2].strip('"'), made[3], made[4]
        operands = [value(x) for x in re.findall(r"%\w+(?:#\d+)?", rest.split(" : ")[0].split("{")[0])]
        if result is not None:
            latest[result] = f"{result}@{line_number}"
            result = latest[result]
            operation[result] = name
        if name == "sdy.sharding_constraint":
            same[result] = operands[0]
            continue
        for x in operands:
            users.setdefault(x, set()).add(name)
        if name == "stablehlo.custom_call" and target.startswith("dejax_"):
            takes, gives = (re.findall(r"tensor<([^>]*)>", x) for x in line.rsplit(" : ", 1)[1].split(" -> "))
            calls.append((target, result, operands, takes, gives))
    found = []
    for target, result, operands, takes, gives in calls:
        for x, kind in zip(operands, takes, strict=True):
            if _nbytes(kind) >= _LEAST and kind not in whole and operation.get(x.split("#")[0]) not in _MADE_WHOLE:
                found.append(f"{target}: operand {kind}")
        for k, kind in enumerate(gives):
            each = f"{result}#{k}" if len(gives) > 1 else result
            if _nbytes(kind) >= _LEAST and kind not in whole and users.get(each, set()) - {_BARRIER}:
                found.append(f"{target}: result {kind}")
    return found


def _nbytes(kind: str) -> int:
    *dims, dtype = kind.split("x")
    bits = int(re.sub(r"\D", "", dtype.split("E")[0]) or 8)
    return math.prod(map(int, dims)) * max(bits // 8, 1)
