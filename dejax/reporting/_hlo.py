"""XLA's compiled program, read from its text: instructions in the order of execution, with sizes and source lines."""

from __future__ import annotations

import math
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import jax

_BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16, "tf32": 32, "c64": 64, "c128": 128}
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_DEFINITION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*)$")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*->.*\{$")
_ELEMENTWISE = {
    "add",
    "subtract",
    "multiply",
    "divide",
    "maximum",
    "minimum",
    "select",
    "tanh",
    "exponential",
    "negate",
}
_HOST_SPACE = "S(5)"
_LIBRARIES = tuple(
    str(Path(place)) for place in {*sysconfig.get_paths().values(), str(Path(jax.__file__).parents[1])} if place
)
_OURS = str(Path(__file__).parents[1])


@dataclass(frozen=True, slots=True)
class HloShape:
    """One array of an instruction's result.

    Attributes:
        text: dtype and sizes, as in `f32[8,16]`.
        nbytes: its size.
        on_host: whether XLA placed it in host memory.
    """

    text: str
    nbytes: int
    on_host: bool


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a computation.

    Attributes:
        name, opcode: as in the text.
        shapes: the arrays of the result; several for a tuple.
        operands: names of the operands.
        calls: names of the computations that it calls.
        target: the target of a custom call.
        op_name: the path of names that JAX gives it.
        frame: number of its stack frame; 0 where it has none.
        index: the index of a `get-tuple-element`, or the number of a parameter.
        trips: how often a loop runs, where XLA knows.
        alias: whether the result shares the operand's memory.
        elementwise: whether XLA may write it over an operand of the same size.
        root: whether it is the result of its computation.
    """

    name: str
    opcode: str
    shapes: tuple[HloShape, ...]
    operands: tuple[str, ...]
    calls: tuple[str, ...] = ()
    target: str = ""
    op_name: str = ""
    frame: int = 0
    index: int = 0
    trips: int = 1
    alias: bool = False
    elementwise: bool = False
    root: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the result."""
        return sum(shape.nbytes for shape in self.shapes)

    @property
    def is_backward(self) -> bool:
        """Whether it belongs to the transposed part of a differentiated function."""
        return "transpose(" in self.op_name


@dataclass(slots=True)
class Module:
    """A compiled program.

    Attributes:
        computations: instructions by computation.
        entry: name of the computation that runs.
        aliased: numbers of the entry's results that reuse a donated argument.
        frames: stack frames, (line of a file, parent), by number.
    """

    computations: dict[str, list[Instruction]] = field(default_factory=dict)
    entry: str = ""
    aliased: frozenset[int] = frozenset()
    frames: dict[int, tuple[str, int]] = field(default_factory=dict)

    def instructions(self) -> Iterator[tuple[Instruction, int]]:
        """Each instruction that runs, with the number of runs. Instructions inside of a fusion count as the fusion."""
        yield from self._of(self.entry, 1)

    def _of(self, name: str, times: int) -> Iterator[tuple[Instruction, int]]:
        for instruction in self.computations.get(name, ()):
            if instruction.opcode in ("while", "call", "conditional"):
                inner = times * (instruction.trips if instruction.opcode == "while" else 1)
                for called in instruction.calls:
                    yield from self._of(called, inner)
            else:
                yield instruction, times

    def line(self, instruction: Instruction) -> str:
        """The innermost line of the user's own code, as in `model.py:12`; "" where none is known."""
        frame, seen = instruction.frame, set()
        while frame in self.frames and frame not in seen:
            seen.add(frame)
            place, parent = self.frames[frame]
            if not place.startswith((*_LIBRARIES, _OURS)) or place.startswith("<"):
                return short(place)
            frame = parent
        return ""


def short(place: str) -> str:
    """A place without its folder."""
    path, _, line = place.rpartition(":")
    return f"{Path(path).name}:{line}" if path else place


def parse(text: str) -> Module:
    """Reads the text of `compiled.as_text()`."""
    module = Module()
    lines = text.splitlines()
    module.aliased = _aliased(lines[0] if lines else "")
    module.frames = _frames(lines)
    current: list[Instruction] | None = None
    for line in lines:
        if header := _HEADER.match(line):
            current = module.computations.setdefault(header[2], [])
            if header[1]:
                module.entry = header[2]
        elif line.startswith("}"):
            current = None
        elif current is not None and (found := _DEFINITION.match(line)):
            instruction = _instruction(found[2], found[3], root=bool(found[1]))
            if instruction is not None:
                current.append(instruction)
    return module


