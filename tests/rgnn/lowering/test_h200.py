"""Models lowered to Triton kernels for an H200 without a GPU, forward and backward, with nothing left to XLA."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dejax import rgnn
from dejax.pallas.lowering import binary
from dejax.pallas.lowering.launch import HANDLER
from dejax.rgnn import Options, library
from dejax.rgnn.ir.intra import Fallback, Kernels
from dejax.rgnn.lowering.pallas import PallasLowering
from tests.cases import slow_but
from tests.described import gpus
from tests.pallas.equations import assert_extrema_keep_nan, kernel_equations
from tests.pallas.test_own_lowering import DEVICES, assembled, resources
from tests.rgnn.cases import CASES, OPERATORS, Size
from tests.rgnn.contract import make_arrays
from tests.rgnn.references import GRAPHS, graph_of

MODELS = {"rgcn": ("rgcn_mean", library.rgcn), "rgat": ("rgat", library.rgat), "hgt": ("hgt_skip", library.hgt)}


@pytest.fixture
def left_to_xla(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Operators that no template covers, and instances whose kernel could not be made."""
    found: list[str] = []
    original, prepare = PallasLowering.run, PallasLowering.__init__

    def prepared(self: PallasLowering, kernels: Kernels, *args: Any) -> None:
        prepare(self, kernels, *args)
        found.extend(str(i) for i in kernels.instances if isinstance(i, Fallback) and i.why)

    def run(self: PallasLowering, instance: Any, env: Any) -> None:
        try:
            original(self, instance, env)
        except Exception as error:
            found.append(f"{instance}: {error}")
            raise

    monkeypatch.setattr(PallasLowering, "run", run)
    monkeypatch.setattr(PallasLowering, "__init__", prepared)
    return found


