"""Calls of kernels are kept for the next process: equal kernels share one, others never do, damage is made good."""

import contextlib
import dataclasses
import functools
import itertools
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dejax.pallas import _calls, _triton
from dejax.pallas.lowering import binary, identity, kept, launch
from dejax.pallas.traversal.accumulate import Reduction
from dejax.pallas.traversal.request import TileOperand
from dejax.pallas.traversal.traversal_schedule import TraversalSchedule
from tests.described import H200
from tests.pallas.reference import GEMMS, Gemm
from tests.pallas.test_lowering import lower


@pytest.fixture
def keeps(monkeypatch, tmp_path):
    """Calls are kept in a folder of their own, as where JAX keeps compiled programs."""
    monkeypatch.setenv("DEJAX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(_calls, "programs_are_kept", lambda: True)
    monkeypatch.setattr(kept, "_memory", {})
    return tmp_path


def noted_by(replace):
    """The names of kernels that are traced from now on; `replace` sets an attribute."""
    names = []
    original = _calls.KernelCall.traced

    def noted(self, operands):
        names.append(self.name)
        return original(self, operands)

    replace(_calls.KernelCall, "traced", noted)
    return names


@pytest.fixture
def traced(monkeypatch):
    return noted_by(monkeypatch.setattr)


def forget():
    """What is kept is on disk alone, as for a new process."""
    kept._memory.clear()


CASE = Gemm(counts=(4, 0, 3), k=16, n=16)


def lowered(**changes):
    """The program of a product of rows, traced by JAX as for the first time."""
    case = dataclasses.replace(CASE, **changes)
    return lower(lambda arrays: case.run(arrays, interpret=False), case.arrays())


def test_a_kept_call_is_the_call_that_was_lowered(keeps, traced):
    first = lowered()
    assert traced
    traced.clear()
    for way in (lambda: None, forget):
        way()
        assert lowered() == first
    assert not traced


def test_another_process_finds_it(keeps):
    script = (
        "from dejax.pallas import _calls\n_calls.programs_are_kept = lambda: True\n"
        "from tests.pallas.test_kept_calls import lowered, noted_by\n"
        "names = noted_by(setattr)\nlowered()\nprint(len(names))\n"
    )
    for expected in ("1", "0"):
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300,
            check=True,
        )  # fmt: skip
        assert done.stdout.split()[-1] == expected


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: b"", lambda data: data[:40] + b"?" + data[41:]]
)
def test_a_damaged_file_is_made_again(keeps, traced, damage):
    first = lowered()
    whole = {path: path.read_bytes() for path in (keeps / "kernels").iterdir()}
    for path, data in whole.items():
        path.write_bytes(damage(data))
    forget()
    traced.clear()
    assert lowered() == first
    assert traced
    assert {path: path.read_bytes() for path in whole} == whole


def test_a_folder_that_cannot_be_written_keeps_nothing(keeps, monkeypatch):
    monkeypatch.setenv("DEJAX_CACHE_DIR", "/dev/null/nowhere")
    assert "custom_call" in lowered()


def test_sources_tell_calls_apart(keeps, traced, monkeypatch):
    lowered()
    traced.clear()
    monkeypatch.setattr(identity, "sources", lambda: "others")
    lowered()
    assert traced


def test_a_setting_of_jax_tells_calls_apart(keeps, traced):
    lowered()
    traced.clear()
    with jax.default_matmul_precision("bfloat16"):  # tests on a GPU have "highest" already
        lowered()
    assert traced


def test_a_call_whose_binary_is_gone_is_made_again(keeps, traced, monkeypatch):
    monkeypatch.setenv("DEJAX_LOWERING", "dejax")
    monkeypatch.setattr(launch, "leaves", lambda _: False)
    monkeypatch.setattr(binary, "_compiled", lambda source: binary.KernelBinary(b"image", source.name, 32, 0))
    for memory in ("_binaries", "_by_key"):
        monkeypatch.setattr(binary, memory, {})
    first = lowered()
    assert len(traced) == 1 and "dejax_kernel" in first
    list(binary._by_key.values())[0].result()
    for memory in (binary._binaries, binary._by_key):
        memory.clear()
    forget()
    assert lowered() == first and len(traced) == 1
    (image,) = (keeps / "kernels").glob("*.kernel")
    whole = image.read_bytes()
    for times, damage in enumerate((image.unlink, lambda: image.write_bytes(whole[:-1])), 2):
        for memory in (binary._binaries, binary._by_key):
            memory.clear()
        damage()
        assert lowered() == first and len(traced) == times
        list(binary._by_key.values())[0].result()
        assert image.read_bytes() == whole


def test_vmap_of_a_kept_kernel_traces_it(keeps, traced):
    arrays = CASE.arrays()

    def several(x):
        return jax.vmap(lambda x: CASE.run(arrays | {"x": x}, interpret=False))(x)

    rows = jnp.stack([jnp.asarray(arrays["x"])] * 3)
    first = lower(lambda x: several(x), rows)
    lowered()
    traced.clear()
    assert lower(lambda x: several(x), rows) == first
    assert traced


