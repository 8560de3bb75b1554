"""`dejax.report`: owners, memory over a step, kernels by program and line, traffic, remedies, forms of the page."""

from __future__ import annotations

import functools
import inspect
import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import dejax
from dejax import rgnn
from dejax.host_gather import DeviceTable, HostTable
from dejax.reporting import _hlo, _liveness, _measure, _picture, _remedies, _traffic, _units
from dejax.reporting._kernels import Kernel
from dejax.reporting._owners import hlo_shape, leaves_of

OPTIMIZER = optax.adam(1e-3)
PARAMS = [{"up": jnp.full((32, 128), 0.01), "down": jnp.full((128, 32), 0.01)} for _ in range(3)]
STATE = OPTIMIZER.init(PARAMS)
BATCH = jnp.ones((2048, 32))


def loss(params, x):
    for w in params:
        x = x + jax.nn.gelu(x @ w["up"]) @ w["down"]
    return (x**2).mean()


def train(params, opt_state, x):
    value, gradient = jax.value_and_grad(loss)(params, x)
    updates, opt_state = OPTIMIZER.update(gradient, opt_state)
    return optax.apply_updates(params, updates), opt_state, value


@functools.cache
def found(donate: bool = False):
    step = jax.jit(train, donate_argnums=(0, 1) if donate else ())
    return dejax.report(step, PARAMS, STATE, BATCH, calls=1)


def test_arguments_have_owners() -> None:
    owners = {leaf.path: leaf.owner for leaf in found().leaves}
    assert owners["params[0]['up']"] == "parameters" and owners["x"] == "inputs"
    assert {owner for path, owner in owners.items() if path.startswith("opt_state")} == {"optimizer state"}
    peak = found().timeline.at_peak()
    assert peak["parameters"] == 3 * 2 * 32 * 128 * 4
    assert peak["optimizer state"] == 2 * peak["parameters"] + 4
    assert peak["inputs"] == BATCH.nbytes


def test_activations_are_what_backward_reads() -> None:
    peak = found().timeline.at_peak()
    hidden = 2048 * 128 * 4
    assert 3 * hidden <= peak["activations"] <= 3 * 5 * hidden
    totals = found().timeline.totals
    assert totals[found().timeline.peak] == max(totals) > 2 * totals[0]


@pytest.mark.parametrize("donate", [False, True])
def test_the_estimate_is_close_to_the_plan_of_xla(donate: bool) -> None:
    memory, estimate = found(donate).memory, max(found(donate).timeline.totals)
    least = memory["arguments"] + memory["temporaries"]
    assert 0.8 * least <= estimate <= 1.2 * (least + memory["results"] - memory["donated"])


def test_donated_arguments_are_not_used_up() -> None:
    params, state = jax.tree.map(jnp.copy, (PARAMS, STATE))
    report = dejax.report(jax.jit(train, donate_argnums=(0, 1)), params, state, BATCH, calls=1)
    assert report.memory["donated"] > 0
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((params, state)))
    np.testing.assert_array_equal(params[0]["up"], PARAMS[0]["up"])
    assert report.seconds is not None and report.seconds > 0


def test_kernels_have_times_and_lines_of_the_users_code() -> None:
    kernels = found().kernels
    lines, first = inspect.getsourcelines(loss)
    gelu = first + next(n for n, line in enumerate(lines) if "gelu" in line)
    if not any(kernel.milliseconds for kernel in kernels):
        pytest.skip("this jaxlib's profiler records no operators on the CPU")
    assert any(kernel.line == f"test_report.py:{gelu}" for kernel in kernels[:4])
    assert any("backward" in kernel.name for kernel in kernels)
    measured = [kernel.milliseconds for kernel in kernels]
    assert measured == sorted(measured, reverse=True)


def test_the_first_remedy_fits_the_largest_owner() -> None:
    remedy = found().remedies[0]
    assert "Activations take" in remedy.what and "offload" in remedy.do and remedy.page == "docs/offload.md"


@rgnn.program
def my_layer(g, h, w):
    return rgnn.relu(g.sum_to_dst(g.src(h) @ g.per_edge_type(w)))


