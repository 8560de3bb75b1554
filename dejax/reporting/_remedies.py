"""What to try next: rules that look at a report's figures, of which the three with the largest gain are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dejax.reporting._hlo import Instruction, Module
from dejax.reporting._kernels import Kernel
from dejax.reporting._liveness import ACTIVATIONS, RESULTS, Timeline
from dejax.reporting._owners import INPUTS, OPTIMIZER, PARAMETERS, Leaf
from dejax.reporting._traffic import Traffic
from dejax.reporting._units import milliseconds, size

DOCS = "docs"
_LEAST_BYTES = 1 << 20  # below it memory is not worth a remedy


@dataclass(frozen=True, slots=True)
class Remedy:
    """A piece of advice in a report: a change that may save memory or time.

    Attributes:
        what: what the report observed.
        do: what to do about it.
        page: the page of the documentation that explains it.
        gain: estimated share of the memory or time that it saves, by which advice is sorted.

    >>> import dejax, jax, jax.numpy as jnp
    >>> page = dejax.report(jax.jit(lambda w, x: (x @ w).sum()), jnp.ones((8, 8)), jnp.ones((4, 8)), calls=0)
    >>> all(remedy.page.startswith("docs/") for remedy in page.remedies)
    True
    """

    what: str
    do: str
    page: str
    gain: float


@dataclass(frozen=True, slots=True)
class Seen:
    """What the rules look at.

    Attributes:
        module, leaves, timeline, kernels, traffic: as in the report.
        waits: seconds of one call by reason.
        idle: share of the time in which the device did nothing.
        seconds: wall time of a call.
        aliased: bytes of results that reuse donated arguments.
        on_gpu: whether the step runs on a GPU.
    """

    module: Module
    leaves: Sequence[Leaf]
    timeline: Timeline
    kernels: Sequence[Kernel]
    traffic: Sequence[Traffic]
    waits: Mapping[str, float]
    idle: float | None
    seconds: float | None
    aliased: int
    on_gpu: bool

    @property
    def peak(self) -> Mapping[str, int]:
        """Bytes by owner at the peak."""
        return self.timeline.at_peak()

    @property
    def peak_bytes(self) -> int:
        """All bytes at the peak."""
        return sum(self.peak.values())

    def share(self, owner: str) -> float:
        """An owner's share of the peak."""
        return self.peak.get(owner, 0) / self.peak_bytes if self.peak_bytes else 0.0

    @property
    def device_ms(self) -> float:
        """Milliseconds of all kernels."""
        return sum(kernel.milliseconds or 0 for kernel in self.kernels)


def remedies(seen: Seen, most: int = 3) -> list[Remedy]:
    """The remedies that fit, the largest gain first."""
    found = [remedy for rule in _RULES for remedy in rule(seen)]
    return sorted(found, key=lambda remedy: -remedy.gain)[:most]


def _donate(seen: Seen) -> Iterator[Remedy]:
    results = seen.peak.get(RESULTS, 0)
    changed = sum(leaf.nbytes for leaf in seen.leaves if leaf.owner in (PARAMETERS, OPTIMIZER) and not leaf.on_host)
    twice = min(results, changed)
    if not seen.aliased and twice > max(_LEAST_BYTES, 0.1 * seen.peak_bytes):
        yield Remedy(
            f"The step returns {size(results)} of new arrays while the old ones still exist.",
            "Give parameters and optimizer state to `jax.jit(..., donate_argnums=...)`: XLA then writes in place.",
            f"{DOCS}/report.md#donation",
            twice / seen.peak_bytes,
        )


def _activations(seen: Seen) -> Iterator[Remedy]:
    held = seen.peak.get(ACTIVATIONS, 0)
    if held > _LEAST_BYTES and seen.share(ACTIVATIONS) > 0.25:
        largest = next(b for b in seen.timeline.buffers if b.read_by_backward and not b.backward)
        where = seen.module.line(largest.by)
        yield Remedy(
            f"Activations take {size(held)}, {seen.share(ACTIVATIONS):.0%} of the peak; the largest is {largest.shape}"
            + (f" from {where}." if where else "."),
            "Wrap the layer in `offload(jax.checkpoint(layer))`, or the loss in `offload.region`: activations then "
            "wait in host memory.",
            f"{DOCS}/offload.md",
            seen.share(ACTIVATIONS),
        )


