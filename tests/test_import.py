"""What importing dejax costs and loads, and which of its modules may import which."""

import functools
import json
import os
import subprocess
import sys
from typing import Any

import pytest

import dejax
from dejax import _native
from dejax._compat import JAX_VERSION, unsupported_jax
from tests.imports import ROOT, cycles, import_graph, imported_names, modules

HEAVY = ("flax", "jraph", "rdflib", "matplotlib", "tensorstore", "optax", "orbax")


def python(code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run([sys.executable, *flags, "-c", code], env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran


PARTS_AND_MORE = "rgnn pallas host_gather minibatch offload segment distributed datasets info".split()
IN_A_NEW_PROCESS = f"""
import importlib, json, sys, time
import jax

def loaded():
    return sorted(name for name in sys.modules if name.partition(".")[0] == "dejax")

def heavy():
    return sorted({{name.partition(".")[0] for name in sys.modules}} & set({HEAVY!r}))

start = time.perf_counter()
import dejax
found = {{"seconds": time.perf_counter() - start, "at first": loaded()}}
for part in {PARTS_AND_MORE!r}:
    importlib.import_module("dejax." + part)
found["heavy"] = heavy()
packages = (dejax.rgnn, dejax.offload, dejax.minibatch)
found["bindings"] = [getattr(package, name).__name__ for package in packages for name in ("nnx", "linen")]
found["with flax"] = heavy()
found["missing"] = [name for name in dejax.__all__ if getattr(dejax, name, None) is None]
print(json.dumps(found))
"""


@functools.cache
def found_in_a_new_process() -> dict[str, Any]:
    return json.loads(python(IN_A_NEW_PROCESS).stdout)


def test_import_of_dejax_takes_no_time_and_loads_no_submodule() -> None:
    found = found_in_a_new_process()
    assert found["at first"] == ["dejax"]
    assert found["seconds"] < 0.3  # after jax; some 20 ms on an idle machine


def test_flax_is_imported_when_its_bindings_are_named_and_nothing_heavy_before() -> None:
    found = found_in_a_new_process()
    assert found["heavy"] == [] and "flax" in found["with flax"]
    parts = ("rgnn", "offload", "minibatch")
    assert found["bindings"] == [f"dejax.{part}.{name}" for part in parts for name in ("nnx", "linen")]


def test_public_names_resolve() -> None:
    assert found_in_a_new_process()["missing"] == []
    assert set(dejax.__all__) <= set(dir(dejax))


def test_the_error_of_an_unknown_name_lists_the_names() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'rgn'; it has .*rgnn"):
        _ = dejax.rgn


def test_an_extension_for_a_later_jaxlib_is_refused_before_it_stops_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "_jaxlib_ffi_version", lambda: (0, 0))
    module, why = _native._load.__wrapped__()
    assert module is None
    assert "it was built for version 0." in why


def test_the_ffi_version_of_jaxlib_is_found() -> None:
    version = _native._jaxlib_ffi_version()
    assert version is not None and version >= (0, 3)


def test_the_installed_jax_is_supported() -> None:
    assert unsupported_jax() is None
    assert JAX_VERSION >= (0, 10, 2)


# The layers, from the top: a module may import its own layer and those in the rows below. The layer of a module is the
# longest name here that it begins with; `dejax.rgnn` itself is what users import: `nnx`, `linen`, `library` and others.
LAYERS = (
    ("dejax.__main__",),
    ("dejax.info", "dejax.training"),
    ("dejax.reporting",),
    ("dejax.distributed",),
    ("dejax.minibatch",),
    ("dejax.datasets",),
    ("dejax.host_gather", "dejax.offload", "dejax.rgnn"),
    ("dejax.offload.plan",),
    ("dejax.offload.state",),
    ("dejax.offload.activations",),
    ("dejax.offload.telemetry", "dejax.offload._evaluation", "dejax.offload._resources"),
    ("dejax.offload._files",),
    ("dejax.rgnn.layers",),
    ("dejax.rgnn.compiler",),
    ("dejax.rgnn.lowering",),
    ("dejax.rgnn.options",),
    ("dejax.rgnn.passes",),
    ("dejax.rgnn.cost",),
    ("dejax.rgnn.graphs", "dejax.rgnn.ir"),
    ("dejax.cuda", "dejax.segment"),
    ("dejax.pallas",),
    (
        "dejax._compiling",
        "dejax._drive_layout",
        "dejax._dtypes",
        "dejax._jaxprs",
        "dejax._native",
        "dejax._origin",
        "dejax._pytrees",
    ),
    ("dejax._compat", "dejax._files", "dejax._optional", "dejax._platform"),
)
PARTS = ("dejax.host_gather", "dejax.offload", "dejax.rgnn")
RANKS = {layer: rank for rank, layers in enumerate(LAYERS) for layer in layers}
# Packages in which modules still import each other.
KNOWN_CYCLES: tuple[str, ...] = ()
# Imports for annotations alone: a value of a program has operators that are written in these files.
FOR_ANNOTATIONS = {
    (f"dejax.rgnn.compiler.frontend.{importer}", f"dejax.rgnn.compiler.frontend.{imported}")
    for importer, imported in [
        ("features", "symbols"),
        ("indexing", "symbols"),
        ("masks", "symbols"),
        ("matmul", "symbols"),
        ("symbols", "trace"),
    ]
} | {("dejax.rgnn.ir.derivatives", "dejax.rgnn.ir.inter")}


def belongs(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def layer_of(module: str) -> str:
    return max((layer for layer in RANKS if belongs(module, layer)), key=len)


def part_of(module: str) -> str | None:
    return next((part for part in PARTS if belongs(module, part)), None)


def test_imports_form_no_cycle() -> None:
    graph = {
        name: {other for other in found if (name, other) not in FOR_ANNOTATIONS} for name, found in imports().items()
    }
    known = dict.fromkeys(KNOWN_CYCLES, False)
    for cycle in cycles(graph):
        package = next((p for p in KNOWN_CYCLES if all(belongs(module, p) for module in cycle)), None)
        assert package is not None, f"these modules import each other: {', '.join(sorted(cycle))}"
        known[package] = True
    assert all(known.values()), f"without cycles now, leave them out of KNOWN_CYCLES: {known}"


imports = functools.cache(import_graph)


@pytest.mark.parametrize(("importer", "imported"), sorted(FOR_ANNOTATIONS))
def test_imports_for_annotations_are_not_run(importer: str, imported: str) -> None:
    assert imported in imports()[importer], "stale: leave it out of FOR_ANNOTATIONS"
    assert imported not in imports(annotations=False)[importer]


def test_imports_point_down() -> None:
    upward = [
        f"{name} imports {other}"
        for name, found in imports().items()
        for other in found
        if layer_of(name) != layer_of(other) and RANKS[layer_of(name)] >= RANKS[layer_of(other)]
    ]
    assert upward == []


def test_the_three_parts_do_not_import_each_other() -> None:
    across = [
        f"{name} imports {other}"
        for name, found in imports().items()
        for other in found
        if part_of(name) and part_of(other) and part_of(name) != part_of(other)
    ]
    assert across == []


def test_one_module_imports_the_triton_lowering_of_pallas() -> None:
    found = [name for name, path in modules().items() if any("pallas.triton" in n for n in imported_names(path))]
    assert found == ["dejax.pallas._triton"]


def test_dejax_imports_no_benchmark_example_or_test() -> None:
    outside = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} | {"benchmarks", "examples", "tests"}
    found = {name.partition(".")[0] for path in modules().values() for name in imported_names(path)}
    assert found & outside == set()


def test_a_cycle_is_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"d"}}) == [{"b", "c"}, {"d"}]


