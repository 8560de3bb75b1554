"""The chart of README: one layer's training time, ours and the fastest peer's, for each graph and model.

`svg` writes plain SVG text, so that equal results give an equal file on every machine, which a test compares.
"""

from __future__ import annotations

import math
from typing import Any

from benchmarks import rgnn_report as report

_LEFT, _RIGHT, _TOP, _ROW, _GAP, _WIDTH = 130, 60, 74, 17, 12, 760
_LOWEST, _HIGHEST = 0.01, 1000.0
_OURS, _PEER, _INK, _GRID = "#1b6ac9", "#d1602b", "#24292f", "#d8dee4"


def svg(results: report.Results, settings: dict[str, Any] = report.BASE) -> str:
    """One row for each graph and model: our time, the fastest peer's, and how many times longer the peer takes."""
    cells = [c for m in report.MODELS for c in report.cells(results, settings) if c[1] == m]
    height = _TOP + len(cells) * _ROW + len(report.MODELS) * _GAP + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
        'font-size="12" role="img">',
        "<title>Training time of one layer: dejax and the fastest other implementation</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(12, 22, "One layer of width 64, forward and gradients: time on one NVIDIA H200 (log scale)", size=15),
        f'<circle cx="18" cy="41" r="5" fill="{_OURS}"/>',
        _text(28, 45, "dejax"),
        f'<circle cx="84" cy="41" r="5" fill="{_PEER}"/>',
        _text(94, 45, "fastest other: PyTorch Geometric, grouped products or torch.compile in PyTorch, plain JAX"),
        *_axis(height - 30),
    ]
    y, model = float(_TOP), None
    for graph, name in cells:
        if name != model:
            y += _GAP if model else 0
            model = name
            parts.append(_text(12, y + 4, report.MODELS[name], size=13))
        parts += _row(results, settings, (graph, name), y)
        y += _ROW
    return "\n".join([*parts, "</svg>", ""])


def _row(results: report.Results, settings: dict[str, Any], cell: tuple[str, str], y: float) -> list[str]:
    mine = report.ours(results, settings, *cell)
    peer = report.best_peer(results, settings, *cell, "training", "device")
    parts = [_text(_LEFT - 10, y + 4, cell[0], anchor="end")]
    if mine is None:
        return parts
    ours = report.milliseconds(mine, "training", "device")
    if peer is not None:
        ends = f'x1="{_x(ours):.1f}" x2="{_x(peer[1]):.1f}" y1="{y:g}" y2="{y:g}"'
        parts.append(f'<line {ends} stroke="#8c959f" stroke-width="2"/>')
        parts.append(_dot(_x(peer[1]), y, _PEER))
        parts.append(_text(_x(peer[1]) + 9, y + 4, f"{report.rounded(peer[1] / ours, 2)}x"))
    return [*parts, _dot(_x(ours), y, _OURS)]


def _axis(bottom: float) -> list[str]:
    parts = []
    for exponent in range(round(math.log10(_LOWEST)), round(math.log10(_HIGHEST)) + 1):
        x = _x(10.0**exponent)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 14}" y2="{bottom}" stroke="{_GRID}"/>')
        parts.append(_text(x, bottom + 16, f"{10.0**exponent:g} ms", anchor="middle"))
    return parts


def _x(milliseconds: float) -> float:
    share = math.log(milliseconds / _LOWEST) / math.log(_HIGHEST / _LOWEST)
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * share


def _dot(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:g}" r="5" fill="{colour}"/>'


def _text(x: float, y: float, text: str, size: int = 12, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{_INK}">{text}</text>'
