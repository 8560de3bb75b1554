"""A report as text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from dejax.reporting._figures import Figures
from dejax.reporting._traffic import total
from dejax.reporting._units import count, milliseconds, size

KERNELS_SHOWN = 12
ARGUMENTS_SHOWN = 5
COMPILED_SHOWN = 6
_BAR = 30


def render(report: Figures) -> str:
    """The page."""
    took = "not run" if report.seconds is None else f"{milliseconds(report.seconds * 1e3)} a call"
    lines = [f"{report.name}: {took}", report.device]
    if report.flops and report.seconds:
        lines.append(
            f"{count(report.flops)}FLOP a call, {count(report.flops / report.seconds)}FLOP/s".replace("  ", " ")
        )
    lines += [
        "",
        *_memory(report),
        "",
        *_kernels(report),
        "",
        *_traffic(report),
        "",
        *_compiled(report),
        "",
        *_remedies(report),
    ]
    return "\n".join(line.rstrip() for line in lines)


def _memory(report: Figures) -> list[str]:
    peak = report.timeline.at_peak()
    whole = sum(peak.values())
    lines = [f"Device memory at the peak: {size(whole)}"]
    for owner, nbytes in peak.items():
        bar = "#" * round(_BAR * nbytes / whole) if whole else ""
        lines.append(f"  {owner:<16} {size(nbytes):>10}  {bar}")
    lines += [f"  {owner:<16} {size(nbytes):>10}  in host memory" for owner, nbytes in report.on_host.items()]
    lines.append(f"  XLA's own plan: {plan(report)}")
    largest = sorted(report.leaves, key=lambda leaf: -leaf.nbytes)[:ARGUMENTS_SHOWN]
    lines.append(
        "  largest arguments: " + ", ".join(f"{leaf.path} {leaf.shape} {size(leaf.nbytes)}" for leaf in largest)
    )
    return lines


def plan(report: Figures) -> str:
    """XLA's figures in one line."""
    memory = report.memory
    text = (
        f"{size(memory['arguments'])} of arguments, {size(memory['results'])} of results of which "
        f"{size(memory['donated'])} in donated memory, {size(memory['temporaries'])} of temporaries"
    )
    text += f"; {size(sum(memory[n] for n in ('arguments', 'results', 'temporaries')) - memory['donated'])} in all"
    if report.peak_bytes:
        text += f"; the allocator's peak so far is {size(report.peak_bytes)}"
    return text


def _kernels(report: Figures) -> list[str]:
    rows = [("kernel", "line", "ms", "predicted", "bytes")]
    for kernel in report.kernels[:KERNELS_SHOWN]:
        rows.append(
            (
                kernel.name,
                kernel.line,
                "" if kernel.milliseconds is None else f"{kernel.milliseconds:.3f}",
                "" if kernel.predicted_ms is None else f"{kernel.predicted_ms:.3f}",
                "" if kernel.nbytes is None else size(kernel.nbytes),
            )
        )
    more = len(report.kernels) - KERNELS_SHOWN
    rest = sum(kernel.milliseconds or 0 for kernel in report.kernels[KERNELS_SHOWN:])
    lines = [f"Kernels ({report.how})", *_table(rows)]
    if more > 0:
        lines.append(f"  and {more} more" + (f", {milliseconds(rest)} in all" if rest else ""))
    return lines


def _compiled(report: Figures) -> list[str]:
    rows: list[tuple[str, ...]] = [("function", "times", "trace s", "lower s", "XLA s", "why again")]
    for function in report.compiled[:COMPILED_SHOWN]:
        times = str(function.times) + (f", {function.from_disk} from disk" if function.from_disk else "")
        seconds = (function.trace_seconds, function.lower_seconds, function.compile_seconds)
        rows.append((function.name, times, *(f"{s:.2f}" for s in seconds), function.why_again))
    rest = report.compiled[COMPILED_SHOWN:]
    lines = [f"Compiled in this process: {sum(function.seconds for function in report.compiled):.1f} s", *_table(rows)]
    if rest:
        lines.append(f"  and {len(rest)} more, {sum(function.seconds for function in rest):.1f} s in all")
    return lines


def _traffic(report: Figures) -> list[str]:
    if not report.traffic and not report.waits and report.idle is None:
        return ["Bus and disk: nothing moves"]
    sums = ", ".join(f"{size(nbytes)} {direction}" for direction, nbytes in total(report.traffic).items())
    lines = [f"Bus and disk, one call: {sums or 'nothing moves'}"]
    for entry in report.traffic:
        predicted = f", predicted {milliseconds(entry.predicted_ms)}" if entry.predicted_ms is not None else ""
        lines.append(f"  {size(entry.nbytes):>10}  {entry.direction:<14} {entry.what}{predicted}")
    lines += [f"  {milliseconds(seconds * 1e3):>10}  {what}" for what, seconds in report.waits.items()]
    if report.idle is not None:
        lines.append(f"  the device did nothing for {report.idle:.0%} of the profiled time")
    return lines


def _remedies(report: Figures) -> list[str]:
    if not report.remedies:
        return ["What to try: nothing stands out"]
    lines = ["What to try"]
    for number, remedy in enumerate(report.remedies, 1):
        lines += textwrap.wrap(f"{number}. {remedy.what}", 110, initial_indent="  ", subsequent_indent="     ")
        lines += textwrap.wrap(
            f"{remedy.do} See {remedy.page}.", 110, initial_indent="     ", subsequent_indent="     "
        )
    return lines


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    rows = [(_cut(row[0], 44), _cut(row[1], 34), *row[2:]) for row in rows]
    used = [n for n in range(len(rows[0])) if any(row[n] for row in rows[1:])]
    widths = {n: max(len(row[n]) for row in rows) for n in used}
    return [
        "  " + "  ".join(row[n].ljust(widths[n]) if n < 2 else row[n].rjust(widths[n]) for n in used) for row in rows
    ]


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."