@pytest.mark.slow
def test_public_modules_of_rgnn() -> None:
    # Each is named first in a process: what one imports does not make the name of another.
    code = """
import os, importlib, sys, jax
for name in "interop jraph_layers library linen nnx options zoo".split():
    for module in [m for m in sys.modules if m.partition(".")[0] == "dejax" and "_dejax_native" not in m]:
        del sys.modules[module]
    module = importlib.import_module(f"dejax.rgnn.{name}")
    import dejax.rgnn
    assert getattr(dejax.rgnn, name) is module is sys.modules[f"dejax.rgnn.{name}"], name
print("fine")
"""
    assert python(code).stdout.split() == ["fine"]


def test_functions_of_public_modules_are_those_of_the_layers() -> None:
    from dejax.rgnn import interop, library
    from dejax.rgnn.graphs.interop import from_graphs_tuple
    from dejax.rgnn.layers.library import rgat

    assert library.rgat is rgat and interop.from_graphs_tuple is from_graphs_tuple


OPTIONAL = ("flax", "optax", "orbax", "jraph", "tensorstore", "rdflib", "matplotlib")
WITHOUT = f"import sys\nfor name in {OPTIONAL!r}:\n    sys.modules[name] = None\n"


def test_what_needs_a_missing_package_or_the_extension_says_which() -> None:
    """And all other packages import and work with jax alone."""
    graph = "from dejax.rgnn import interop, RelGraph; graph = RelGraph.from_edges([0], [0], num_nodes=1)"
    uses = {
        "flax": ["import dejax.rgnn.nnx", "import dejax.rgnn.linen", "import dejax.minibatch.nnx"]
        + ["import dejax.minibatch.linen", "import dejax.offload.nnx", "import dejax.offload.linen"],
        "optax": ["from dejax.offload import optimizer; optimizer(None)"],
        "jraph": [f"{graph}; interop.to_graphs_tuple(graph)"],
        "matplotlib": ["from dejax.offload.telemetry import Recording; Recording.plot(None, '')"],
    }
    expected = [
        (snippet, f"needs {package}, which is not installed: pip install {package}")
        for package, snippets in uses.items()
        for snippet in snippets
    ]
    call = "from dejax.offload import ActivationStore; ActivationStore()"
    expected += [(call, "needs dejax's native extension"), (call, "pip install .")]
    code = f"""{WITHOUT}
sys.modules["dejax._dejax_native"] = None
import {", ".join(f"dejax.{part}" for part in PARTS_AND_MORE)}
from dejax import _native
from dejax.rgnn import interop, library, zoo
for snippet, message in {expected!r}:
    try:
        exec(snippet)
    except (ModuleNotFoundError, _native.NativeExtensionError) as error:
        assert message in str(error), error
    else:
        raise SystemExit(snippet)
"""
    python(code)


def test_the_first_interpreted_kernel_of_a_process_is_traced_once() -> None:
    """Modules that jax imports while it traces a kernel must not change what its caches compare."""
    code = """if True:
        import jax, jax.numpy as jnp
        from dejax import segment
        traces = []
        @jax.jit
        def total(x):
            traces.append(x)
            return segment.segment_sum(x, jnp.zeros(8, int), 1, backend="pallas")
        total(jnp.ones((8, 1))), total(jnp.ones((8, 1)))
        print(len(traces))
    """
    assert python(code).stdout.split() == ["1"]
