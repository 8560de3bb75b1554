"""The bytes, FLOPs and predicted time of each kernel instance: bytes, by how they are read, over bandwidths.

The model knows counts and not the graph. It assumes skewed degrees, which decide how often a cache has a gathered row,
and long segments in traversals of edges, or of many pairs of each node. Its constants were fitted to kernels of eight
graphs and three models on an H200; docs/performance/plans.md says how well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dejax.pallas.machine import H200
from dejax.pallas.products.product_schedule import rows_per_part, rows_per_split
from dejax.rgnn.ir.inter import VIAS, Space, spec_sizes
from dejax.rgnn.ir.intra import Gemm, Instance, Kernels, Operand, RowProducts, Traversal, WeightGradient
from dejax.rgnn.ir.row_sums import row_sums
from dejax.rgnn.passes import Counts, Cut
from dejax.rgnn.passes.storage import encoded_values, shared_encodings


@dataclass(frozen=True, slots=True)
class CostConstants:
    """Ceilings of a device, and the part of them that kernels reach; fitted to whole kernels on an H200.

    `dejax.pallas.machine.Machine` has what schedules need: sizes and latencies of the device that runs. These constants
    predict times, and are an H200's whatever the device.

    Attributes:
      bytes_per_second: of a copy, bytes read plus written.
      cache_bytes_per_second: of rows that are found in the L2 cache.
      weight_gradient_cache_bytes_per_second: the same for weight gradients, which load rows ahead.
      traversal_cache_bytes_per_second: the same for traversals, most of whose rows are row-scaled float16.
      kept_bytes: how much of a gathered table the cache holds.
      skew: if the cache holds a share s of a table, s ** skew of the reads find their row in it.
      near_bytes: a narrow value gathered from a larger table than this moves 64 bytes instead of 32.
      flops: of products, by precision; in `f32`, a third of the rate of float16 products.
      scalar_flops: without tensor cores.
      launch_seconds: of a kernel without work.
      gemm, weight_gradient, traversal, map: the share of the copy bandwidth that each template reaches.
      gemm_seconds, weight_gradient_seconds, traversal_seconds: constant time of each template.
      long_segments_seconds: constant time of a traversal that splits long segments.
      position_seconds: time of a weight gradient for each of the first 256 positions of a split.
      elements_per_second: of tiles in a traversal's body, by one operator.
      entry_elements, segment_elements: the fixed work for one entry, and for one segment, in elements.
      map_elements_per_second: elements that the operators of a map compute, exponentials among them.
    """

    bytes_per_second: float = H200.bytes_per_second
    cache_bytes_per_second: float = 3.4e12
    weight_gradient_cache_bytes_per_second: float = 4.3e12
    traversal_cache_bytes_per_second: float = 5.5e12
    kept_bytes: float = 55e6
    skew: float = 0.44
    near_bytes: float = 48e6
    flops: tuple[tuple[str, float], ...] = (("f32", 120e12), ("tf32", 350e12), ("bf16", 700e12))
    scalar_flops: float = 55e12
    launch_seconds: float = 2.8e-6
    gemm: float = 0.72
    weight_gradient: float = 0.74
    traversal: float = 0.80
    map: float = 0.94
    gemm_seconds: float = 2.4e-6
    weight_gradient_seconds: float = 3.4e-6
    traversal_seconds: float = 2.1e-6
    long_segments_seconds: float = 2.3e-6
    position_seconds: float = 5.8e-9
    elements_per_second: float = 3.8e12
    entry_elements: int = 10
    segment_elements: int = 39
    map_elements_per_second: float = 7.5e12


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes to and from memory, floating-point operations of products, and the predicted time in seconds."""

    bytes: int
    flops: int
    seconds: float


@dataclass(slots=True)
class _Traffic:
    """Bytes from and to device memory, and bytes that the cache has."""

    memory: float = 0.0
    cache: float = 0.0


