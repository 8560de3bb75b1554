"""The graph of Python source code: what its functions and classes define, call, inherit, import, raise and name.

It is made with `ast` only: nothing is imported or run. A name is resolved if that needs no types: definitions of the
same module, imports, `self.method` through base classes, `super()`. Any other name points at a node for the bare
identifier. All users of that identifier share the node.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

NODE_TYPES = ("module", "class", "function", "name")
MODULE, CLASS, FUNCTION, NAME = range(4)

EDGE_TYPES = {
    "defines": "module -> class or function at its top level",
    "has_method": "class -> function or class in its body",
    "encloses": "function -> function or class in its body",
    "named": "class or function -> its identifier",
    "imports": "module -> module",
    "uses_module": "class or function -> module whose name it reads",
    "inherits": "class -> class",
    "inherits_name": "class -> identifier of a base that is not resolved",
    "overrides": "function -> the function of a base class that it replaces",
    "decorated_by": "class or function -> class or function",
    "decorated_by_name": "class or function -> identifier",
    "calls": "definition -> class or function",
    "calls_name": "definition -> identifier",
    "references": "definition -> class or function that it reads without calling it",
    "references_name": "definition -> global or builtin identifier that it reads without calling it",
    "raises": "function -> class",
    "raises_name": "function -> identifier",
    "catches": "function -> class",
    "catches_name": "function -> identifier",
    "reads_attribute": "definition -> identifier of an attribute",
    "writes_attribute": "definition -> identifier of an attribute",
    "has_argument": "function -> identifier of a parameter",
    "passes_keyword": "definition -> identifier of a keyword in a call",
}
"""Name -> the nodes it joins. A "definition" is a class, function or module: the code of its own body."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_IMPORT_HOPS = 6  # longest chain of re-exports to follow: a package imports from a module that imports from its C twin


@dataclass(frozen=True, slots=True)
class Source:
    """One module: dotted name, whether it is a package's __init__, and its text."""

    name: str
    is_package: bool
    text: bytes


@dataclass(slots=True)
class CodeGraph:
    """Nodes in order of creation, edges without duplicates in order of first appearance.

    Attributes:
        kinds: the type of each node, an index of NODE_TYPES.
        names: dotted name of each module, class and function; the identifier itself for a name.
        modules: the module that each node belongs to (its own id for a module); -1 for identifiers.
        trees: node id -> syntax tree, for classes and functions.
        edges: [edges, 3] int64: sender, index of EDGE_TYPES, receiver.
    """

    kinds: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    modules: list[int] = field(default_factory=list)
    trees: dict[int, Definition] = field(default_factory=dict)
    edges: np.ndarray = field(default_factory=lambda: np.zeros((0, 3), np.int64))


@dataclass(slots=True)
class _SourceModule:
    node: int
    name: str
    is_package: bool
    tree: ast.Module
    definitions: dict[str, int] = field(default_factory=dict)
    imported_modules: dict[str, str] = field(default_factory=dict)  # local name -> dotted name
    imported_names: dict[str, tuple[str, str]] = field(default_factory=dict)  # local name -> (module, name)
    star_imports: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Scope:
    node: int
    module: _SourceModule
    enclosing_class: int | None  # the class of the method that this is, or is nested in
    self_name: str | None  # its first parameter
    local_names: frozenset[str]
    local_definitions: Mapping[str, int]


def build_code_graph(sources: Iterable[Source], on_module: Callable[[], None] = lambda: None) -> CodeGraph:
    """Parses every source and links them. A source that does not parse is left out.

    Args:
        sources: modules in the order in which they are numbered; the result depends on nothing else.
        on_module: called after each module was parsed, and again after it was linked.
    """
    return _CodeGraphBuilder().build(sources, on_module)