@pytest.fixture
def graph():
    senders, receivers, types = np.random.default_rng(0).integers(0, [[100], [100], [3]], (3, 500))
    return rgnn.RelGraph.from_edges(senders, receivers, types, num_nodes=100)


def test_kernels_of_a_program_have_its_name_and_line(graph) -> None:
    step = jax.jit(jax.value_and_grad(lambda w, g, h: (my_layer(g, h, w) ** 2).sum()))
    report = dejax.report(step, jnp.ones((3, 16, 8)), graph, jnp.ones((100, 16)), calls=1)
    mine = {kernel.name: kernel for kernel in report.kernels if kernel.kind == "rgnn"}
    assert any(name.startswith("my_layer [0] grouped GEMM") for name in mine)
    assert any(name.startswith("my_layer.backward") for name in mine)
    lines, first = inspect.getsourcelines(my_layer.function)
    line = first + next(n for n, text in enumerate(lines) if "return" in text)
    assert all(f"test_report.py:{line}" in kernel.line for kernel in mine.values())
    assert next(leaf.owner for leaf in report.leaves if leaf.path.startswith("g.")) == "graphs"


def test_a_program_itself_is_a_step(graph) -> None:
    report = dejax.report(my_layer, graph, jnp.ones((100, 16)), jnp.ones((3, 16, 8)), calls=1)
    assert report.name == "my_layer" and any(kernel.kind == "rgnn" for kernel in report.kernels)


def test_rows_of_tables_are_counted(graph) -> None:
    table = HostTable.from_numpy(np.ones((1000, 16), np.float32))

    @jax.jit
    def step(params, table, ids):
        rows = jax.lax.scan(lambda total, i: (total + (table[i] @ params).sum(), None), 0.0, ids)[0]
        return rows

    report = dejax.report(step, jnp.ones((16,)), table, jnp.zeros((5, 40), jnp.int32), calls=1)
    assert report.on_host == {"tables": 1000 * 16 * 4}
    assert sum(entry.nbytes for entry in report.traffic) == 5 * 40 * 16 * 4
    assert all(entry.direction == "to the device" for entry in report.traffic)
    on_device = leaves_of(["t"], [DeviceTable.from_numpy(np.ones((10, 4), np.float32))], _counter(), {})
    assert [(leaf.owner, leaf.nbytes, leaf.on_host) for leaf in on_device] == [("tables", 160, False)]


def _counter():
    from collections import Counter

    return Counter()


def test_a_step_that_donates_beside_a_table_is_not_run() -> None:
    table = HostTable.from_numpy(np.ones((100, 4), np.float32))
    step = jax.jit(lambda w, t: w + t[jnp.arange(3)].sum(), donate_argnums=0)
    report = dejax.report(step, jnp.ones((8,)), table)
    assert report.seconds is None and "would change the table itself" in report.how
    assert "not run" in str(report) and report.kernels


def test_a_store_is_counted() -> None:
    from dejax.offload import ActivationStore, offload

    def deep(ws, x):
        layer = offload(jax.checkpoint(lambda w, x: jnp.tanh(x @ w)), min_bytes=1)
        for w in ws:
            x = layer(w, x)
        return (x**2).sum()

    with ActivationStore(device_bytes=0) as store:
        report = dejax.report(jax.jit(jax.grad(deep)), [jnp.ones((8, 8))] * 3, jnp.ones((16, 8)), calls=2)
        assert store.stats().fetched_bytes == 5 * sum(
            e.nbytes for e in report.traffic if e.direction == "to the device"
        )
    assert any(kernel.kind == "offload" for kernel in report.kernels)


def test_modules_of_nnx_are_not_changed() -> None:
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        value, gradient = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(model, gradient)
        return value

    before = np.asarray(model.kernel)
    report = dejax.report(step, model, optimizer, jnp.ones((4, 8)), calls=1)
    np.testing.assert_array_equal(model.kernel, before)
    assert int(optimizer.step[...]) == 0
    owners = {leaf.path: leaf.owner for leaf in report.leaves}
    assert [owner for path, owner in owners.items() if path.startswith("model")] == ["parameters"] * 2
    assert {owner for path, owner in owners.items() if path.startswith("optimizer")} == {"optimizer state"}
    assert owners["x"] == "inputs" and report.seconds