def _instruction(name: str, rest: str, *, root: bool) -> Instruction | None:
    """Parses the text behind `name = `: shape, opcode, operands and attributes; None if it is no instruction."""
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    kind = rest[:end]
    call = re.match(r"\s*([\w\-]+)\(", rest[end:])
    if call is None:
        return None
    start = end + call.end() - 1
    stop = _closing(rest, start)
    arguments, attributes = rest[start + 1 : stop], rest[stop + 1 :]
    opcode = call[1]
    called = re.findall(r"(?:calls|to_apply|condition|body)=%?([\w.\-]+)", attributes)
    if branches := re.search(r"branch_computations=\{([^}]*)\}", attributes):
        called += re.findall(r"%?([\w.\-]+)", branches[1])
    trips = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', attributes)
    target = re.search(r'custom_call_target="([^"]*)"', attributes)
    op_name = re.search(r'op_name="((?:[^"\\]|\\.)*)"', attributes)
    frame = re.search(r"stack_frame_id=(\d+)", attributes)
    index = re.search(r"\bindex=(\d+)", attributes)
    number = int(arguments) if opcode == "parameter" and arguments.isdigit() else int(index[1]) if index else 0
    return Instruction(
        name=name,
        opcode=opcode,
        shapes=_shapes(kind),
        operands=tuple(re.findall(r"%([\w.\-]+)", arguments)),
        calls=tuple(called),
        target=target[1] if target else "",
        op_name=op_name[1].replace('\\"', '"').replace("\\'", "'") if op_name else "",
        frame=int(frame[1]) if frame else 0,
        index=number,
        trips=int(trips[1]) if trips else 1,
        elementwise="kind=kLoop" in attributes or opcode in _ELEMENTWISE,
        alias="output_to_operand_aliasing=" in attributes,
        root=root,
    )


def _closing(text: str, start: int) -> int:
    """Position of the parenthesis that closes the one at `start`."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if depth == 0:
            return at
    return len(text) - 1


def _shapes(text: str) -> tuple[HloShape, ...]:
    found = []
    for dtype, sizes, layout in _ARRAY.findall(text):
        digits = re.search(r"\d+", dtype)
        bits = _BITS.get(dtype, int(digits[0]) if digits else 0)
        count = math.prod(int(re.sub(r"\D", "", size) or 0) for size in sizes.split(",")) if sizes else 1
        found.append(HloShape(f"{dtype}[{sizes}]", math.ceil(count * bits / 8), _HOST_SPACE in layout))
    return tuple(found)


def _aliased(header: str) -> frozenset[int]:
    found = re.search(r"input_output_alias=\{(.*?)\}, entry", header) or re.search(r"input_output_alias=\{(.*)", header)
    return frozenset(int(n or 0) for n in re.findall(r"\{(\d*)\}: \(\d+", found[1])) if found else frozenset()


def _frames(lines: list[str]) -> dict[int, tuple[str, int]]:
    """Stack frames from the tables behind the header."""
    tables: dict[str, dict[int, str]] = {}
    current: dict[int, str] | None = None
    for line in lines[1:]:
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            current = tables.setdefault(line, {})
        elif current is not None and (entry := re.match(r"(\d+) (.*)", line)):
            current[int(entry[1])] = entry[2]
        elif line.startswith(("%", "ENTRY")):
            break
    files = {number: text.strip('"') for number, text in tables.get("FileNames", {}).items()}
    places = {}
    for number, text in tables.get("FileLocations", {}).items():
        found = re.search(r"file_name_id=(\d+).*?\bline=(\d+)", text)
        if found:
            places[number] = f"{files.get(int(found[1]), '?')}:{found[2]}"
    frames = {}
    for number, text in tables.get("StackFrames", {}).items():
        found = re.search(r"file_location_id=(\d+)(?: parent_frame_id=(\d+))?", text)
        if found:
            # XLA prints the parent's number plus 1, so that the outermost frame has itself as its parent.
            frames[number] = (places.get(int(found[1]), ""), int(found[2] or 1) - 1)
    return frames
