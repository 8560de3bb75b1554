"""What the reference shows of a docstring: doctests as blocks to copy, and the Flax layers with their arguments.

An extension of griffe, which reads the docstrings from the source for mkdocstrings.
"""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import griffe

_PROMPT = re.compile(r"^( *)(>>>|\.\.\.)(?: (.*))?$")
_OPTION = re.compile(r" *# doctest:.*$")


def with_blocks(text: str) -> str:
    """A docstring whose doctests are code blocks without prompts, each output a block below its code."""
    lines: list[str] = []
    kind = ""  # of the block that is open

    def switch(to: str, indent: str = "") -> None:
        nonlocal kind
        if kind != to:
            if kind:
                lines.append(f"{indent}```")
            if to:
                lines.extend(["", f"{indent}```{to}"] if kind else [f"{indent}```{to}"])
            kind = to

    indent = ""
    for line in text.splitlines():
        if found := _PROMPT.match(line):
            indent = found[1]
            switch("python", indent)
            lines.append(indent + _OPTION.sub("", found[3] or ""))
        elif kind and line.strip():
            switch("text", indent)
            lines.append(line)
        else:
            switch("", indent)
            lines.append(line)
    switch("", indent)
    return "\n".join(lines)


def call_of(name: str, value: Any) -> str:
    """How to call a class whose arguments the source does not show, as a code block."""
    parts, keyword_only = [], False
    for parameter in inspect.signature(value).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            parts.append("*")
            keyword_only = True
        default = parameter.default
        parts.append(parameter.name if default is parameter.empty else f"{parameter.name}={default!r}")
    joined = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", ",\n    ".join(parts))
    return f"```python\n{name}(\n    {joined},\n)\n```\n\n"


class Docstrings(griffe.Extension):
    """Rewrites the docstrings of public names."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe for each object that it has read."""
        if obj.is_class and any(str(base) in ("NnxLayer", "LinenLayer") for base in getattr(obj, "bases", ())):
            value = getattr(importlib.import_module(obj.parent.path), obj.name)
            obj.docstring = griffe.Docstring(call_of(obj.name, value) + value.__doc__, parent=obj)
        if obj.docstring is not None and ">>>" in obj.docstring.value:
            obj.docstring.value = with_blocks(inspect.cleandoc(obj.docstring.value))