class _CodeGraphBuilder:
    def __init__(self) -> None:
        self.graph = CodeGraph()
        self.modules: dict[str, _SourceModule] = {}
        self.identifiers: dict[str, int] = {}
        self.members: dict[int, dict[str, int]] = {}  # class -> its body's definitions
        self.bases: dict[int, list[int]] = {}
        self.node_of: dict[ast.AST, int] = {}
        self.edges: dict[tuple[int, int, int], None] = {}  # a dict keeps the order
        self.type_ids = {name: i for i, name in enumerate(EDGE_TYPES)}

    def build(self, sources: Iterable[Source], on_module: Callable[[], None]) -> CodeGraph:
        for source in sources:
            on_module()
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of the sources, e.g. an old escape in a string
                    tree = ast.parse(source.text)
            except (SyntaxError, ValueError):
                continue
            module = _SourceModule(self.node(MODULE, source.name, -1), source.name, source.is_package, tree)
            self.modules[source.name] = module
            self.define(tree, module, module.definitions, module.node, source.name, "defines")
        for module in self.modules.values():
            self.collect_imports(module)
        for module in self.modules.values():
            self.link_bases(module)
        for module in self.modules.values():
            scope = _Scope(module.node, module, None, None, frozenset(), {})
            self.visit_body(module.tree, scope)
            on_module()
        self.graph.edges = np.array(list(self.edges), np.int64).reshape(-1, 3)
        return self.graph

    def node(self, kind: int, name: str, module: int) -> int:
        index = len(self.graph.kinds)
        self.graph.kinds.append(kind)
        self.graph.names.append(name)
        self.graph.modules.append(index if kind == MODULE else module)
        return index

    def identifier(self, name: str) -> int:
        if name not in self.identifiers:
            self.identifiers[name] = self.node(NAME, name, -1)
        return self.identifiers[name]

    def edge(self, sender: int, kind: str, receiver: int) -> None:
        if sender != receiver:
            self.edges[sender, self.type_ids[kind], receiver] = None

    def define(
        self, tree: ast.AST, module: _SourceModule, table: dict[str, int], owner: int, prefix: str, relation: str
    ) -> None:
        """Makes a node for each definition in the tree, and for the definitions inside it."""
        for child in _definitions(tree):
            kind = CLASS if isinstance(child, ast.ClassDef) else FUNCTION
            index = self.node(kind, f"{prefix}.{child.name}", module.node)
            self.graph.trees[index] = child
            self.node_of[child] = table[child.name] = index
            self.edge(owner, relation, index)
            self.edge(index, "named", self.identifier(child.name))
            inside = self.members.setdefault(index, {})
            self.define(
                child, module, inside, index, f"{prefix}.{child.name}", "has_method" if kind == CLASS else "encloses"
            )

    def collect_imports(self, module: _SourceModule) -> None:
        """Imports anywhere in the module, also inside functions: a name seldom has two meanings in one file."""
        for statement in ast.walk(module.tree):
            if isinstance(statement, ast.Import):
                for alias in statement.names:
                    name = alias.name if alias.asname else alias.name.partition(".")[0]
                    module.imported_modules[alias.asname or name] = name
                    self.import_module(module, alias.name)
            elif isinstance(statement, ast.ImportFrom):
                target = self.absolute(module, statement.module, statement.level)
                self.import_module(module, target)
                for alias in statement.names:
                    if alias.name == "*":
                        module.star_imports.append(target)
                    elif f"{target}.{alias.name}" in self.modules:
                        module.imported_modules[alias.asname or alias.name] = f"{target}.{alias.name}"
                        self.import_module(module, f"{target}.{alias.name}")
                    else:
                        module.imported_names[alias.asname or alias.name] = (target, alias.name)

    @staticmethod
    def absolute(module: _SourceModule, target: str | None, level: int) -> str:
        if not level:
            return target or ""
        parts = module.name.split(".")
        parts = parts[: len(parts) - level + module.is_package]
        return ".".join([*parts, target] if target else parts)

    def import_module(self, module: _SourceModule, name: str) -> None:
        if name in self.modules:
            self.edge(module.node, "imports", self.modules[name].node)

    def link_bases(self, module: _SourceModule) -> None:
        scope = _Scope(module.node, module, None, None, frozenset(), {})
        for tree in ast.walk(module.tree):
            if isinstance(tree, ast.ClassDef):
                index = self.node_of[tree]
                resolved = [self.resolve(base, scope) for base in tree.bases]
                self.bases[index] = [r for r in resolved if isinstance(r, int) and self.graph.kinds[r] == CLASS]

    # The meaning of a name: an int for a definition, a _SourceModule, a str for an unresolved identifier, else None.

    def lookup(self, module: _SourceModule, name: str, hops: int = _IMPORT_HOPS) -> int | _SourceModule | None:
        if name in module.definitions:
            return module.definitions[name]
        if name in module.imported_modules:
            return self.modules.get(module.imported_modules[name])
        if hops and name in module.imported_names:
            target, original = module.imported_names[name]
            if target in self.modules:
                return self.lookup(self.modules[target], original, hops - 1)
        for target in module.star_imports if hops else ():
            if target in self.modules and (found := self.lookup(self.modules[target], name, hops - 1)) is not None:
                return found
        return None

    def member(self, owner: int, name: str, *, skip_own: bool = False) -> int | None:
        """A definition of a class or of its bases, breadth first (close enough to the method resolution order)."""
        queue, seen = [owner], {owner}
        for position in queue:
            if name in self.members.get(position, {}) and not (skip_own and position == owner):
                return self.members[position][name]
            for base in self.bases.get(position, ()):
                if base not in seen:
                    seen.add(base)
                    queue.append(base)
        return None

    def resolve(self, expression: ast.AST, scope: _Scope) -> int | _SourceModule | str | None:
        """What a name or an attribute stands for: a node, a module, or a name that stays unresolved."""
        if isinstance(expression, ast.Name):
            if expression.id in scope.local_definitions:
                return scope.local_definitions[expression.id]
            if expression.id in scope.local_names:
                return expression.id
            meaning = self.lookup(scope.module, expression.id)
            if meaning is None and expression.id in scope.module.imported_names:
                return scope.module.imported_names[expression.id][1]
            return expression.id if meaning is None else meaning
        if isinstance(expression, ast.Attribute):
            value = expression.value
            found: int | _SourceModule | None = None
            if isinstance(value, ast.Name) and value.id == scope.self_name and scope.enclosing_class is not None:
                found = self.member(scope.enclosing_class, expression.attr)
            elif _is_super(value) and scope.enclosing_class is not None:
                found = self.member(scope.enclosing_class, expression.attr, skip_own=True)
            else:
                target = self.resolve(value, scope) if isinstance(value, (ast.Name, ast.Attribute)) else None
                if isinstance(target, _SourceModule):
                    found = self.modules.get(f"{target.name}.{expression.attr}") or self.lookup(target, expression.attr)
                elif isinstance(target, int):
                    found = self.member(target, expression.attr)
            return expression.attr if found is None else found
        if isinstance(expression, ast.Call):
            return self.resolve(expression.func, scope)
        if isinstance(expression, ast.Subscript):
            return self.resolve(expression.value, scope)
        return None

    def relate(self, scope: _Scope, sender: int, kind: str, expression: ast.AST) -> None:
        """An edge to the meaning of the expression: `kind` to a definition, `kind`_name to an identifier."""
        target = self.resolve(expression, scope)
        if isinstance(target, int):
            self.edge(sender, kind, target)
        elif isinstance(target, str):
            self.edge(sender, f"{kind}_name", self.identifier(target))

    # The walk over bodies: `visit` emits the edges of one definition's own code, and opens a scope for each inner one.

    def visit_definition(self, tree: Definition, outer: _Scope) -> None:
        index = self.node_of[tree]
        for decorator in tree.decorator_list:
            self.relate(outer, index, "decorated_by", decorator)
        if isinstance(tree, ast.ClassDef):
            for base in tree.bases:
                self.relate(outer, index, "inherits", base)
            scope = _Scope(index, outer.module, index, None, frozenset(), {})
        else:
            arguments = [*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs]
            arguments += [a for a in (tree.args.vararg, tree.args.kwarg) if a]
            for argument in arguments:
                self.edge(index, "has_argument", self.identifier(argument.arg))
            is_method = outer.enclosing_class is not None and outer.node == outer.enclosing_class
            self_name = outer.self_name
            if is_method:
                decorators = {d.id for d in tree.decorator_list if isinstance(d, ast.Name)}
                self_name = arguments[0].arg if arguments and "staticmethod" not in decorators else None
                replaced = self.member(outer.node, tree.name, skip_own=True)
                if replaced is not None:
                    self.edge(index, "overrides", replaced)
            local_names = {a.arg for a in arguments} | set(_assigned(tree)) | outer.local_names
            definitions = {**outer.local_definitions, **self.members[index]}
            scope = _Scope(index, outer.module, outer.enclosing_class, self_name, frozenset(local_names), definitions)
        self.visit_body(tree, scope)

    def visit_body(self, tree: ast.Module | Definition, scope: _Scope) -> None:
        for statement in tree.body:
            self.visit(statement, scope)

    def visit(self, tree: ast.AST, scope: _Scope) -> None:
        if isinstance(tree, Definition):
            self.visit_definition(tree, scope)
            return
        if isinstance(tree, ast.Call):
            self.relate(scope, scope.node, "calls", tree.func)
            for keyword in tree.keywords:
                if keyword.arg:
                    self.edge(scope.node, "passes_keyword", self.identifier(keyword.arg))
            self.visit_inside(tree.func, scope)
            for child in (*tree.args, *tree.keywords):
                self.visit(child, scope)
            return
        if isinstance(tree, ast.Raise) and tree.exc is not None:
            self.relate(scope, scope.node, "raises", tree.exc)
            if isinstance(tree.exc, ast.Call):  # `raise Error()` raises the class and does not call it
                for child in (*tree.exc.args, *tree.exc.keywords):
                    self.visit(child, scope)
            return
        if isinstance(tree, ast.ExceptHandler) and tree.type is not None:
            for caught in tree.type.elts if isinstance(tree.type, ast.Tuple) else (tree.type,):
                self.relate(scope, scope.node, "catches", caught)
            for statement in tree.body:
                self.visit(statement, scope)
            return
        if isinstance(tree, ast.Attribute):
            self.visit_attribute(tree, scope)
        elif isinstance(tree, ast.Name):
            self.visit_name(tree, scope)
        self.visit_inside(tree, scope)

    def visit_inside(self, tree: ast.AST, scope: _Scope) -> None:
        for child in ast.iter_child_nodes(tree):
            self.visit(child, scope)

    def visit_attribute(self, tree: ast.Attribute, scope: _Scope) -> None:
        if isinstance(tree.ctx, ast.Load):
            target = self.resolve(tree, scope)
            if isinstance(target, int):
                self.edge(scope.node, "references", target)
            elif isinstance(target, str):
                self.edge(scope.node, "reads_attribute", self.identifier(target))
        else:
            self.edge(scope.node, "writes_attribute", self.identifier(tree.attr))

    def visit_name(self, tree: ast.Name, scope: _Scope) -> None:
        if not isinstance(tree.ctx, ast.Load) or tree.id in scope.local_names:
            return
        target = self.resolve(tree, scope)
        if isinstance(target, int):
            self.edge(scope.node, "references", target)
        elif isinstance(target, _SourceModule):
            if self.graph.kinds[scope.node] != MODULE:
                self.edge(scope.node, "uses_module", target.node)
        elif isinstance(target, str):
            self.edge(scope.node, "references_name", self.identifier(target))


def _definitions(tree: ast.AST) -> Iterator[Definition]:
    """The definitions in the tree's own body, also under if, try and with, but not inside other definitions."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, Definition):
            yield child
        elif isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            yield from _definitions(child)


def _assigned(tree: ast.AST) -> Iterator[str]:
    """Names that a function's own code binds."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id
        elif isinstance(child, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and child.name:
            yield child.name
        if not isinstance(child, Definition):
            yield from _assigned(child)


def _is_super(tree: ast.AST) -> bool:
    return isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.func.id == "super"
