"""Calls of kernels that a process has traced and lowered, kept in memory and on disk for the next program.

A program that is found in JAX's cache of compiled programs is traced and lowered first, and half of that time goes to
its kernels. What is kept is the operation of StableHLO that calls a kernel, with the kernel's code in it, or the key of
the kernel's binary.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxlib.mlir import ir

from dejax._files import cache_folder, read_checked, write_checked
from dejax.pallas.lowering import binary

_OPERATION = "stablehlo.custom_call"


@dataclass(frozen=True, slots=True)
class KeptCall:
    """The call of a kernel, as programs have it.

    Attributes:
      module: a module of MLIR, as bytecode, whose attributes are those of the call and the types of its results.
      binary: the key of the binary that it launches; None if the module has the kernel's code.
    """

    module: bytes
    binary: int | None

    def emit(self, context: ir.Context, operands: Sequence[ir.Value]) -> Sequence[ir.Value]:
        """Adds the call to the program that is being lowered; returns its results."""
        told = ir.Module.parse(self.module, context).operation.attributes
        results = [ir.TypeAttr(a).value for a in ir.ArrayAttr(told["dejax.results"])]
        call = ir.DictAttr(told["dejax.call"])
        attributes = {a.name: a.attr for a in (call[i] for i in range(len(call)))}
        made = ir.Operation.create(_OPERATION, results=results, operands=list(operands), attributes=attributes)
        return list(made.results)


_memory: dict[str, KeptCall] = {}


def kept_call(identity: str) -> KeptCall | None:
    """The call of the kernel with this `identity`, if it is kept, and the binary that it launches as well."""
    found = _memory.get(identity)
    if found is None and (data := read_checked(_path(identity))) is not None:
        key, _, module = data.partition(b"\n")
        found = _memory[identity] = KeptCall(module, int(key) if key else None)
    return None if found is None or (found.binary is not None and not binary.is_kept(found.binary)) else found


def keep_call(identity: str, results: Sequence[ir.Value], binary_key: int | None) -> None:
    """Keeps the operation that gives `results`, all results of one call, and launches the binary with this key."""
    call: Any = results[0].owner
    if call.name != _OPERATION or len(call.results) != len(results):
        return
    with call.context, ir.Location.unknown():
        module = ir.Module.create()
        told = module.operation.attributes
        told["dejax.call"] = ir.DictAttr.get({a: call.attributes[a] for a in call.attributes})
        told["dejax.results"] = ir.ArrayAttr.get([ir.TypeAttr.get(result.type) for result in results])
        found = KeptCall(_bytecode(module), binary_key)
    _memory[identity] = found
    write_checked(_path(identity), f"{'' if binary_key is None else binary_key}\n".encode() + found.module)


def _bytecode(module: ir.Module) -> bytes:
    file = io.BytesIO()
    module.operation.write_bytecode(file)
    return file.getvalue()


def _path(identity: str) -> Path:
    return cache_folder() / "kernels" / f"{identity}.call"