def test_a_kernel_with_a_part_that_is_not_told_is_not_kept(keeps):
    def kernel(x, out):  # of a test: its text is not among the sources
        at = (jnp.arange(8),)
        _triton.store(out, at, _triton.load(x, at))

    call = _triton.pallas_call(
        kernel, name="copy", num_programs=1, out_shape=[jax.ShapeDtypeStruct((8,), jnp.float32)], num_warps=1,
        num_stages=1, interpret=False,
    )  # fmt: skip
    assert "custom_call" in lower(lambda x: call(x), jnp.zeros(8))
    assert not (keeps / "kernels").exists()


def test_without_a_cache_of_programs_nothing_is_kept(keeps, monkeypatch):
    monkeypatch.setattr(_calls, "programs_are_kept", lambda: False)
    lowered()
    assert not (keeps / "kernels").exists()


@pytest.mark.parametrize(
    "cases", [["no heads axis", "bias, row-scaled, dot"], pytest.param(GEMMS, marks=pytest.mark.slow)]
)
def test_calls_share_an_identity_only_if_their_jaxprs_are_equal(keeps, monkeypatch, cases):
    """Each case with changes of one field: what is traced depends on nothing that the identity does not tell."""
    found: dict[str, set[str]] = {}
    original = _calls.KernelCall.traced

    def noted(self, operands):
        jaxpr = original(self, operands)
        found.setdefault(self.identity, set()).add(str(jaxpr))
        return jaxpr

    monkeypatch.setattr(_calls.KernelCall, "traced", noted)
    monkeypatch.setattr(_calls, "kept_call", lambda identity: None)
    changes = {}, {"k": 33}, {"n": 9}, {"bias": True}, {"precision": "bf16"}, {"covers_all": True, "scatter": False}
    for name, changed in itertools.product(cases, changes):
        case = dataclasses.replace(GEMMS[name], **changed)
        try:
            arrays = case.arrays()
        except ValueError:  # the change makes no sense there
            continue
        with jax.sharding.use_abstract_mesh(H200), contextlib.suppress(NotImplementedError, ValueError):
            jax.jit(lambda arrays, case=case: case.run(arrays, interpret=False)).trace(jax.tree.map(jax.typeof, arrays))
    assert len(found) > len(cases) and None not in found
    assert all(len(texts) == 1 for texts in found.values())


# ------------------------------------------------------------------------------------------------ identities

_scalars = st.one_of(
    st.sampled_from([None, True, False, 0, 1, -1, 0.0, -0.0, 1.0, np.inf, np.int32(1), np.int64(1), b"", b"a"]),
    st.text("ab'(,", max_size=3),
    st.sampled_from([jnp.float32, np.dtype("float32"), np.dtype("int32"), bool, int]),
    st.builds(
        jax.ShapeDtypeStruct, st.sampled_from([(), (1,), (1, 2), (2, 1)]), st.sampled_from([jnp.float32, jnp.int32])
    ),
    st.builds(TraversalSchedule, *[st.integers(1, 2)] * 3),
    st.builds(Reduction, st.sampled_from(["sum", "max"]), st.sampled_from([(), (2,)])),
    st.builds(TileOperand, st.sampled_from(["entry", "row"])),
)
_parts = st.recursive(
    _scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.integers(0, 2), inner, max_size=2),
    ),
    max_leaves=6,
)  # fmt: skip


def exactly(part):
    """Text that is equal only for parts of one type and value, made another way."""
    if isinstance(part, list | tuple):
        return f"{type(part).__name__}[{';'.join(map(exactly, part))}]"
    if isinstance(part, dict):
        return f"dict[{';'.join(f'{exactly(k)}:{exactly(v)}' for k, v in part.items())}]"
    if dataclasses.is_dataclass(part):
        return f"{type(part).__name__}{exactly([getattr(part, f.name) for f in dataclasses.fields(part)])}"
    return f"{type(part)} {part!r}"


@settings(max_examples=200, deadline=None)
@given(_parts, _parts)
def test_parts_share_an_identity_only_if_they_are_equal(one, other):
    assert (identity.identity_of(one) == identity.identity_of(other)) == (exactly(one) == exactly(other))


def test_functions_are_told_by_what_they_close_over_and_compute():
    space = {"__name__": "dejax.pallas.somewhere"}
    exec("def make(n):\n    return lambda x: x + n\ntwo = lambda x: x + 1, lambda x: x + 2\n", space)
    one, other, again = space["make"](1), space["make"](2), space["make"](1)
    assert identity.identity_of(one) == identity.identity_of(again) != identity.identity_of(other)
    assert len({identity.identity_of(f) for f in (*space["two"], one, other)}) == 4
    assert identity.identity_of(functools.partial(one, 3)) != identity.identity_of(functools.partial(one, 4))


def test_a_function_that_closes_over_itself_is_told():
    space = {"__name__": "dejax.pallas.somewhere"}
    exec("def make():\n    def again(n):\n        return again(n - 1) if n else 0\n    return again\n", space)
    assert identity.identity_of(space["make"]()) == identity.identity_of(space["make"]())


@pytest.mark.parametrize("part", [lambda: None, jnp.zeros, np.zeros(2), object(), jax.jit(lambda: None)])
def test_other_parts_are_refused(part):
    with pytest.raises(identity.NotToldError):
        identity.identity_of(part)
