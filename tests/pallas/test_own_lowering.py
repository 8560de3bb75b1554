"""dejax's own lowering of kernels: what it prints computes what the kernels do, compiles, and becomes a call."""

from __future__ import annotations

import functools
import math
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.pallas.pallas_call import pallas_call_p

from dejax.pallas import _triton
from dejax.pallas.lowering import binary, launch
from dejax.pallas.lowering.binary import KernelBinary, KernelSource
from dejax.pallas.lowering.choice import chosen, lowered_by
from dejax.pallas.lowering.launch import HANDLER
from dejax.pallas.lowering.text import kernel_text
from dejax.rgnn import Options
from tests.cases import slow_but
from tests.pallas import triton_language
from tests.pallas.reference import GEMMS, TRAVERSALS, WEIGHT_GRADIENTS
from tests.pallas.test_contract import QUICK_GEMMS, QUICK_TRAVERSALS, QUICK_WEIGHT_GRADIENTS
from tests.pallas.test_lowering import LARGE_GEMMS, LARGE_TRAVERSALS, lower

CASES = GEMMS | {f"gradient, {n}": c for n, c in WEIGHT_GRADIENTS.items()} | TRAVERSALS
QUICK = {"row-scaled", "gradient, heads merged", "attention, long segments"}
ALL = QUICK_GEMMS | {f"gradient, {name}" for name in QUICK_WEIGHT_GRADIENTS} | QUICK_TRAVERSALS