def _optimizer(seen: Seen) -> Iterator[Remedy]:
    held = seen.peak.get(OPTIMIZER, 0)
    if held > _LEAST_BYTES and seen.share(OPTIMIZER) > 0.25:
        yield Remedy(
            f"The optimizer's state takes {size(held)}, {seen.share(OPTIMIZER):.0%} of the peak.",
            "Wrap the optimizer in `offload.optimizer(tx)`, or train layer by layer with `offload.stack_step`: the "
            "state then lies in host memory.",
            f"{DOCS}/large_models.md",
            seen.share(OPTIMIZER),
        )


def _parameters(seen: Seen) -> Iterator[Remedy]:
    held = seen.peak.get(PARAMETERS, 0)
    if held > 64 * _LEAST_BYTES and seen.share(PARAMETERS) > 0.5:
        yield Remedy(
            f"Parameters take {size(held)}, {seen.share(PARAMETERS):.0%} of the peak.",
            "`offload.stack_step(..., params='host')` streams them layer by layer; on several devices, shard them.",
            f"{DOCS}/large_models.md",
            0.8 * seen.share(PARAMETERS),
        )


def _inputs(seen: Seen) -> Iterator[Remedy]:
    """Large inputs of which a step reads single rows."""
    for leaf in seen.leaves:
        share = leaf.nbytes / seen.peak_bytes if seen.peak_bytes else 0
        if leaf.owner == INPUTS and not leaf.on_host and leaf.nbytes > _LEAST_BYTES and share > 0.25:
            if _only_gathered(seen.module, leaf.shape):
                yield Remedy(
                    f"The step only reads rows of `{leaf.path}`: {size(leaf.nbytes)}, {share:.0%} of the peak.",
                    f"Keep it in host memory: `HostTable.from_numpy({leaf.path.split('[')[0]})`. Index it as before.",
                    f"{DOCS}/host_gather.md",
                    share,
                )


def _only_gathered(module: Module, shape: str) -> bool:
    entry = module.computations.get(module.entry, [])
    names = {i.name for i in entry if i.opcode == "parameter" and i.shapes and i.shapes[0].text == shape}
    return _only_rows_are_read(module, entry, names)


def _only_rows_are_read(module: Module, computation: Sequence[Instruction], names: set[str]) -> bool:
    """Whether a computation reads some rows of the arrays `names`, and nothing else of them."""
    readers = [i for i in computation if names & set(i.operands) and i.opcode not in ("tuple", "bitcast")]
    return bool(readers) and all(_reads_rows(module, i, computation, names) for i in readers)


def _reads_rows(module: Module, reader: Instruction, computation: Sequence[Instruction], names: set[str]) -> bool:
    if reader.opcode == "fusion" and reader.calls:  # on a GPU its name is that of what follows the gather
        inside = module.computations.get(reader.calls[0], [])
        given = {i.name for i in inside if i.opcode == "parameter" and reader.operands[i.index] in names}
        if _only_rows_are_read(module, inside, given):
            return True
    small = max((s.nbytes for s in reader.shapes), default=0) < _bytes_of(computation, names) / 2
    words = f"{reader.opcode} {reader.name}"
    return small and ("gather" in words or "gather" in reader.op_name or "dynamic" in words)


def _bytes_of(computation: Sequence[Instruction], names: set[str]) -> int:
    return max((i.nbytes for i in computation if i.name in names), default=0)


def _gathers(seen: Seen) -> Iterator[Remedy]:
    mine = sum(kernel.milliseconds or 0 for kernel in seen.kernels if kernel.kind == "table")
    share = mine / seen.device_ms if seen.device_ms else 0
    if share > 0.25:
        yield Remedy(
            f"Reads of tables take {milliseconds(mine)}, {share:.0%} of the device's time.",
            "Keep the most used rows on the device (`SplitTable`, `CachedTable`), store rows in 16 or 8 bits, or read "
            "the next batch ahead with `prefetched_scan`.",
            f"{DOCS}/host_gather.md",
            share,
        )