def test_shapes_are_enough_to_compile() -> None:
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (PARAMS, STATE, BATCH))
    report = dejax.report(jax.jit(train), *shapes)
    assert report.seconds is None and report.timeline.at_peak() == found().timeline.at_peak()


def test_static_and_keyword_arguments() -> None:
    step = jax.jit(lambda x, times, *, scale: x * times * scale, static_argnames=("times",))
    report = dejax.report(step, jnp.ones((4,)), times=3, scale=jnp.ones((4,)), calls=1)
    assert [leaf.path for leaf in report.leaves] == ["x", "scale"]


def test_owners_may_be_given() -> None:
    step = jax.jit(lambda table, ids: table[ids].sum())
    report = dejax.report(step, jnp.ones((100, 4)), jnp.arange(3), owners={"table": "tables"}, calls=0)
    assert [leaf.owner for leaf in report.leaves] == ["tables", "inputs"]
    assert "only compiled" in report.how


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"calls": -1}, "`calls` must be at least 0, got -1"),
        ({"owners": {"y": "inputs"}}, r"`owners` must name arguments of the step \(x\), got 'y'"),
        ({"owners": {"x": "mine"}}, "must be one of parameters, .* got 'mine'"),
    ],
)
def test_bad_arguments(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        dejax.report(jax.jit(lambda x: x), jnp.ones(3), **options)
    with pytest.raises(TypeError, match="`step` must be a function, got int"):
        dejax.report(3)


def test_the_page_in_all_forms(tmp_path) -> None:
    report = found()
    text = str(report)
    for heading in ("Device memory at the peak", "Kernels (", "Bus and disk", "What to try"):
        assert heading in text
    assert max(map(len, text.splitlines())) < 400
    for name in ("page.html", "page.svg", "page.json", "page.txt"):
        report.save(tmp_path / name)
    assert json.loads((tmp_path / "page.json").read_text())["memory"]["at_peak"] == report.timeline.at_peak()
    svg = ElementTree.fromstring((tmp_path / "page.svg").read_text())
    labels = " ".join(element.text or "" for element in svg.iter() if element.tag.endswith("text"))
    assert "activations" in labels and "peak" in labels and "train" in labels
    page = (tmp_path / "page.html").read_text()
    assert not re.findall(r"(?:src|href)=", page) and "<script" not in page
    checker = _Balanced()
    checker.feed(page)
    assert checker.open == []
    assert "<h2>What to try</h2>" in report._repr_html_()


class _Balanced(HTMLParser):
    """Fails for tags that do not close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_names_are_escaped() -> None:
    def step(x):
        return x + 1

    step.__name__ = "<b>&"
    report = dejax.report(jax.jit(step), jnp.ones(3), calls=0)
    assert "<b>" not in report._repr_html_().replace("<b>&", "!") and "&lt;b&gt;&amp;" in report.picture()


# ---------------------------------------------------------------------------------------------------------------------
# The parts, on made-up input.
# ---------------------------------------------------------------------------------------------------------------------

HLO = """HloModule jit_f, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }, entry_computation_layout={}

FileNames
1 "/home/me/model.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%body (p: (s32[], f32[256])) -> (s32[], f32[256]) {
  %p = (s32[], f32[256]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[256]{0} get-tuple-element(%p), index=1
  %t = f32[1024]{0} broadcast(%i), dimensions={}
  %y = f32[256]{0} slice(%t), slice={[0:256]}
  ROOT %r = (s32[], f32[256]{0}) tuple(%i, %y)
}

%cond (p.1: (s32[], f32[256])) -> pred[] {
  %p.1 = (s32[], f32[256]{0}) parameter(0)
  ROOT %c = pred[] constant(true)
}

