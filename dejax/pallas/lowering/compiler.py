"""Triton's compiler in processes of its own: a script, which `binary` starts with a socket and which imports no dejax.

A fifth of what Triton does for a kernel is Python. In threads of the user's process kernels would take turns at that,
and with JAX's tracing. Here Triton is imported once, and each kernel is compiled by a fork of that process, which ends.
What Triton does once, for its first kernel, is done before the first fork: it takes as long as a third of a kernel.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import linecache
import os
import re
import socket
import sys
from typing import Any

# Addresses: `ptxas` makes one instruction of a product and a sum, and two of what has both. So loops of sums of rows
# have a tenth fewer instructions, those of other kernels 2 to 9 %.
_MULTIPLY_ADD = re.compile(r"mad\.wide\.s32\s+(%rd\d+), (%r\d+, \d+), (%rd\d+);")
_POINTERS = {"float": "fp", "bfloat": "bf", "int": "i", "uint": "u"}
_FIRST: dict[str, Any] = {"name": "first", "dtypes": ["float32"], "num_warps": 1, "num_stages": 1, "capability": 90}
_FIRST["text"] = """\
import triton
import triton.language as tl

@triton.jit
def first(r0):
    at = tl.arange(0, 32)
    tl.store(r0 + at, tl.reduce(tl.load(r0 + at), 0, add))

@triton.jit
def add(x, y):
    return x + y
"""


def compiled(source: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Compiles a kernel, from the fields of its `KernelSource` to those of its `KernelBinary`, with the image apart."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.compiler import ir, make_backend

    # XLA's arrays begin at multiples of 16 bytes at least. Products and sums are not fused, as in Pallas' lowering:
    # what is equal in exact arithmetic is often equal in floats, and kernels that shall fuse do it by an instruction.
    ast = ASTSource(
        fn=_function(source["text"], source["name"]),
        signature={f"r{i}": _pointer(dtype) for i, dtype in enumerate(source["dtypes"])},
        constexprs={},
        attrs={(i,): [["tt.divisibility", 16]] for i in range(len(source["dtypes"]))},
    )
    target = GPUTarget("cuda", source["capability"], 32)
    backend, context = make_backend(target), ir.context()
    chosen = {key: source[key] for key in ("num_warps", "num_stages")}
    options = backend.parse_options(chosen | {"enable_fp_fusion": False})
    ir.load_dialects(context)
    backend.load_dialects(context)
    # The stages of `triton.compile`, without its cache, for which all of the package is hashed first.
    generated = backend.get_codegen_implementation(options)
    module = ast.make_ir(target, options, generated, backend.get_module_map(), context)
    stages: dict[str, Any] = {}
    found: dict[str, Any] = {}
    backend.add_stages(stages, options, ast.language)
    for name, stage in stages.items():
        module = stage(module, found)
        if name == "ptx":
            module = _MULTIPLY_ADD.sub(r"{ .reg .b64 t; mul.wide.s32 t, \2; add.s64 \1, \3, t; }", module)
    if found.get("global_scratch_size") or found.get("profile_scratch_size"):
        raise ValueError("it wants memory for all programs, which dejax does not give")
    head = {"name": source["name"], "threads": 32 * source["num_warps"], "shared_bytes": found["shared"]}
    return head, module


def _function(text: str, name: str) -> Any:
    """The kernel as Triton's decorator makes it, which reads the text from Python's cache of lines."""
    file = f"<dejax kernel {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    names: dict[str, Any] = {"__name__": f"dejax_kernel_{name}"}
    exec(compile(text, file, "exec"), names)
    return names[name]


def _pointer(dtype: str) -> str:
    """Triton's name of the type of a pointer."""
    if dtype == "bool":
        return "*i1"
    kind = dtype.rstrip("0123456789")
    return f"*{_POINTERS[kind]}{dtype[len(kind) :]}"


def received(connection: socket.socket) -> bytes:
    """All that comes until the other end has no more to say."""
    return b"".join(iter(lambda: connection.recv(1 << 20), b""))


def _answer(connection: socket.socket) -> None:
    """Takes a source as JSON; gives a line of JSON, then the image."""
    image = b""
    try:
        head, image = compiled(json.loads(received(connection)))
    except Exception as error:
        head = {"error": f"{type(error).__name__}: {error}"}
    connection.sendall(json.dumps(head).encode() + b"\n" + image)


def serve(control: socket.socket) -> None:
    """Answers each connection that comes, in a fork, until the process that asks ends."""
    import triton
    import triton.language.extra.cuda
    from triton._C.libtriton import llvm

    llvm.init_targets()
    # Lines would be three quarters of a binary, and the text that they are of is not kept.
    triton.knobs.compilation.disable_line_info = True
    compiled(_FIRST)
    running: set[int] = set()
    while descriptors := socket.recv_fds(control, 1, 1)[1]:
        for child in list(running):  # those that have ended
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(child, os.WNOHANG)[0]:
                    running.discard(child)
        with socket.socket(fileno=descriptors[0]) as connection:
            child = os.fork()
            if child:
                running.add(child)
                continue
            with contextlib.suppress(BrokenPipeError):  # the process that asked has ended
                _answer(connection)
            sys.stdout.flush()
            os._exit(0)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
