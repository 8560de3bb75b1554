"""What jax has compiled in this process: which functions, how often, how long it took, and why again.

jax tells of each compilation through `jax.monitoring`. What it does not tell is how the arguments differed; samplers
say it for the steps that call them (`note`).
"""

from __future__ import annotations

import dataclasses
import re
import threading
import warnings
from collections.abc import Hashable
from typing import Any

import jax.monitoring

_EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace_seconds",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower_seconds",
    "/jax/core/compile/backend_compile_duration": "compile_seconds",
}
_CACHE_HIT = "/jax/compilation_cache/cache_hits"
_MOST_SIZES = 3
"""A step that was compiled for more sizes than that gets a warning."""


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledFunction:
    """A function that jax has compiled in this process.

    Attributes:
        name: the function's name in jax.
        times: how often the function was compiled.
        from_disk: how many of these programs were read from jax's cache on disk instead.
        trace_seconds: seconds of tracing, which makes a jaxpr by running the Python code. Functions that it calls count
            as well.
        lower_seconds: seconds of lowering, from the jaxpr to XLA's input.
        compile_seconds: seconds of XLA's compilation.
        sizes: for each compilation of a step on a sample, in order, the numbers of seeds, such as `"64 of paper"`.

    >>> from dejax.reporting import CompiledFunction
    >>> CompiledFunction("step", times=2, trace_seconds=0.5, lower_seconds=0.25, compile_seconds=4.0).seconds
    4.75
    """

    name: str
    times: int = 0
    from_disk: int = 0
    trace_seconds: float = 0.0
    lower_seconds: float = 0.0
    compile_seconds: float = 0.0
    sizes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds of tracing, lowering and compilation together."""
        return self.trace_seconds + self.lower_seconds + self.compile_seconds

    @property
    def why_again(self) -> str:
        """Why the function was compiled more than once, if dejax knows a reason; otherwise an empty string."""
        if self.times < 2 or not self.sizes:
            return ""
        found = []
        if len(set(self.sizes)) > 1:
            found.append(f"for seeds of other sizes: {', then '.join(dict.fromkeys(self.sizes))}")
        elif len(self.sizes) > 1:
            found.append(f"seeds were always {self.sizes[0]}: something else differed")
        if self.times > len(self.sizes):
            found.append(
                "for arguments of the same shapes that lay elsewhere: results of a step that reads a table are "
                "committed to its device, so commit the first state, too, by `jax.device_put(state, jax.devices()[0])`"
            )
        return "; ".join(found)


class _Thread(threading.local):
    """What a thread is compiling.

    Attributes:
        notes: the sizes of the samples of what is being traced.
        traced: the notes of each function that was traced and is not compiled yet.
        from_disk: whether the program that is being compiled was read from disk.
    """

    def __init__(self) -> None:
        self.notes: dict[Hashable, str] = {}
        self.traced: dict[str, dict[Hashable, str]] = {}
        self.from_disk = False

    def compiled(self, name: str) -> dict[Hashable, str]:
        """The notes of a function that is compiled now."""
        found = self.traced.pop(name, {})
        if found:
            self.notes = {}
        return found


_functions: dict[str, CompiledFunction] = {}
_sizes: dict[Hashable, list[str]] = {}
_lock = threading.Lock()
_current = _Thread()


def note(key: Hashable, size: str) -> None:
    """Says that the function that is being traced samples `size` seeds; `key` tells samples of other kinds apart."""
    _current.notes[key] = size


def compiled_functions() -> list[CompiledFunction]:
    """Lists what jax has compiled since `dejax.minibatch` or `dejax.reporting` was imported, slowest functions first.

    >>> import jax
    >>> from dejax.reporting import compiled_functions
    >>> def incremented(x):
    ...     return x + 1
    >>> _ = jax.jit(incremented)(1.0), jax.jit(incremented)(1)  # two dtypes, two programs
    >>> [function.times for function in compiled_functions() if function.name == "incremented"]
    [2]
    """
    with _lock:
        found = [function for function in _functions.values() if function.times]
    return sorted(found, key=lambda function: -function.seconds)


def _plain(name: str) -> str:
    """jax names a function `step` where it is traced, and `jit(step)` or `jit_step` afterwards."""
    found = re.fullmatch(r"p?jit\((.*)\)|p?jit_(.*)", name)
    return name if found is None else found[1] or found[2]


def _on_event(event: str, **_: Any) -> None:
    if event == _CACHE_HIT:
        _current.from_disk = True


def _on_duration(event: str, duration_secs: float, **keywords: Any) -> None:
    field = _EVENTS.get(event)
    if field is None:
        return
    name = _plain(str(keywords.get("fun_name", "a function")))
    with _lock:
        before = _functions.get(name, CompiledFunction(name))
        changes: dict[str, Any] = {field: getattr(before, field) + duration_secs}
        notes: dict[Hashable, str] = {}
        if field == "trace_seconds" and _current.notes:
            _current.traced[name] = dict(_current.notes)
        if field == "compile_seconds":
            notes = _current.compiled(name)
            changes |= {"times": before.times + 1, "from_disk": before.from_disk + _current.from_disk}
            changes["sizes"] = before.sizes + ((", ".join(notes.values()),) if notes else ())
            _current.from_disk = False
        _functions[name] = dataclasses.replace(before, **changes)
    # Lambdas cannot be told apart by their name: four of them would look like one function that is compiled again.
    for key, size in notes.items() if name != "<lambda>" else ():
        _warn(name, _sizes.setdefault((name, key), []), size)


def _warn(name: str, sizes: list[str], size: str) -> None:
    if size in sizes:
        return
    sizes.append(size)
    if len(sizes) == _MOST_SIZES + 1:
        warnings.warn(
            f"`{name}` was compiled for the {len(sizes)}th number of seeds: {', then '.join(sizes)}. Each one is "
            "compiled anew; give all batches one size, the last one of an epoch too, as `seed_batches` does: seeds of "
            "-1 are padding",
            stacklevel=2,
        )


jax.monitoring.register_event_listener(_on_event)
jax.monitoring.register_event_duration_secs_listener(_on_duration)
