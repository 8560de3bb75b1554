"""Frame and style of the pages that dejax writes: one file, nothing loaded from elsewhere, light and dark."""

from __future__ import annotations

from html import escape

STYLE = """
.dejax-report{font:15px/1.5 system-ui,sans-serif;max-width:960px;margin:24px auto;padding:0 16px;color:#1d2733}
.dejax-report h1{font-size:24px;margin:0 0 4px}.dejax-report h2{font-size:18px;margin:28px 0 8px}
.dejax-report p{margin:6px 0}.dejax-report .quiet{color:#5a6672}.dejax-report svg{max-width:100%;height:auto}
.dejax-report table{border-collapse:collapse;width:100%}.dejax-report td.n,.dejax-report th.n{text-align:right}
.dejax-report th,.dejax-report td{padding:4px 10px 4px 0;border-bottom:1px solid #d6dce3;text-align:left;font-size:14px}
.dejax-report code{font:13px ui-monospace,monospace}.dejax-report li{margin:8px 0}
@media(prefers-color-scheme:dark){body.dejax-page{background:#14191f}.dejax-page .dejax-report{color:#e6ebf0}
.dejax-page .dejax-report .quiet{color:#9fabb8}
.dejax-page .dejax-report th,.dejax-page .dejax-report td{border-color:#39434e}}
"""


def page(title: str, body: str) -> str:
    """A whole page around a body, which is one `div` of the class `dejax-report`."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width"><meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title>"
        f'<style>{STYLE}</style></head><body class="dejax-page">{body}</body></html>\n'
    )
