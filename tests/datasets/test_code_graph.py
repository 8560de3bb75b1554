"""The code graph of small sources: every relation, name resolution, order."""

import subprocess
import sys

import pytest

from dejax.datasets.graphs._code_graph import EDGE_TYPES, NODE_TYPES, CodeGraph, Source, build_code_graph

BASE = '''
"""A docstring."""
LIMIT = 3

def helper(first, /, second, *rest, third=0, **options):
    return unknown_global

class Base(Exception):
    def run(self, value):
        self.state = value
        return self.stop(flag=LIMIT)

    def stop(self):
        raise Base("stop")

    @staticmethod
    def pure(thing):
        return thing.run()
'''
USER = """
import package.base
from package import base as b
from package.base import Base, helper as h
from .base import *
import os.path

@h
@missing.decorate(1)
class Child(Base, mixins.Mixin):
    def run(self, value):
        super().run(value)
        try:
            h(value)
        except (KeyError, Base) as error:
            raise ValueError from error
        except OSError:
            raise b.Base()

    def other(self):
        def inner():
            return self.run(1)
        handler = Child
        package.base.helper()
        b.helper
        return inner().attribute

if True:
    def conditional(x):
        print(x)
        match x:
            case [1, *tail]:
                return tail
"""


@pytest.fixture(scope="module")
def graph() -> CodeGraph:
    return build_code_graph(
        [
            Source("package", True, b""),
            Source("package.base", False, BASE.encode()),
            Source("package.user", False, USER.encode()),
            Source("package.broken", False, b"def (:"),
        ]
    )


def edges(graph: CodeGraph, kind: str) -> set[tuple[str, str]]:
    index = list(EDGE_TYPES).index(kind)
    return {(graph.names[s], graph.names[r]) for s, t, r in graph.edges.tolist() if t == index}


B, U = "package.base", "package.user"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("defines", {(B, f"{B}.helper"), (B, f"{B}.Base"), (U, f"{U}.Child"), (U, f"{U}.conditional")}),
        (
            "has_method",
            {(f"{B}.Base", f"{B}.Base.{name}") for name in ("run", "stop", "pure")}
            | {(f"{U}.Child", f"{U}.Child.{name}") for name in ("run", "other")},
        ),
        ("encloses", {(f"{U}.Child.other", f"{U}.Child.other.inner")}),
        ("imports", {(U, B), (U, "package")}),
        ("uses_module", {(f"{U}.Child.other", B), (f"{U}.Child.other", "package")}),
        ("inherits", {(f"{U}.Child", f"{B}.Base")}),
        ("inherits_name", {(f"{U}.Child", "Mixin"), (f"{B}.Base", "Exception")}),
        ("overrides", {(f"{U}.Child.run", f"{B}.Base.run")}),
        ("decorated_by", {(f"{U}.Child", f"{B}.helper")}),
        ("decorated_by_name", {(f"{U}.Child", "decorate"), (f"{B}.Base.pure", "staticmethod")}),
        (
            "calls",
            {
                (f"{B}.Base.run", f"{B}.Base.stop"),
                (f"{U}.Child.run", f"{B}.Base.run"),
                (f"{U}.Child.run", f"{B}.helper"),
                (f"{U}.Child.other", f"{B}.helper"),
                (f"{U}.Child.other", f"{U}.Child.other.inner"),
                (f"{U}.Child.other.inner", f"{U}.Child.run"),
            },
        ),
        (
            "calls_name",
            {(f"{B}.Base.pure", "run"), (f"{U}.Child.run", "super"), (f"{U}.conditional", "print")},
        ),
        ("raises", {(f"{B}.Base.stop", f"{B}.Base"), (f"{U}.Child.run", f"{B}.Base")}),
        ("raises_name", {(f"{U}.Child.run", "ValueError")}),
        ("catches", {(f"{U}.Child.run", f"{B}.Base")}),
        ("catches_name", {(f"{U}.Child.run", "KeyError"), (f"{U}.Child.run", "OSError")}),
        ("writes_attribute", {(f"{B}.Base.run", "state")}),
        ("passes_keyword", {(f"{B}.Base.run", "flag")}),
        ("references", {(f"{U}.Child.other", f"{U}.Child"), (f"{U}.Child.other", f"{B}.helper")}),
    ],
)
def test_relations(graph, kind, expected):
    assert edges(graph, kind) == expected


def test_names_and_arguments(graph):
    assert (f"{B}.Base.run", "run") in edges(graph, "named") and (f"{U}.Child.run", "run") in edges(graph, "named")
    arguments = {name for function, name in edges(graph, "has_argument") if function == f"{B}.helper"}
    assert arguments == {"first", "second", "rest", "third", "options"}
    assert (f"{B}.helper", "unknown_global") in edges(graph, "references_name")
    assert (f"{U}.Child.other", "attribute") in edges(graph, "reads_attribute")
    assert not any(name in ("tail", "error", "handler") for _, name in edges(graph, "references_name"))  # locals


def test_nodes(graph):
    kinds = {name: NODE_TYPES[kind] for name, kind in zip(graph.names, graph.kinds, strict=True)}
    assert kinds["package"] == kinds[U] == "module"
    assert kinds[f"{B}.Base"] == "class" and kinds[f"{B}.Base.run"] == "function" and kinds["run"] == "name"
    assert "package.broken" not in kinds
    owner = dict(zip(graph.names, graph.modules, strict=True))
    assert graph.names[owner[f"{U}.Child.other.inner"]] == U and owner["run"] == -1
    assert len(graph.edges) == len({tuple(edge) for edge in graph.edges.tolist()})


def test_no_sources():
    graph = build_code_graph([])
    assert graph.edges.shape == (0, 3) and graph.names == []


def test_the_same_in_every_process():
    code = (
        "from dejax.datasets.graphs._code_graph import *; import hashlib;"
        f"sources = [Source('package.base', False, {BASE.encode()!r}), Source('u', False, {USER.encode()!r})];"
        "g = build_code_graph(sources);"
        "print(hashlib.sha256(repr((g.kinds, g.names, g.edges.tolist())).encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(digests) == 1 and len(digests.pop()) == 65
