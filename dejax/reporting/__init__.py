"""A report of any jitted step: memory by owner, kernels by time, bytes over the bus, and what to try next.

`dejax.report(step, *args)` makes it; docs/report.md is the guide.
"""

from __future__ import annotations

import inspect
import types
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax

import dejax
from dejax._compiling import CompiledFunction, compiled_functions
from dejax._platform import default_device, on_gpu, platform
from dejax.offload import ActivationStore, default_store
from dejax.offload.activations import current
from dejax.reporting import _hlo, _liveness, _measure, _traffic
from dejax.reporting._kernels import Kernel, kernels_of
from dejax.reporting._liveness import Timeline
from dejax.reporting._owners import OWNERS, PARAMETERS, Leaf, by_owner, drive_tables, hlo_shape, leaves_of
from dejax.reporting._remedies import Remedy, Seen, remedies
from dejax.reporting._report import Report
from dejax.reporting._traffic import Traffic
from dejax.rgnn.compiler.traced import traced

__all__ = [
    "CompiledFunction",
    "Kernel",
    "Leaf",
    "Remedy",
    "Report",
    "Timeline",
    "Traffic",
    "compiled_functions",
    "report",
]


def report(
    step: Any,
    *args: Any,
    calls: int = 5,
    owners: Mapping[str, str] | None = None,
    store: ActivationStore | None = None,
    **kwargs: Any,
) -> Report:
    """Reports what one call of a jitted step costs: memory by owner, kernels by time, bytes moved, waits, and advice.

    The step is compiled for these arguments and run on copies of what it may change (donated arrays, nnx modules). A
    step that takes a `HostTable` and donates arguments is compiled but not run, since a call would change the table
    itself.

    Args:
        step: a function made by `jax.jit` or `nnx.jit`; another function is jitted.
        *args: the arguments of the step. With `jax.ShapeDtypeStruct` in place of arrays the step is compiled and not
            run.
        calls: number of calls for the times, and again for the profile; 0 compiles only.
        owners: corrections of the owner that the report guesses for an argument, by the argument's name: "parameters",
            "optimizer state", "tables", "graphs" or "inputs".
        store: the `ActivationStore` whose counters are shown; by default the one that steps use.
        **kwargs: keyword arguments of the step.

    Returns:
        The report. Print it, or write it with `save("page.html")`.

    Raises:
        ValueError: `calls` is negative, or `owners` has an unknown owner or argument.
        TypeError: `step` cannot be called.

    >>> import dejax, jax, jax.numpy as jnp
    >>> step = jax.jit(lambda params, x: jnp.tanh(x @ params["w"]).sum())
    >>> found = dejax.report(step, {"w": jnp.ones((64, 64))}, jnp.ones((32, 64)), calls=1)
    >>> found.timeline.at_peak()["parameters"]
    16384
    """
    if not callable(step):
        raise TypeError(
            f"report: `step` must be a function, got {type(step).__name__}; give the function, and its arguments "
            "after it"
        )
    if calls < 0:
        raise ValueError(f"report: `calls` must be at least 0, got {calls}")
    if isinstance(step, types.MethodType) and hasattr(step, "lower"):
        # A jitted method: its `lower` is that of the function, which would take the first argument for the object.
        step, args = step.__func__, (step.__self__, *args)
    names = _names(step, args, kwargs)
    _check_owners(owners or {}, names)
    jitted = step if hasattr(step, "lower") else jax.jit(step)
    lowered = jitted.lower(*args, **kwargs)
    inner = getattr(lowered, "lowered", lowered)  # nnx.jit wraps what jax.jit gives
    compiled = inner.compile()
    module = _hlo.parse(compiled.as_text() or "")
    given = [*args, *kwargs.values()]
    leaves = leaves_of(names, given, _results(inner), owners or {})
    parameters = frozenset(leaf.shape for leaf in leaves if leaf.owner == PARAMETERS)
    timeline = _liveness.timeline(module, by_owner(leaves, on_host=False), parameters)
    donated = [info.donated for info in jax.tree.leaves(inner.args_info)]
    why = "only compiled" if calls == 0 else _measure.why_not_run((args, kwargs), donated)
    measured: _measure.Measured | None = None
    moved: list[Traffic] = []
    waits: dict[str, float] = {}
    if not why:
        offloads = any(i.target.startswith("dejax_offload") for i, _ in module.instructions())
        mine = store or ((current.innermost() or default_store()) if offloads else None)
        measured, moved, waits = _run(jitted, args, kwargs, donated, calls, mine)
    events, gpu = measured.events if measured else [], on_gpu()
    kernels = kernels_of(module, events, calls, traced(), on_gpu=gpu)
    traffic = [*_traffic.of_tables(module, leaves, on_gpu=gpu), *moved]
    memory = _memory(compiled)
    idle = _traffic.idle_share(events) if gpu else None
    seconds = measured.seconds if measured else None
    seen = Seen(module, leaves, timeline, kernels, traffic, waits, idle, seconds, memory["donated"], gpu)
    return Report(
        name=_name(step),
        device=_device(),
        backend=platform(),
        how=_how(why, bool(events), gpu),
        leaves=leaves,
        timeline=timeline,
        memory=memory,
        on_host=by_owner(leaves, on_host=True),
        kernels=kernels,
        flops=_flops(compiled),
        traffic=traffic,
        waits=waits,
        idle=idle,
        seconds=seconds,
        peak_bytes=measured.peak_bytes if measured else None,
        remedies=remedies(seen),
        compiled=compiled_functions(),
    )


