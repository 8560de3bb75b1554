"""The picture of a report: memory by owner over the step, and the longest kernels. SVG without further packages."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from dejax.reporting._figures import Figures
from dejax.reporting._liveness import ACTIVATIONS, GRADIENTS, RESULTS, TEMPORARIES
from dejax.reporting._owners import GRAPHS, INPUTS, OPTIMIZER, PARAMETERS, TABLES
from dejax.reporting._units import milliseconds, size

COLOURS = {
    PARAMETERS: "#3b6fb6",
    OPTIMIZER: "#7fa8d9",
    TABLES: "#8a6bb8",
    GRAPHS: "#b79bd8",
    INPUTS: "#9aa3ad",
    ACTIVATIONS: "#e08a3c",
    GRADIENTS: "#c9534f",
    RESULTS: "#5aa469",
    TEMPORARIES: "#e6c65c",
}
KINDS = {"rgnn": "#2a8c82", "table": "#8a6bb8", "offload": "#e08a3c", "copy": "#9aa3ad", "XLA": "#b9c3cf"}
_WIDTH, _LEFT, _PLOT_WIDTH, _PLOT_HEIGHT = 960, 70, 640, 220
_BARS = 8
STYLE = (
    ".r-bg{fill:#fff}.r-t{font:13px system-ui,sans-serif;fill:#1d2733}.r-s{font:12px system-ui,sans-serif;fill:#5a6672}"
    ".r-h{font:600 16px system-ui,sans-serif;fill:#1d2733}.r-l{stroke:#d6dce3}"
    "@media(prefers-color-scheme:dark){.r-bg{fill:#14191f}.r-t,.r-h{fill:#e6ebf0}.r-s{fill:#9fabb8}.r-l{stroke:#39434e}}"
)


def picture(report: Figures, *, titled: bool = True) -> str:
    """The picture as an SVG document, with the name of the step above or without."""
    kernels = [k for k in report.kernels if k.milliseconds or (report.seconds is None and k.nbytes)][:_BARS]
    top = 92 if titled else 36
    below = top + _PLOT_HEIGHT + 64
    height = below + 24 * len(kernels) + 12
    took = f" · {milliseconds(report.seconds * 1e3)} a call" if report.seconds is not None else ""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img" aria-label="Memory and kernels of {escape(report.name)}"><style>{STYLE}</style>',
        f'<rect class="r-bg" width="{_WIDTH}" height="{height}"/>',
        f'<text class="r-h" x="20" y="28">{escape(report.name)}{took}</text>' if titled else "",
        f'<text class="r-s" x="20" y="48">{escape(report.device)}</text>' if titled else "",
        *_memory(report, top),
        *_bars(report, kernels, below),
        "</svg>",
    ]
    return "".join(parts)


def _memory(report: Figures, top: int) -> list[str]:
    owners, totals = report.timeline.owners, report.timeline.totals
    most = max(totals, default=0) or 1
    limit = _round_up(most)
    bottom = top + _PLOT_HEIGHT
    positions = _sampled(len(totals), report.timeline.peak)
    across = max(1, len(totals) - 1)
    at_x = [_LEFT + _PLOT_WIDTH * p / across for p in positions]
    parts = [f'<text class="r-t" x="20" y="{top - 18}">Device memory, in the order of execution</text>']
    for part in range(5):
        y = bottom - _PLOT_HEIGHT * part / 4
        parts.append(f'<line class="r-l" x1="{_LEFT}" x2="{_LEFT + _PLOT_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="r-s" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{size(limit * part / 4)}</text>'
        )
    floor = [0.0] * len(positions)
    labels: list[tuple[float, str, str]] = []
    for owner, series in owners.items():
        upper = [base + series[p] for base, p in zip(floor, positions, strict=True)]
        points = [(x, bottom - _PLOT_HEIGHT * v / limit) for x, v in zip(at_x, upper, strict=True)]
        back = [(x, bottom - _PLOT_HEIGHT * v / limit) for x, v in zip(at_x, floor, strict=True)][::-1]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in _steps(points) + _steps(back, back=True))
        parts.append(f'<polygon points="{path}" fill="{COLOURS.get(owner, "#bbb")}"/>')
        peak = series[report.timeline.peak] if series else 0
        labels.append((peak, owner, f"{owner} {size(peak)}"))
        floor = upper
    x = _LEFT + _PLOT_WIDTH * report.timeline.peak / across
    parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}" stroke="#c9534f" stroke-dasharray="3 3"/>')
    parts.append(f'<text class="r-s" x="{_LEFT}" y="{bottom + 20}">begin</text>')
    parts.append(f'<text class="r-s" x="{_LEFT + _PLOT_WIDTH}" y="{bottom + 20}" text-anchor="end">end</text>')
    parts.append(
        f'<text class="r-s" x="{min(max(x, _LEFT + 90), _LEFT + _PLOT_WIDTH - 90):.1f}" y="{bottom + 20}" '
        f'text-anchor="middle">peak {size(most)}</text>'
    )
    for number, (_, owner, text) in enumerate(reversed(labels)):
        y = top + 14 + 22 * number
        parts.append(
            f'<rect x="{_LEFT + _PLOT_WIDTH + 24}" y="{y - 10}" width="12" height="12" fill="{COLOURS[owner]}"/>'
        )
        parts.append(f'<text class="r-t" x="{_LEFT + _PLOT_WIDTH + 44}" y="{y}">{escape(text)}</text>')
    return parts


def _sampled(length: int, peak: int, most: int = 400) -> list[int]:
    """Positions to draw; always the peak."""
    if length <= most:
        return list(range(length))
    return sorted({round(n * (length - 1) / (most - 1)) for n in range(most)} | {peak})


def _steps(points: Sequence[tuple[float, float]], back: bool = False) -> list[tuple[float, float]]:
    """Memory changes in steps, not along slopes."""
    found: list[tuple[float, float]] = []
    for number, (x, y) in enumerate(points):
        if number:
            before = points[number - 1]
            found.append((before[0], y) if back else (x, before[1]))
        found.append((x, y))
    return found


def _round_up(nbytes: int) -> float:
    """The end of the axis: a round number of the unit in which it is shown."""
    unit = 1
    while nbytes / unit >= 1024:
        unit *= 1024
    for limit in (
        1,
        2,
        4,
        8,
        12,
        16,
        20,
        24,
        32,
        40,
        48,
        64,
        80,
        96,
        128,
        160,
        200,
        256,
        320,
        400,
        512,
        640,
        800,
        1024,
    ):
        if nbytes <= limit * unit:
            return float(limit * unit)
    return float(nbytes)


def _bars(report: Figures, kernels: Sequence[object], top: int) -> list[str]:
    measured = report.seconds is not None and any(k.milliseconds for k in report.kernels)
    title = "Longest kernels, milliseconds of one call" if measured else "Kernels by bytes (the step was not run)"
    parts = [f'<text class="r-t" x="20" y="{top - 10}">{title}</text>']
    rows = [k for k in report.kernels if k in kernels]
    values = [(k.milliseconds or 0) if measured else float(k.nbytes or 0) for k in rows]
    most = max(values, default=0) or 1
    for number, (kernel, value) in enumerate(zip(rows, values, strict=True)):
        y = top + 24 * number
        width = 360 * value / most
        place = f" ({kernel.line})" if kernel.line else ""
        text = kernel.name + place
        text = text if len(text) <= 56 else text[:55] + "…"
        shown = milliseconds(value) if measured else size(value)
        more = (
            f", predicted {milliseconds(kernel.predicted_ms)}" if kernel.predicted_ms is not None and measured else ""
        )
        parts.append(f'<text class="r-t" x="400" y="{y + 13}" text-anchor="end">{escape(text)}</text>')
        parts.append(
            f'<rect x="410" y="{y + 1}" width="{max(1.0, width):.1f}" height="16" fill="{KINDS[kernel.kind]}"/>'
        )
        parts.append(f'<text class="r-s" x="{418 + max(1.0, width):.1f}" y="{y + 13}">{shown}{more}</text>')
    return parts