class CostModel:
    """Costs of the instances of one level-2 program.

    Args:
      kernels: the program.
      counts: of the graph.
      precision: of products.
      row_scaled_inputs: inputs that come as row-scaled float16.
      encoded: inputs that this program converts to row-scaled float16 because another reads them so, too.
      constants: the ceilings of the device.
    """

    def __init__(
        self,
        kernels: Kernels,
        counts: Counts,
        precision: str = "tf32",
        row_scaled_inputs: frozenset[int] = frozenset(),
        encoded: frozenset[int] = frozenset(),
        constants: CostConstants = CostConstants(),
    ) -> None:
        self.kernels, self.counts, self.precision, self.constants = kernels, counts, precision, constants
        written = kernels.row_scaled | row_scaled_inputs
        encoded |= encoded_values(kernels, counts.rows, written) if precision == "tf32" else frozenset()
        self.encoded, self.row_scaled = encoded, written | encoded
        first = kernels.first_readers()
        # Narrow values of entries that one traversal writes lie side by side.
        traversals = [t for t in kernels.instances if isinstance(t, Traversal) and t.via is not None]
        self.array_of = {v: t.entry_outputs[0] for t in traversals for v in t.entry_outputs}
        # The first instance that reads a value as row-scaled float16 converts it.
        self.encodes = {number: [v for v in self.encoded if first[v] == number] for number in first.values()}

    def costs(self) -> list[Cost]:
        """The cost of each instance, in order."""
        return [self._cost(number, instance) for number, instance in enumerate(self.kernels.instances)]

    def _cost(self, number: int, instance: Instance) -> Cost:
        if isinstance(instance, Gemm):
            traffic, flops, seconds = self._gemm(instance)
        elif isinstance(instance, WeightGradient):
            traffic, flops, seconds = self._weight_gradient(instance)
        elif isinstance(instance, RowProducts):
            traffic, flops, seconds = self._row_products(instance)
        elif isinstance(instance, Traversal):
            traffic, flops, seconds = self._traversal(instance)
        else:
            ops, rows = self.kernels.program.ops, self.counts.rows
            moved = sum(rows(ops[v].space) * ops[v].row_bytes for v in (*instance.reads, *instance.writes))
            products = [ops[i] for i in instance.ops if ops[i].name == "linear"]
            flops = sum(2 * rows(op.space) * ops[op.args[1]].width for op in products)
            traffic = _Traffic(moved)
            seconds = self.constants.launch_seconds + max(
                moved / self.constants.bytes_per_second, flops / self.constants.scalar_flops
            )
        for v in self.encodes.get(number, []):
            op = self.kernels.program.ops[v]
            moved = self.counts.rows(op.space) * (op.row_bytes + 2 * op.width)
            traffic.memory += moved
            seconds += self.constants.launch_seconds + moved / (self.constants.bytes_per_second * self.constants.map)
        return Cost(int(traffic.memory), int(flops), seconds)

    # --- templates ---------------------------------------------------------------------------------------------------

    def _gemm(self, g: Gemm) -> tuple[_Traffic, float, float]:
        ops = self.kernels.program.ops
        rows = self.counts.rows(ops[g.product].space)
        traffic = _Traffic()
        self._rows_of(traffic, g.x, rows)
        weights = self.counts.rows(ops[g.w].space) * ops[g.w].row_bytes
        traffic.memory += weights + sum(self.counts.rows(ops[v].space) * self.row_bytes(v) for v in g.writes)
        flops = 2 * rows * math.prod(spec_sizes(g.spec, ops[g.x.name].shape, ops[g.w].shape).values())
        products = flops / dict(self.constants.flops)[self.precision]
        return traffic, flops, self.constants.gemm_seconds + self._time(traffic, self.constants.gemm, products)

    def _weight_gradient(self, o: WeightGradient) -> tuple[_Traffic, float, float]:
        ops = self.kernels.program.ops
        rows, types = self.counts.rows(ops[o.x.name].space), self.counts.rows(ops[o.out].space)
        traffic = _Traffic()
        self._rows_of(traffic, o.x, rows)
        self._rows_of(traffic, o.y, rows)
        split = rows_per_split(rows, types)
        splits = rows / split + types
        width = sum(ops[v].width for v in o.writes)
        traffic.memory += 2 * splits * width * 4 + types * sum(ops[v].row_bytes for v in o.writes)
        flops = 2 * rows * width
        m = self.constants
        products = flops / dict(m.flops)[self.precision]
        moved = self._time(traffic, m.weight_gradient, products, m.weight_gradient_cache_bytes_per_second)
        return traffic, flops, m.weight_gradient_seconds + min(split, 256) * m.position_seconds + moved

    def _row_products(self, p: RowProducts) -> tuple[_Traffic, float, float]:
        """Every operand is read once; the sums of parts are written, and read by XLA."""
        program, m = self.kernels.program, self.constants
        rows, sums = self.counts.rows(program.ops[p.y].space), row_sums(program, p.outs)
        tiles = sum(s.tiles for s in sums)
        width = sum(s.num_products * math.prod(map(s.size, s.sides)) for s in sums)
        parts = math.ceil(rows / rows_per_part(rows, max(tiles, 1), 1)) if rows else 1
        traffic = _Traffic(sum(rows * program.ops[v].row_bytes for v in p.reads))
        traffic.memory += sum(program.ops[v].row_bytes for v in p.writes)
        traffic.memory += 8 * parts * (width + (0 if p.total is None else program.ops[p.total].width)) * (parts > 1)
        flops = 2 * rows * width
        moved = self._time(traffic, m.weight_gradient, flops / dict(m.flops)[self.precision])
        return traffic, flops, m.launch_seconds * (1 + len(p.writes) * (parts > 1)) + moved

    def _traversal(self, t: Traversal) -> tuple[_Traffic, float, float]:
        ops, rows = self.kernels.program.ops, self.counts.rows
        entries, segments = rows(t.space), rows(VIAS[t.via].coarse) if t.via else 0
        traffic = _Traffic()
        self._read_by(traffic, t)
        narrow = [v for v in t.entry_outputs if not _in_order(t) and ops[v].width < 8]
        traffic.memory += sum(entries * self.row_bytes(v) for v in t.entry_outputs if v not in narrow)
        traffic.memory += entries * self.sector(sum(entries * self.row_bytes(v) for v in narrow)) * bool(narrow)
        traffic.memory += sum(segments * self.row_bytes(v) for v in t.row_outputs)
        flops = entries * sum(ops[i].width for i in t.body)
        m = self.constants
        if t.via is None:
            seconds = self._time(traffic, m.map, flops / m.map_elements_per_second, m.traversal_cache_bytes_per_second)
            return traffic, flops, m.launch_seconds + seconds
        work = self._elements(t) / m.elements_per_second
        seconds = m.traversal_seconds + self._time(traffic, m.traversal, work, m.traversal_cache_bytes_per_second)
        long_segments = not t.via.endswith(".node") or entries >= _PAIRS_OF_LONG_SEGMENTS * segments
        return traffic, flops, seconds + m.long_segments_seconds * long_segments

    def _elements(self, t: Traversal) -> float:
        """Elements of the tiles of a traversal's body."""
        ops = self.kernels.program.ops
        elements = self.constants.entry_elements + sum(max(ops[v].width for v in (i, *ops[i].args)) for i in t.body)
        elements += sum(ops[a.out].width * (2 if a.kind == "weighted" else 1) for a in t.accumulators)
        segments = self.counts.rows(VIAS[t.via].coarse) if t.via else 0
        return self.counts.rows(t.space) * elements + segments * self.constants.segment_elements

    def _read_by(self, traffic: _Traffic, t: Traversal) -> None:
        """Traffic of a traversal's reads, for its segments and entries."""
        ops, rows = self.kernels.program.ops, self.counts.rows
        entries, segments = rows(t.space), rows(VIAS[t.via].coarse) if t.via else 0
        in_order = _in_order(t)
        traffic.memory += 8 * segments
        packed: set[Any] = set()  # maps and traversals whose narrow values share a sector, and arrays whose parts do
        tables: set[str] = set()
        for o in t.operands:
            op, row = ops[o.value], self.row_bytes(o.value)
            if o.part is not None:
                row = row * o.part[1] // op.shape[0]
            table = rows(op.space) * row
            if o.access in ("row", "row_indexed"):
                traffic.memory += min(segments * row, table)
            elif o.access == "gathered":
                assert o.via is not None
                if op.name == "count" and op.attr("via") == o.via:
                    traffic.memory += 4 * entries  # a table by entry
                    continue
                tables.add(o.via)
                if op.width >= 16:
                    self._gathered(traffic, entries, row, table)
                    # Parts of a row share its exponent.
                    if o.value in self.row_scaled and (o.value, o.via) not in packed:
                        packed.add((o.value, o.via))
                        self._gathered(traffic, entries, self.sector(table), table)
                elif in_order and t.space == Space.EDGE and o.via in ("dst", "destination_pair"):
                    traffic.memory += entries * row  # edges of a type are sorted by receiver
                elif o.via not in packed:  # narrow values of the same rows share a sector
                    packed.add(o.via)
                    self._gathered(traffic, entries, self.sector(table), table)
            elif o.access == "shared":
                traffic.memory += row
            elif in_order or op.width >= 8:
                traffic.memory += entries * row * (1.0 if o.when is None else _REACHED)
            elif self.array_of.get(o.value, o.value) not in packed:
                packed.add(self.array_of.get(o.value, o.value))
                traffic.memory += entries * self.sector(table)
        traffic.memory += 4 * entries * len(tables)

    # --- bytes -------------------------------------------------------------------------------------------------------

    def row_bytes(self, value: int) -> int:
        op = self.kernels.program.ops[value]
        return 2 * op.width + 1 if value in self.row_scaled else op.row_bytes

    def table_bytes(self, value: int) -> int:
        return self.counts.rows(self.kernels.program.ops[value].space) * self.row_bytes(value)

    def sector(self, table: float) -> int:
        return 32 if table < self.constants.near_bytes else 64

    def _rows_of(self, traffic: _Traffic, o: Operand, rows: int) -> None:
        """Rows that a product reads."""
        if o.access == "gathered":
            traffic.memory += 4 * rows
            row, table = self.row_bytes(o.value), self.table_bytes(o.value)
            if o.via in _NEAR:  # tiles that read the same rows run together
                traffic.memory += min(rows * row, table)
                traffic.cache += max(0, rows * row - table)
            else:
                self._gathered(traffic, rows, row, table)
        elif o.access == "shared":
            traffic.memory += self.row_bytes(o.value)
        else:
            traffic.memory += rows * self.row_bytes(o.value)

    def missed_bytes(self, reads: int, row: int, table: float) -> float:
        """Bytes from memory of `reads` rows of `row` bytes, gathered from a table of `table` bytes."""
        traffic = _Traffic()
        self._gathered(traffic, reads, row, table)
        return traffic.memory

    def _gathered(self, traffic: _Traffic, reads: int, row: int, table: float) -> None:
        """`reads` rows of `row` bytes from a table: what is read again is partly in the cache."""
        total = reads * row
        if table < _REGISTER_LIKE:
            traffic.memory += table
            return
        again = max(0.0, total - table)
        kept = min(1.0, self.constants.kept_bytes / max(table, 1))
        missed = min(total, table) + again * (1 - kept**self.constants.skew)
        traffic.memory += missed
        traffic.cache += total - missed

    def _time(
        self, traffic: _Traffic, share: float, arithmetic: float, cache_bytes_per_second: float | None = None
    ) -> float:
        """Seconds, of which those of the arithmetic are known."""
        m = self.constants
        memory = traffic.memory / (m.bytes_per_second * share)
        cache = (traffic.memory + traffic.cache) / (cache_bytes_per_second or m.cache_bytes_per_second)
        return max(memory, cache, arithmetic)


