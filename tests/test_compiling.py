"""What jax has compiled is counted, a step of many sizes gets a warning, and commands keep programs on disk."""

import jax
import jax.monitoring
import jax.numpy as jnp
import pytest

from dejax import _compiling
from dejax._files import cache_folder, keep_compiled_programs
from dejax.minibatch import HeteroTopology, sample_blocks

TRACE, _, XLA = _compiling._EVENTS  # the events of jax, in order


def compiled(name: str) -> _compiling.CompiledFunction:
    (found,) = [function for function in _compiling.compiled_functions() if function.name == name]
    return found


def tell(name: str, size: str | None, seconds: float = 2.0) -> None:
    """What jax tells of a compilation, and what a sampler notes of it."""
    if size is not None:
        _compiling.note("graph", size)
    jax.monitoring.record_event_duration_secs(TRACE, seconds / 4, fun_name=name)
    jax.monitoring.record_event_duration_secs(XLA, seconds, fun_name=f"jit({name})")


def test_events_of_jax_are_counted_by_function() -> None:
    x = jnp.ones(3)

    @jax.jit
    def counted_by_name(x: jax.Array) -> jax.Array:
        return x + 1

    counted_by_name(x), counted_by_name(x), counted_by_name(x[:2])
    found = compiled("counted_by_name")
    assert found.times == 2 and found.from_disk == 0 and found.why_again == ""
    assert min(found.trace_seconds, found.lower_seconds, found.compile_seconds) > 0


def test_sizes_of_samples_are_the_reason() -> None:
    for size in ("64 of paper", "37 of paper"):
        tell("two_sizes", size)
    tell("one_size", "64 of paper")
    tell("one_size", "64 of paper")
    found = compiled("two_sizes")
    assert found.seconds == 5 and found.sizes == ("64 of paper", "37 of paper")
    assert found.why_again == "for seeds of other sizes: 64 of paper, then 37 of paper"
    assert "something else differed" in compiled("one_size").why_again
    jax.monitoring.record_event_duration_secs(XLA, 1.0, fun_name="jit(one_size)")  # without a trace
    assert "; for arguments of the same shapes that lay elsewhere" in compiled("one_size").why_again
    jax.monitoring.record_event("/jax/compilation_cache/cache_hits")
    tell("read", None)
    assert compiled("read").from_disk == 1 and compiled("one_size").from_disk == 0


def test_the_fourth_size_gets_a_warning() -> None:
    for size in (4, 3, 2, 2, 3):
        tell("many_sizes", f"{size} of a")
    with pytest.warns(UserWarning, match="`many_sizes` was compiled for the 4th number of seeds: 4 of a, .*1 of a"):
        tell("many_sizes", "1 of a")
    tell("many_sizes", "5 of a")  # once
    for size in range(5):
        tell("<lambda>", f"{size} of a")  # perhaps five functions


def test_a_traced_sample_is_noted() -> None:
    topology = HeteroTopology.from_edges({("a", "to", "a"): ([1, 2], [0, 0])}, {"a": 3})
    jax.make_jaxpr(lambda key, seeds: sample_blocks(key, topology, seeds, [2]).nodes)(jax.random.key(0), jnp.arange(2))
    assert list(_compiling._current.notes.values())[-1] == "2 of a"
    _compiling._current.notes.clear()


def test_commands_keep_programs_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    monkeypatch.setenv("DEJAX_CACHE_DIR", "/elsewhere")
    try:
        jax.config.update("jax_compilation_cache_dir", "/chosen")
        keep_compiled_programs()
        assert jax.config.jax_compilation_cache_dir == "/chosen"
        jax.config.update("jax_compilation_cache_dir", None)
        keep_compiled_programs()
        assert jax.config.jax_compilation_cache_dir == str(cache_folder() / "programs") == "/elsewhere/programs"
    finally:
        jax.config.update("jax_compilation_cache_dir", before[0])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before[1])