ENTRY %main (a: f32[256], b: f32[256]) -> (f32[256], f32[256]) {
  %a = f32[256]{0} parameter(0), metadata={op_name="a"}
  %b = f32[256]{0} parameter(1)
  %saved = f32[512]{0} fusion(%a), kind=kCustom, calls=%body, metadata={op_name="jit(f)/jvp()/tanh" stack_frame_id=1}
  %host = f32[4096]{0:S(5)} custom-call(%a), custom_call_target="move"
  %z = s32[] constant(0)
  %in = (s32[], f32[256]{0}) tuple(%z, /*index=1*/%b)
  %loop = (s32[], f32[256]{0}) while(%in), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %out = f32[256]{0} get-tuple-element(%loop), index=1
  %grad = f32[256]{0} custom-call(%saved, %out), custom_call_target="g", metadata={op_name="f/transpose(jvp())/mul"}
  %new = f32[256]{0} custom-call(%grad), custom_call_target="u"
  %plain = f32[256]{0} custom-call(%new), custom_call_target="v"
  ROOT %root = (f32[256]{0}, f32[256]{0}) tuple(%new, %plain)
}
"""


def test_hlo_is_read() -> None:
    module = _hlo.parse(HLO)
    by_name = {i.name: (i, times) for i, times in module.instructions()}
    assert module.entry == "main" and module.aliased == {0}
    assert module.line(by_name["saved"][0]) == "model.py:7" and module.line(by_name["grad"][0]) == ""
    assert by_name["t"] == (by_name["t"][0], 5) and by_name["t"][0].nbytes == 4096
    assert by_name["grad"][0].is_backward and not by_name["saved"][0].is_backward
    assert by_name["host"][0].shapes[0].on_host
    assert by_name["in"][0].operands == ("z", "b")


def test_memory_over_a_made_up_step() -> None:
    line = _liveness.timeline(_hlo.parse(HLO), {"parameters": 2048}, frozenset({"f32[256]"}))
    owners = {name: list(series) for name, series in line.owners.items()}
    # positions: before all, saved, host, loop, grad, new, plain
    assert owners["parameters"] == [2048] * 7
    assert owners["activations"] == [0, 2048, 2048, 2048, 2048, 0, 0]
    assert owners["gradients"] == [0, 0, 0, 0, 1024, 1024, 0]
    assert owners["results"] == [0, 0, 0, 0, 0, 0, 1024]
    assert owners["temporaries"][3] == 4096 + 1024 and line.peak == 3


def test_dtypes_have_their_sizes() -> None:
    shapes = _hlo._shapes("(f32[2,3]{1,0}, bf16[5], pred[7], s4[3], f8e4m3fn[2], c64[2], token[], u8[])")
    assert [shape.nbytes for shape in shapes] == [24, 10, 7, 2, 2, 16, 0, 1]
    assert hlo_shape(jnp.bfloat16, (2,)) == "bf16[2]" and hlo_shape(np.int8, ()) == "s8[]"
    assert hlo_shape(np.bool_, (1,)) == "pred[1]"


def test_idle_time_counts_overlaps_once() -> None:
    event = lambda start, duration: _measure.Event("k", "", start, duration)  # noqa: E731
    assert _traffic.idle_share([event(0, 10), event(5, 5), event(30, 10)]) == pytest.approx(0.5)
    assert _traffic.idle_share([]) is None


def seen(**changes) -> _remedies.Seen:
    module = _hlo.parse(HLO)
    line = _liveness.Timeline({"parameters": [1]}, [])
    values = {
        "module": module, "leaves": [], "timeline": line, "kernels": [], "traffic": [], "waits": {}, "idle": None,
        "seconds": 1.0, "aliased": 0, "on_gpu": True,
    }  # fmt: skip
    return _remedies.Seen(**(values | changes))


def kernel(name: str, kind: str, ms: float, why: str = "") -> Kernel:
    return Kernel(name, "model.py:7", kind, ms, 1, None, None, why)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"timeline": _liveness.Timeline({"optimizer state": [1 << 30], "inputs": [1 << 29]}, [])},
            "offload.optimizer",
        ),
        ({"timeline": _liveness.Timeline({"parameters": [1 << 30]}, [])}, "stack_step"),
        ({"kernels": [kernel("table gather", "table", 5), kernel("dot", "XLA", 5)]}, "SplitTable"),
        ({"kernels": [kernel("p [1] xla", "rgnn", 5, "rows of 3 axes")]}, "model.py:7: rows of 3 axes"),
        ({"waits": {"launches waited for room in the store": 0.5}}, "host_bytes"),
        ({"waits": {"the device waited for tensors": 0.5}}, "device_bytes"),
        ({"idle": 0.6}, "lax.scan"),
        ({"kernels": [kernel("scatter-add", "XLA", 5)]}, "dejax.segment"),
    ],
)
def test_remedies_fit_what_was_seen(changes, words) -> None:
    (remedy,) = _remedies.remedies(seen(**changes))
    assert words in f"{remedy.what} {remedy.do}"


def test_nothing_to_see_gives_no_remedy_and_at_most_three_are_given() -> None:
    assert _remedies.remedies(seen()) == []
    many = [kernel("table gather", "table", 5), kernel("p [1] xla", "rgnn", 5, "w"), kernel("scatter-add", "XLA", 5)]
    found = _remedies.remedies(seen(kernels=many, idle=0.9))
    assert len(found) == 3 and [r.gain for r in found] == sorted((r.gain for r in found), reverse=True)


def test_a_table_that_is_only_gathered_should_be_in_host_memory() -> None:
    step = jax.jit(lambda params, features, ids: (features[ids] @ params).sum())
    report = dejax.report(step, jnp.ones((16,)), jnp.ones((1 << 17, 16)), jnp.arange(8), calls=0)
    (remedy,) = report.remedies
    assert "HostTable.from_numpy(features)" in remedy.do and remedy.page == "docs/host_gather.md"


def test_a_gather_inside_of_a_fusion_is_seen() -> None:
    """For a GPU XLA names a fusion by its last instruction."""
    text = """HloModule jit_step, entry_computation_layout={(f32[131072,16]{1,0}, s32[8,1]{1,0})->f32[8]{0}}