def training_models(
    parts: Cut, forward: Kernels, backward: Kernels, counts: Counts, precision: str
) -> tuple[CostModel, CostModel]:
    """Models of both halves of a training step: backward reads the row-scaled float16 of forward."""
    rounds = precision == "tf32"
    shared = shared_encodings(parts, forward, backward, counts.rows) if rounds else frozenset()
    at = forward.program.by_position()
    saved = forward.program.outputs[parts.num_outputs :][: parts.num_saved]
    positions = {number for number, p in enumerate(parts.needed) if p in shared}
    positions |= {len(parts.needed) + i for i, v in enumerate(saved) if v in forward.row_scaled}
    ops = backward.program.ops
    kept = frozenset(i for i in backward.program.inputs if ops[i].attr("position") in positions)
    first = CostModel(forward, counts, precision, encoded=frozenset(at[p] for p in shared))
    return first, CostModel(backward, counts, precision, kept)


def _in_order(t: Traversal) -> bool:
    """Whether a traversal reads its entries in order."""
    return t.via is None or "type" in t.via or t.via == "destination_pair"


# Maps by which products gather rows of nodes in an order of tiles that keeps equal rows near (`with_near_tiles`).
_NEAR = ("source_pair.node", "destination_pair.node")
# The share of nodes that a map reaches.
_REACHED = 0.7
# With so many pairs of a node on average, some nodes have long segments of pairs.
_PAIRS_OF_LONG_SEGMENTS = 16
# A table by type stays in the caches of each multiprocessor.
_REGISTER_LIKE = 1 << 20
