"""Rules of loads, stores and barriers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from dejax.pallas.lowering.printer import Printer, Rule


def _address(printer: Printer, reference: str, indexers: Sequence[Any]) -> str:
    """The pointers to the elements that the indices name."""
    if len(indexers) != 1 or not all(isinstance(index, str) for index in indexers[0].indices):
        raise NotImplementedError("a load or store in a kernel whose axes are not each indexed by an array")
    place, (indexer,) = printer.references[reference], indexers
    cast = ".to(tl.int64)" if place.wide else ""
    offsets = " + ".join(
        f"{index}{cast}" + (f" * {stride}" if stride != 1 else "")
        for index, stride in zip(indexer.indices, place.strides, strict=True)
    )
    shape = tuple(indexer.get_indexer_shape())
    return f"{reference} + tl.broadcast_to({offsets}, {shape})" if shape else f"{reference} + {offsets or 0}"


def _masked(mask: str | None) -> str:
    return "" if mask is None else f", mask={mask}"


def _load(printer: Printer, equation: Any, values: list[str]) -> list[str]:
    reference, indexers, mask, other = jax.tree.unflatten(equation.params["args_tree"], values)
    at = _address(printer, reference, indexers)
    rest = _masked(mask) + (f", other={other}" if mask is not None and other is not None else "")
    return [printer.let(f"tl.load({at}{rest})")]


def _get(printer: Printer, equation: Any, values: list[str]) -> list[str]:
    reference, *indices = values
    indexers = jax.tree.unflatten(equation.params["tree"], indices)
    return [printer.let(f"tl.load({_address(printer, reference, indexers)})")]


def _store(printer: Printer, equation: Any, values: list[str]) -> list[str]:
    reference, indexers, value, mask = jax.tree.unflatten(equation.params["args_tree"], values)
    printer.line(f"tl.store({_address(printer, reference, indexers)}, {value}{_masked(mask)})")
    return [""]  # nothing reads the previous value


def _atomic_add(printer: Printer, equation: Any, values: list[str]) -> list[str]:
    reference, index, value, mask = values
    return [printer.let(f"tl.atomic_add({reference} + {index}, {value}, mask={mask})")]


def _barrier(printer: Printer, equation: Any, values: list[str]) -> list[str]:
    printer.line("tl.debug_barrier()")
    return []


RULES: dict[str, Rule] = {
    "masked_load": _load,
    "get": _get,
    "masked_swap": _store,
    "kernel_atomic_add": _atomic_add,
    "kernel_barrier": _barrier,
}