%fused (p0: f32[131072,16], p1: s32[8,1]) -> f32[8] {
  %p0 = f32[131072,16]{1,0} parameter(0)
  %p1 = s32[8,1]{1,0} parameter(1)
  %rows = f32[8,16]{1,0} GATHER
  ROOT %sum = f32[8]{0} reduce(%rows, %rows), dimensions={1}, to_apply=%add
}

ENTRY %main (features: f32[131072,16], ids: s32[8,1]) -> f32[8] {
  %features = f32[131072,16]{1,0} parameter(0)
  %ids = s32[8,1]{1,0} parameter(1)
  ROOT %input_reduce_fusion = f32[8]{0} fusion(%features, %ids), kind=kInput, calls=%fused
}
"""
    for reader, expected in (("gather(%p0, %p1)", True), ("slice(%p0)", False)):
        module = _hlo.parse(text.replace("GATHER", reader))
        assert _remedies._only_gathered(module, "f32[131072,16]") == expected


def test_large_constants_are_seen() -> None:
    large = jnp.asarray(np.random.default_rng(0).normal(size=(1 << 19,)).astype(np.float32))
    report = dejax.report(jax.jit(lambda x: x * large), jnp.ones((1 << 19,)), calls=0)
    assert any("closes over" in remedy.do for remedy in report.remedies)


def test_a_step_that_returns_new_parameters_should_donate() -> None:
    step = jax.jit(lambda params, x: (jax.tree.map(lambda p: p + x, params), x))
    report = dejax.report(step, {"w": jnp.ones((1 << 20,))}, jnp.ones(()), calls=0)
    assert any("donate_argnums" in remedy.do for remedy in report.remedies)


def test_pages_of_remedies_exist() -> None:
    from pathlib import Path

    root = Path(__file__).parents[2]
    pages = re.findall(r'f"\{DOCS\}/([\w/]+\.md)', inspect.getsource(_remedies))
    assert pages and all((root / "docs" / page).exists() for page in pages)


def test_units() -> None:
    assert (
        _units.size(3 << 30) == "3 GiB" and _units.milliseconds(None) == "" and _units.milliseconds(12.34) == "12.3 ms"
    )
    assert _picture._round_up(1000) == 1024 and _picture._round_up(3 << 20) == 4 << 20


class Squares:
    """A step that is a method; the object is static."""

    @functools.partial(jax.jit, static_argnums=0)
    def step(self, x):
        return x * x


def test_a_jitted_method_gets_its_object():
    found = dejax.report(Squares().step, jnp.ones(16), calls=1)
    assert found.seconds is not None
