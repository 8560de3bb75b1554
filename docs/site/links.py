"""Names lead to what they name: `sample_blocks` to the reference, docs/segment.md in a docstring to that page.

A hook of mkdocs. `build.py` writes the names and their places, as `names.json` beside the settings.
"""

from __future__ import annotations

import functools
import html as escapes
import json
import re
from pathlib import Path
from typing import Any

_PART = re.compile(r"(<a\b.*?</a>|<pre\b.*?</pre>|<h[1-6]\b.*?</h[1-6]>|<code>[^<]*</code>)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_][\w.]*")
_DEFINED = re.compile(r"\b(?:class|def)\s+(\w+)")
_OPTION = re.compile(r"(?<![\w-])--?\w[\w-]*")
_PAGE = re.compile(r"(?<![\w/])docs/[\w/]+\.md")


@functools.cache
def _places(settings: str) -> dict[str, str]:
    """Where each name, such as `FeatureStore.gather`, is in the reference; the title of each page."""
    return dict(json.loads((Path(settings).parent / "names.json").read_text(encoding="utf-8")))


def linked(html: str, start: str, places: dict[str, str]) -> str:
    """A page whose names lead to their places; `start` leads from the page to the root of the site.

    A name that the code of the page itself defines, such as a class `Block` of an example, is not the library's there.
    """
    own = set(_DEFINED.findall(re.sub(r"<[^>]*>", "", " ".join(re.findall(r"<pre\b.*?</pre>", html, re.DOTALL)))))

    def page_link(page: str) -> str:
        return f'<a href="{start}{page[:-3]}.html">{places.get(page, page)}</a>'

    def link(code: str) -> str:
        text = escapes.unescape(code[len("<code>") : -len("</code>")])
        if text in places and _PAGE.fullmatch(text):
            return page_link(text)
        if text.startswith("-"):  # a browser would break the line after the hyphens of an option
            return _OPTION.sub(lambda option: f'<span class="option">{option[0]}</span>', code)
        name = _NAME.match(text)
        if name is None or name[0] in own or not re.fullmatch(r"(\(.*\))?", text[name.end() :]):
            return code
        place = places.get(name[0].rstrip("."))
        return f'<a class="name" href="{start}{place}">{code}</a>' if place else code

    def text(part: str) -> str:
        if part.startswith(("<a", "<pre", "<h")):
            return part
        return _PAGE.sub(lambda page: page_link(page[0]), part)

    return "".join(link(part) if part.startswith("<code>") else text(part) for part in _PART.split(html))


def on_page_content(html: str, *, page: Any, config: Any, **_: Any) -> str:
    """Called by mkdocs with the HTML of each page."""
    return linked(html, "../" * page.url.count("/"), _places(config.config_file_path))