def _fallbacks(seen: Seen) -> Iterator[Remedy]:
    found = [kernel for kernel in seen.kernels if kernel.kind == "rgnn" and kernel.why]
    lost = sum(kernel.milliseconds or 0 for kernel in found)
    share = lost / seen.device_ms if seen.device_ms else 0
    if found and (share > 0.1 or not seen.device_ms):
        worst = max(found, key=lambda kernel: kernel.milliseconds or 0)
        yield Remedy(
            f"XLA computes {len(found)} parts of programs ({milliseconds(lost)}); the slowest is {worst.name} at "
            f"{worst.line or 'an unknown line'}: {worst.why}.",
            "Write this line with operators that kernels have; `program.explain(...)` shows what each becomes.",
            f"{DOCS}/programs.md",
            share or 0.1,
        )


def _waits(seen: Seen) -> Iterator[Remedy]:
    waited = sum(seen.waits.values())
    share = waited / seen.seconds if seen.seconds else 0
    if share > 0.1:
        worst = max(seen.waits, key=lambda what: seen.waits[what])
        if "drive" in worst:
            yield Remedy(
                f"Of {milliseconds((seen.seconds or 0) * 1e3)}, {milliseconds(waited * 1e3)} are waits; most: {worst}.",
                "Give the table a larger `cache_bytes` and `visits`, keep its most visited rows on the device "
                "(`CachedTable`), or begin reads earlier (`pipelined_steps`).",
                f"{DOCS}/drive.md",
                share,
            )
            return
        room = "room" in worst or "store" in worst.rsplit(" ", 1)[-1]
        yield Remedy(
            f"Of {milliseconds((seen.seconds or 0) * 1e3)}, {milliseconds(waited * 1e3)} are waits for offloaded "
            f"tensors; most: {worst}.",
            "Give the store more host memory (`host_bytes`) or a larger ring (`device_bytes`), or offload fewer layers."
            if room
            else "Give the ring more room (`device_bytes`), so that tensors come back ahead, or keep the last layers.",
            f"{DOCS}/offload.md",
            share,
        )


def _idle(seen: Seen) -> Iterator[Remedy]:
    if seen.on_gpu and seen.idle is not None and seen.idle > 0.3:
        yield Remedy(
            f"The device does nothing for {seen.idle:.0%} of the time: the host does not launch kernels fast enough.",
            "Run several steps in one compiled call with `jax.lax.scan`, and keep results on the device between calls.",
            f"{DOCS}/performance/calls.md",
            0.8 * seen.idle,
        )


def _scatters(seen: Seen) -> Iterator[Remedy]:
    names = ("scatter-add", "scatter_add", "scatter-max", "scatter", "segment_sum")
    mine = [k for k in seen.kernels if k.kind == "XLA" and k.name.startswith(names)]
    spent = sum(kernel.milliseconds or 0 for kernel in mine)
    share = spent / seen.device_ms if seen.device_ms else 0
    if mine and seen.on_gpu and share > 0.1:
        worst = max(mine, key=lambda kernel: kernel.milliseconds or 0)
        yield Remedy(
            f"XLA's scatters take {milliseconds(spent)}, {share:.0%} of the device's time; the slowest: {worst.line}.",
            "Use `dejax.segment` in place of `jax.ops.segment_sum`, or write the layer as a program of `dejax.rgnn`.",
            f"{DOCS}/segment.md",
            0.7 * share,
        )


def _constants(seen: Seen) -> Iterator[Remedy]:
    entry = seen.module.computations.get(seen.module.entry, [])
    held = [i for i in entry if i.opcode == "constant" and i.nbytes > _LEAST_BYTES]
    total = sum(i.nbytes for i in held)
    if held:
        yield Remedy(
            f"The compiled step contains {size(total)} of constants; the largest is {held[0].shapes[0].text}.",
            "Give these arrays as arguments: an array that a jitted function closes over is compiled into it.",
            f"{DOCS}/troubleshooting.md",
            max(0.3, total / max(1, seen.peak_bytes)),
        )


_RULES: tuple[Callable[[Seen], Iterator[Remedy]], ...] = (
    _donate, _activations, _optimizer, _parameters, _inputs, _gathers, _fallbacks, _waits, _idle, _scatters, _constants,
)  # fmt: skip