def stablehlo(step: Any, *arguments: Any, device: str = "NVIDIA H200") -> str:
    """The StableHLO of a function for CUDA; its custom calls hold the kernels' Triton IR. No kernel may drop NaN."""
    with jax.sharding.use_abstract_mesh(gpus(device)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Triton.*", category=DeprecationWarning)
        traced = jax.jit(step).trace(*arguments)
        assert_extrema_keep_nan(traced.jaxpr.jaxpr)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def lower(
    name: str, size: Size, dtype: str, options: Options, graph_name: str = "typical", device: str = "NVIDIA H200"
) -> str:
    """The StableHLO of forward and backward."""
    arrays = {key: jnp.asarray(a, dtype) for key, a in make_arrays(name, GRAPHS[graph_name], size, "float32").items()}
    graph = graph_of(graph_name).with_loop_tables()  # as where there is a GPU

    def loss(arrays: Any) -> Any:
        results = CASES[name].run(graph, arrays, options)
        return sum(jnp.sum(y.astype(jnp.float32)) for y in jax.tree.leaves(results))

    def step(arrays: Any) -> Any:
        return loss(arrays), jax.grad(loss)(arrays)

    return stablehlo(step, arrays, device=device)


def kernel_names(text: str) -> list[str]:
    """The calls of kernels in a module, by either lowering."""
    return re.findall(rf"xla\.gpu\.triton|@{HANDLER}\b", text)


def check_kernels(text: str) -> None:
    """Parses and verifies the Triton IR of a module's kernels, which XLA would do on a GPU; binaries need no check."""
    if f"@{HANDLER}" in text:
        return
    from jax._src.interpreters import mlir
    from jax._src.lib import triton
    from jaxlib.mlir import ir

    escapes = {b"n": b"\n", b"t": b"\t", b'"': b'"', b"\\": b"\\"}
    kernels = re.findall(r'ir = "((?:[^"\\]|\\.)*)"', text)
    assert kernels
    for kernel in kernels:
        code = re.sub(
            rb'\\([0-9A-Fa-f]{2}|[nt"\\])',
            lambda found: escapes.get(found[1]) or bytes.fromhex(found[1].decode()),
            kernel.encode("latin1"),
        )
        context = mlir.make_ir_context()
        triton.dialect.register_dialect(context)
        with context:
            assert ir.Module.parse(code).operation.verify()


def options(precision: str | None) -> Options:
    return Options(backend="pallas", precision=precision, interpret=False)


@pytest.mark.parametrize(
    ("model", "width", "heads", "dtype", "precision"),
    [
        ("rgcn", 64, 1, "float32", "tf32"),
        ("rgat", 32, 4, "float32", "f32"),
        ("hgt", 64, 8, "bfloat16", None),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("rgcn", 32, 1, "float32", "f32"),
                ("rgat", 64, 1, "float32", "tf32"),
                ("rgcn", 256, 1, "bfloat16", None),
                ("rgat", 256, 4, "bfloat16", None),
                ("hgt", 64, 1, "float32", None),
                ("rgat", 128, 8, "float32", "bf16"),
                ("hgt", 32, 4, "float32", "f32"),
                ("hgt", 256, 8, "float32", "bf16"),
                ("rgat", 100, 3, "float32", "tf32"),
            ]
        ),
    ],
)
def test_models(model: str, width: int, heads: int, dtype: str, precision: str | None, left_to_xla: list[str]) -> None:
    name, _ = MODELS[model]
    text = lower(name, Size(width, width // heads, heads), dtype, options(precision))
    assert not left_to_xla
    # RGCN: a GEMM and a sum in each direction and a weight gradient; attention has more of each.
    assert len(kernel_names(text)) >= (6 if model == "rgcn" else 10)
    check_kernels(text)
    assert_no_scatter_add(text)


def assert_no_scatter_add(text: str) -> None:
    """On a GPU XLA adds in any order, so results would differ between runs."""
    assert "stablehlo.scatter" not in text


@pytest.mark.parametrize("name", slow_but(["rgat"], ["rgcn_mean", "rgat", "hgt_skip"]))
def test_no_scatter_add_where_types_have_sources_of_one_type(name: str) -> None:
    assert_no_scatter_add(lower(name, Size(16, 8, 2), "float32", options("tf32"), "typed"))


def test_kernels_negate_zero(left_to_xla: list[str]) -> None:
    """Pallas' lowering takes -x as 0 - x, of which 1 / -x is infinity where it should be minus infinity."""
    layer = rgnn.program(lambda g, x, y: g.sum_to_dst(1 / -(g.src(x) * g.dst(y))))
    graph, x = graph_of("typical").with_loop_tables(), jnp.zeros((graph_of("typical").num_nodes, 64))
    traced = jax.make_jaxpr(lambda x: layer(graph, x, x, options=options("tf32")))(x)
    found = {e.primitive.name for _, e in kernel_equations(traced.jaxpr)}
    assert "div" in found and "neg" not in found and not left_to_xla


LOWERED = ("linear_by_node_type", "softmax_within_relations", "reductions", "elementwise")


@pytest.mark.parametrize("name", slow_but(LOWERED, [n for n in OPERATORS if n != "feature_axes"]))
def test_operators(name: str, left_to_xla: list[str]) -> None:
    text = lower(name, Size(17, 3, 2), "float32", options("tf32"))
    assert not left_to_xla
    assert kernel_names(text)


@pytest.mark.parametrize("name", slow_but(["elementwise"], [n for n in OPERATORS if n != "feature_axes"]))
def test_operators_by_the_own_lowering(
    name: str, left_to_xla: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its printer has a rule for every primitive that operators use."""
    monkeypatch.setenv("DEJAX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(binary, "_compiled", assembled)
    monkeypatch.setattr(binary, "_binaries", {})
    own = replace(options("tf32"), lowering="dejax")
    assert f"@{HANDLER}" in lower(name, Size(17, 3, 2), "float32", own)
    assert not left_to_xla


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("model", MODELS)
def test_models_by_the_own_lowering(
    model: str, width: int, device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Triton compiles all kernels, and keeps all but two words in registers."""
    pytest.importorskip("triton")
    monkeypatch.setenv("DEJAX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(binary, "_binaries", {})
    name, _ = MODELS[model]
    lower(name, Size(width, width, 1), "float32", replace(options("tf32"), lowering="dejax"), device=device)
    assert {kernel: stack for kernel, (_, stack) in resources().items() if stack > 8} == {}


def gradient(file: str, line: int) -> str:
    """The StableHLO of a gradient, traced again as if it were at a given line of a given file."""
    jax.clear_caches()
    scope = {
        "jax": jax,
        "rgat": library.rgat,
        "graph": graph_of("typical").with_loop_tables(),
        "options": options("tf32"),
    }
    source = "\n" * line + "step = jax.grad(lambda x, p: rgat(graph, x, p, options=options).sum())"
    exec(compile(source, file, "exec"), scope)
    arrays = make_arrays("rgat", GRAPHS["typical"], Size(16, 16, 1), "float32")
    x = jnp.asarray(arrays.pop("x"))
    return stablehlo(scope["step"], x, {key: jnp.asarray(a) for key, a in arrays.items()})


@pytest.mark.slow
def test_kernels_do_not_depend_on_the_line_of_a_call() -> None:
    """Otherwise an edit above a call would change the program's key in the compilation cache."""
    text = gradient("of_the_caller.py", 1)
    assert kernel_names(text) and "of_the_caller" not in text
    assert text == gradient("of_another.py", 30)


def test_gradients_trace_each_kernel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of inference are not traced."""
    traced: list[str] = []
    original = PallasLowering.run

    def run(self: PallasLowering, instance: Any, env: Any) -> None:
        traced.append(f"{self.program.name} {instance}")
        original(self, instance, env)

    monkeypatch.setattr(PallasLowering, "run", run)
    gradient("of_the_caller.py", 1)
    assert traced and len(traced) == len(set(traced))


def reshapes(jaxpr: Any) -> set[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Kernels that reshape or squeeze a tile, with its old and new shape."""
    return {
        (kernel, e.invars[0].aval.shape, e.outvars[0].aval.shape)
        for kernel, e in kernel_equations(jaxpr)
        if e.primitive.name in ("reshape", "squeeze")
    }


@pytest.mark.parametrize("model", slow_but(["rgat"], MODELS))
def test_loops_reshape_no_tile(model: str) -> None:
    """Triton converts the layout of a reshaped tile through shared memory in every iteration of a loop."""
    name, _ = MODELS[model]
    arrays = {
        key: jnp.asarray(a) for key, a in make_arrays(name, GRAPHS["typical"], Size(64, 64, 1), "float32").items()
    }
    graph = graph_of("typical").with_loop_tables()
    loss = lambda arrays: jnp.sum(CASES[name].run(graph, arrays, options("tf32")))  # noqa: E731
    found = reshapes(jax.make_jaxpr(jax.grad(loss))(arrays).jaxpr)
    assert found and {new for kernel, _, new in found if "traverse" in kernel} == {()}


def test_plain_xla_has_no_kernels(left_to_xla: list[str]) -> None:
    """The counts above can fail: plain XLA lowers to no kernel."""
    assert not kernel_names(lower("rgcn_mean", Size(), "float32", Options(backend="xla")))
    # float64, which no kernel supports, is reported as left to XLA.
    with jax.enable_x64(True):
        assert not kernel_names(lower("rgcn_mean", Size(), "float64", options(None)))
    assert left_to_xla and "float64 values" in left_to_xla[0]