@pytest.fixture
def own(monkeypatch, tmp_path):
    monkeypatch.setenv("DEJAX_LOWERING", "dejax")
    monkeypatch.setenv("DEJAX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(binary, "_binaries", {})
    monkeypatch.setattr(binary, "_by_key", {})


def pallas_equation(call, *operands):
    """The equation of Pallas in the only kernel that `call` calls."""
    (equation,) = (e for e in jax.make_jaxpr(call)(*operands).eqns if e.primitive.name == "dejax_kernel_call")
    (equation,) = (e for e in equation.params["jaxpr"].eqns if e.primitive.name == "pallas_call")
    return equation


def printed(call, *operands):
    """The text of the kernel that `call` calls."""
    equation = pallas_equation(call, *operands)
    return kernel_text(equation.params["jaxpr"], equation.params["grid_mapping"], "kernel")


def run_printed(*operands, jaxpr, grid_mapping, input_output_aliases, out_avals, **_):
    """A `pallas_call` by its printed kernel; what no program writes is NaN, or 77 in arrays of integers."""
    outs = [np.full(o.shape, np.nan if jnp.issubdtype(o.dtype, jnp.floating) else 77, o.dtype) for o in out_avals]
    for i, o in input_output_aliases:
        outs[o][...] = np.asarray(operands[i])
    text, programs = kernel_text(jaxpr, grid_mapping, "kernel"), math.prod(grid_mapping.grid)
    triton_language.run(text, "kernel", programs, [*(np.array(o) for o in operands), *outs])
    return [jnp.asarray(o) for o in outs]


@pytest.mark.parametrize("name", slow_but(QUICK, CASES))
def test_printed_kernels_compute_what_kernels_do(name, own, monkeypatch):
    monkeypatch.setattr(pallas_call_p, "impl", run_printed)
    case, arrays = CASES[name], CASES[name].arrays()
    with jax.disable_jit():
        case.check(case.run(jax.tree.map(jnp.asarray, arrays), interpret=False), arrays)


def test_a_mapped_kernel_computes_what_kernels_do(own, monkeypatch):
    monkeypatch.setattr(pallas_call_p, "impl", run_printed)
    case = TRAVERSALS["sum"]
    arrays = case.arrays()
    several = jnp.stack([jnp.asarray(arrays["x"]) * factor for factor in (1, 2, 4)])
    run = lambda x: case.run(arrays | {"x": x}, interpret=False)  # noqa: E731
    with jax.disable_jit():
        (found,), (one,) = jax.tree.leaves(jax.vmap(run)(several)), jax.tree.leaves(run(several[0]))
    np.testing.assert_array_equal(found, [one, 2 * one, 4 * one])


def test_nan_stays():
    def kernel(x, out):
        at = (jnp.arange(8),)
        tile = _triton.load(x, at)
        _triton.store(out, at, _triton.maximum(tile, 0.0))
        _triton.store(out, (at[0] * 0 + 8,), jnp.broadcast_to(_triton.reduce_max(tile, 0), 8))
        _triton.store(out, (at[0] * 0 + 9,), jax.lax.max(tile, tile * 0 + 2))

    call = _triton.pallas_call(
        kernel, name="extrema", num_programs=1, out_shape=[jax.ShapeDtypeStruct((10,), jnp.float32)], num_warps=1,
        num_stages=1, interpret=False,
    )  # fmt: skip
    equation = pallas_equation(call, jnp.zeros(8))
    x = np.array([1, -1, np.nan, 2, 3, 4, 5, np.nan], np.float32)
    (found,) = run_printed(x, **equation.params)
    np.testing.assert_array_equal(found[:8], np.maximum(x, 0))
    assert np.isnan(found[8]) and np.isnan(found[9])


def test_zero_has_a_sign(own):
    """`-x` of triton 3.6 is 0 - x, so that 1 / -x of 0 would be infinite and not minus infinite."""

    def kernel(x, out):
        at = (jnp.arange(8),)
        _triton.store(out, at, 1 / -_triton.load(x, at))

    call = _triton.pallas_call(
        kernel, name="negated", num_programs=1, out_shape=[jax.ShapeDtypeStruct((8,), jnp.float32)], num_warps=1,
        num_stages=1, interpret=False,
    )  # fmt: skip
    text = printed(call, jax.ShapeDtypeStruct((8,), jnp.float32))
    assert re.search(r"v\d+ \* -1\.0", text) and " -v" not in text


def test_reductions_of_merged_axes_go_by_their_parts(own):
    """Triton 3.6 would add up numbers of other threads (see `_with_parts`)."""

    def kernel(x, out):
        index = tuple(lax.broadcasted_iota(jnp.int32, (4, 2, 32), axis) for axis in range(3))
        tile = _triton.load(x, index)
        _triton.store(out, (lax.iota(jnp.int32, 4),), lax.reduce_sum(lax.reshape(tile, (4, 64)), (1,)))

    call = _triton.pallas_call(
        kernel, name="merged", num_programs=1, out_shape=[jax.ShapeDtypeStruct((4,), jnp.float32)], num_warps=1,
        num_stages=1, interpret=False,
    )  # fmt: skip
    text = printed(call, jax.ShapeDtypeStruct((4, 2, 32), jnp.float32))
    assert re.search(r"tl\.reduce\(tl\.reshape\(\w+, \(4, 2, 32\)\), 2, _add\)", text) and "tl.reshape(v" in text


@pytest.mark.parametrize(("rows", "wide"), [(2**24, False), (2**24 + 1, True)])
def test_offsets_count_elements(rows, wide, own):
    """Of 8 bits each, too: 2^31 of them take half of the bytes that 32 bits count."""

    def kernel(x, out):
        at = (jnp.arange(16)[:, None], jnp.arange(128)[None, :])
        _triton.store(out, at, _triton.load(x, at))

    call = _triton.pallas_call(
        kernel, name="bytes", num_programs=1, out_shape=[jax.ShapeDtypeStruct((16, 128), jnp.int8)], num_warps=1,
        num_stages=1, interpret=False,
    )  # fmt: skip
    assert (".to(tl.int64)" in printed(call, jax.ShapeDtypeStruct((rows, 128), jnp.int8))) == wide


# ------------------------------------------------------------------------------------------------ binaries and calls


def assembled(source: KernelSource) -> KernelBinary:
    """In place of Triton's compiler."""
    return KernelBinary(source.text.encode(), source.name, 32 * source.num_warps, 1000)


@pytest.mark.parametrize("name", ["row-scaled", "attention, long segments"])
def test_a_call_for_another_machine_holds_its_binary(name, own, monkeypatch):
    monkeypatch.setattr(binary, "_compiled", assembled)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")  # on a machine with a GPU, too
    case = CASES[name]
    text = lower(functools.partial(case.run, interpret=False), case.arrays())
    assert f"@{HANDLER}" in text and "xla.gpu.triton" not in text and text.count("optimization_barrier") >= 2
    assert "shared_bytes = 1000 : i64" in text and "programs = " in text


def test_options_choose(own, monkeypatch):
    monkeypatch.setenv("DEJAX_LOWERING", "")
    assert chosen() is None
    with lowered_by("dejax"), lowered_by(None):
        assert chosen() == "dejax"
    with pytest.raises(ValueError, match=r"lowering must be 'pallas' or 'dejax', got 'mosaic'"):
        Options(lowering="mosaic")
    monkeypatch.setenv("DEJAX_LOWERING", "own")
    with pytest.raises(ValueError, match=r"\$DEJAX_LOWERING must be 'pallas' or 'dejax', got 'own'"):
        chosen()


def test_binaries_are_kept_on_disk(own, monkeypatch, tmp_path):
    source = KernelSource("text", "kernel", ("float32",), 4, 2, 90)
    monkeypatch.setattr(binary, "_compiled", assembled)
    made = binary.prepare(source).result()
    monkeypatch.setattr(binary, "_binaries", {})
    monkeypatch.setattr(binary, "_compiled", lambda source: pytest.fail("it is on disk"))
    assert binary.prepare(source).result() == made
    (file,) = (tmp_path / "kernels").iterdir()
    whole = file.read_bytes()
    for broken in (whole[:20], whole[:-1], b"{}\n", b"null\n", b""):  # each is made again
        file.write_bytes(broken)
        monkeypatch.setattr(binary, "_binaries", {})
        monkeypatch.setattr(binary, "_compiled", assembled)
        assert binary.prepare(source).result() == made
        assert file.read_bytes() == whole


def test_a_call_for_this_process_names_a_binary_that_comes_later(own, monkeypatch):
    ready = threading.Event()
    monkeypatch.setattr(binary, "_compiled", lambda source: ready.wait() and assembled(source))
    monkeypatch.setattr(launch, "is_there", lambda package: True)
    case = GEMMS["plain"]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    text = lower(functools.partial(case.run, interpret=False), case.arrays())
    (source,) = binary._binaries
    assert 'image = ""' in text and f"key = {source.key} : i64" in text
    ready.set()
    assert binary.found(source.key) == (source.text.encode(), 1000)
    with pytest.raises(binary.KernelCompileError, match="compiled by another process and is not in"):
        binary.found(source.key + 1)


def test_threads_share_one_process_that_compiles(monkeypatch):
    started = []

    class Running:
        def __init__(self, *_, **__):
            time.sleep(0.05)
            started.append(0)

        def poll(self):
            return None

    monkeypatch.setattr(binary, "_process", [])
    monkeypatch.setattr(binary.subprocess, "Popen", Running)
    with ThreadPoolExecutor(8) as threads:
        (connection,) = set(threads.map(lambda _: binary._compiler(), range(8)))
    connection.close()
    assert len(started) == 1


# The protocol of `compiler`, without Triton: one process, which ends where the source is "end".
COMPILER = """
import json, os, socket, sys
control = socket.socket(fileno=int(sys.argv[1]))
while descriptors := socket.recv_fds(control, 1, 1)[1]:
    with socket.socket(fileno=descriptors[0]) as connection:
        source = json.loads(b"".join(iter(lambda: connection.recv(1 << 20), b"")))
        if source["text"] == "end" and not os.path.exists(sys.argv[0] + ".ended"):
            open(sys.argv[0] + ".ended", "w").close()
            os._exit(1)
        head = {"name": source["name"], "threads": 32, "shared_bytes": 0}
        connection.sendall(json.dumps(head).encode() + b"\\n" + source["text"].encode())
"""


def test_the_process_that_compiles_outlives_ctrl_c_and_is_replaced_where_it_has_ended(own, monkeypatch, tmp_path):
    (tmp_path / "compiler.py").write_text(COMPILER)
    monkeypatch.setattr(binary.compiler, "__file__", str(tmp_path / "compiler.py"))
    monkeypatch.setattr(binary, "_process", [])
    monkeypatch.setattr(binary, "is_there", lambda package: True)

    def made(text):
        return binary.prepare(KernelSource(text, "kernel", ("float32",), 4, 2, 90)).result().image

    assert made("first") == b"first"
    process = binary._process[0][1]
    assert os.getsid(process.pid) != os.getsid(0)  # a terminal, or Jupyter, interrupts a whole session or group
    with pytest.raises(binary.KernelCompileError, match="its process ended"):
        made("end")
    process.wait()
    assert made("other") == b"other"
    assert made("end") == b"end"  # what failed is tried again
    ((connection, process),) = binary._process
    connection.close()
    assert process.wait() == 0


def test_without_triton_the_choice_says_what_is_missing(own, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    case = GEMMS["plain"]
    with pytest.raises(ModuleNotFoundError, match="lowering 'dejax' of kernels needs triton, which is not installed"):
        lower(functools.partial(case.run, interpret=False), case.arrays())


@pytest.mark.slow
def test_kernels_are_lowered_without_what_jax_has_deprecated():
    """jax 0.12 itself still imports its lowering before it asks for another."""
    code = """
    import sys
    sys.modules["jax.experimental.pallas.triton"] = None
    sys.modules["jax._src.pallas.triton.primitives"] = None
    import functools
    from dejax.pallas.lowering import binary, launch
    from tests.pallas.test_own_lowering import CASES, assembled, lower
    binary._compiled = assembled
    for name in ("row-scaled", "gradient, heads merged", "attention, long segments"):
        assert "dejax_kernel" in lower(functools.partial(CASES[name].run, interpret=False), CASES[name].arrays())
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def resources() -> dict[str, tuple[int, int]]:
    """Of all kernels that Triton has compiled: registers of a thread, and bytes of its stack, where others spill."""
    triton = pytest.importorskip("triton")
    found = {}
    for source, made in binary._binaries.items():
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(made.result().image)
            command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
            text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        (used,) = re.findall(r"REG:(\d+) STACK:(\d+)", text)
        found[source.name] = (int(used[0]), int(used[1]))
    return found


DEVICES = ("NVIDIA H100", "NVIDIA B200")


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [*sorted(ALL), *LARGE_GEMMS, *LARGE_TRAVERSALS])
def test_triton_compiles_what_is_printed(name, device, own):
    pytest.importorskip("triton")
    case = (CASES | LARGE_GEMMS | LARGE_TRAVERSALS)[name]
    assert f"@{HANDLER}" in lower(functools.partial(case.run, interpret=False), case.arrays(), device=device)
    # Tiles of 1,024 numbers in one warp spill. Of others Triton keeps all in registers, on a B200 all but a few.
    most = 264 if name.startswith("attention, 8 heads of 128") else 64 if device == "NVIDIA B200" else 0
    assert max(stack for _, stack in resources().values()) <= most