def _run(
    jitted: Any, args: tuple[Any, ...], kwargs: dict[str, Any], donated: Sequence[bool], calls: int, store: Any
) -> tuple[_measure.Measured, list[Traffic], dict[str, float]]:
    """Runs the step: times and events, and what the store and tables on a drive moved."""
    before = store.stats() if store is not None else None
    stored = drive_tables((args, kwargs))
    of_tables = [table.stats() for table in stored]
    measured = _measure.measure(
        lambda given: _call(jitted, given), lambda: _measure.copies((args, kwargs), donated), calls
    )
    moved, waits = _traffic.of_store(before, store.stats(), 2 * calls + 1) if store is not None else ([], {})
    after = [table.stats() for table in stored]
    if stored:
        moved = [*moved, *_traffic.of_drives(of_tables, after, 2 * calls + 1)]
        waited = sum(now["wait_seconds"] - then["wait_seconds"] for then, now in zip(of_tables, after, strict=True))
        waits = waits | {"rows of tables on a drive": waited / (2 * calls + 1)}
    return measured, moved, waits


def _call(jitted: Any, given: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    return jitted(*given[0], **given[1])


def _name(step: Any) -> str:
    found = getattr(step, "__name__", None) or type(step).__name__
    return "step" if found == "<lambda>" else str(found)


def _names(step: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """The names of the arguments; `args[0]` where a function does not tell."""
    try:
        parameters = list(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    plain = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [plain[n] if n < len(plain) else f"args[{n}]" for n in range(len(args))] + list(kwargs)


def _check_owners(owners: Mapping[str, str], names: Sequence[str]) -> None:
    for name, owner in owners.items():
        if name not in names:
            raise ValueError(f"report: `owners` must name arguments of the step ({', '.join(names)}), got {name!r}")
        if owner not in OWNERS:
            raise ValueError(f"report: `owners[{name!r}]` must be one of {', '.join(OWNERS)}, got {owner!r}")


def _results(lowered: Any) -> Counter[str]:
    return Counter(hlo_shape(leaf.dtype, leaf.shape) for leaf in jax.tree.leaves(lowered.out_info))


def _memory(compiled: Any) -> dict[str, int]:
    found = compiled.memory_analysis()
    names = {
        "arguments": "argument_size_in_bytes",
        "results": "output_size_in_bytes",
        "donated": "alias_size_in_bytes",
        "temporaries": "temp_size_in_bytes",
        "code": "generated_code_size_in_bytes",
        "peak": "peak_memory_in_bytes",
        "host arguments": "host_argument_size_in_bytes",
        "host temporaries": "host_temp_size_in_bytes",
    }
    return {name: int(getattr(found, field, 0) or 0) for name, field in names.items()}


def _flops(compiled: Any) -> float:
    found = compiled.cost_analysis()
    costs = found[0] if isinstance(found, list) else found
    return max(0.0, float((costs or {}).get("flops", 0.0)))


def _how(why: str, profiled: bool, on_gpu: bool) -> str:
    if why:
        return f"bytes from XLA's compiled program; the step was not run: {why}"
    if not profiled:
        return "bytes from XLA's compiled program; the profiler recorded nothing"
    if on_gpu:
        return "times from jax's profiler on the GPU; predictions for an NVIDIA H200"
    return "times from jax's profiler on the CPU, where XLA computes everything; bytes from the compiled program"


def _device() -> str:
    kind = default_device().device_kind
    return f"{kind}, jax {jax.__version__}, dejax {dejax.__version__}"
