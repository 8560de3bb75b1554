"""A report as HTML in one file: no script, nothing that is loaded from elsewhere, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from dejax.reporting._figures import Figures
from dejax.reporting._page import STYLE, page
from dejax.reporting._picture import picture
from dejax.reporting._text import plan
from dejax.reporting._units import count, milliseconds, size


def render(report: Figures, *, whole: bool = True) -> str:
    """The page, or only its body for a notebook."""
    took = "not run" if report.seconds is None else f"{milliseconds(report.seconds * 1e3)} a call"
    rate = f", {count(report.flops / report.seconds)}FLOP/s" if report.flops and report.seconds else ""
    body = "".join(
        [
            f'<div class="dejax-report"><h1>{escape(report.name)}: {took}{rate}</h1>',
            f'<p class="quiet">{escape(report.device)}</p>',
            picture(report, titled=False),
            "<h2>What to try</h2>",
            _remedies(report),
            "<h2>Memory</h2>",
            f"<p>XLA's own plan: {escape(plan(report))}.</p>",
            _memory(report),
            f'<h2>Kernels</h2><p class="quiet">{escape(report.how)}</p>',
            _kernels(report),
            "<h2>Bus, disk and waits</h2>",
            _traffic(report),
            "<h2>Compiled in this process</h2>",
            _compiled(report),
            "</div>",
        ]
    )
    return page(report.name, body) if whole else f"<style>{STYLE}</style>{body}"


def _remedies(report: Figures) -> str:
    if not report.remedies:
        return "<p>Nothing stands out.</p>"
    items = [f"<li>{_code(r.what)}<br><b>{_code(r.do)}</b> <code>{escape(r.page)}</code></li>" for r in report.remedies]
    return f"<ol>{''.join(items)}</ol>"


def _memory(report: Figures) -> str:
    peak = report.timeline.at_peak()
    rows = [(owner, size(nbytes), "device, at the peak") for owner, nbytes in peak.items()]
    rows += [(owner, size(nbytes), "host memory") for owner, nbytes in report.on_host.items()]
    largest = sorted(report.leaves, key=lambda leaf: -leaf.nbytes)[:10]
    arguments = [(leaf.path, leaf.shape, size(leaf.nbytes), leaf.owner) for leaf in largest]
    return _table(("owner", "bytes", "where"), rows, {1}) + _table(
        ("largest arguments", "shape", "bytes", "owner"), arguments, {2}
    )


def _kernels(report: Figures) -> str:
    rows = [
        (
            kernel.name + (f": {kernel.why}" if kernel.why else ""),
            kernel.line,
            milliseconds(kernel.milliseconds),
            milliseconds(kernel.predicted_ms),
            "" if kernel.nbytes is None else size(kernel.nbytes),
            f"{kernel.launches:.3g}",
        )
        for kernel in report.kernels[:30]
    ]
    return _table(("kernel", "line", "measured", "predicted", "bytes", "launches"), rows, {2, 3, 4, 5})


def _compiled(report: Figures) -> str:
    rows = [
        (
            function.name,
            str(function.times),
            str(function.from_disk),
            *(f"{s:.2f}" for s in (function.trace_seconds, function.lower_seconds, function.compile_seconds)),
            function.why_again,
        )
        for function in report.compiled[:15]
    ]
    titles = ("function", "times", "from disk", "trace s", "lower s", "XLA s", "why again")
    return _table(titles, rows, {1, 2, 3, 4, 5})


def _traffic(report: Figures) -> str:
    rows = [(e.what, e.direction, size(e.nbytes), milliseconds(e.predicted_ms), e.note) for e in report.traffic]
    rows += [(what, "", "", milliseconds(seconds * 1e3), "waits of one call") for what, seconds in report.waits.items()]
    if report.idle is not None:
        rows.append(("the device did nothing", "", "", f"{report.idle:.0%}", "of the profiled time"))
    if not rows:
        return "<p>Nothing moves.</p>"
    return _table(("what", "direction", "bytes", "time", ""), rows, {2, 3})


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: set[int]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        parts = [f"<{tag}{' class=n' if n in numbers else ''}>{escape(cell)}</{tag}>" for n, cell in enumerate(cells)]
        return f"<tr>{''.join(parts)}</tr>"

    return f"<table>{row(header, 'th')}{''.join(row(r, 'td') for r in rows)}</table>"


def _code(text: str) -> str:
    """Text whose parts between backticks are code."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if n % 2 else part for n, part in enumerate(parts))
