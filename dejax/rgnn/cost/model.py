"""The bytes, FLOPs and predicted time of each kernel instance: bytes, by how they are read, over bandwidths.

The model knows counts and not the graph. It assumes skewed degrees, which decide how often a cache has a gathered row,
and long segments in traversals of edges, or of many pairs of each node. Its constants were fitted to kernels of eight
graphs and three models on an H200; docs/performance/plans.md says how well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dejax.pallas.products.product_schedule import rows_per_part, rows_per_split
from dejax.rgnn.cost.work import RATES, CostConstants, Counts, Work
from dejax.rgnn.ir.inter import VIAS, Space, spec_sizes
from dejax.rgnn.ir.intra import Fallback, Gemm, Instance, Kernels, Operand, RowProducts, Traversal, WeightGradient
from dejax.rgnn.ir.row_sums import row_sum, row_sums


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes to and from memory, floating-point operations of products, and the predicted time in seconds."""

    bytes: int
    flops: int
    seconds: float


class CostModel:
    """Costs of the instances of one level-2 program.

    Args:
      kernels: the program.
      counts: numbers of nodes, edges and types of the graph.
      precision: the precision of products.
      row_scaled_inputs: inputs that come as row-scaled float16.
      encoded: values in float32 that this program puts in row-scaled float16 before it reads them.
      constants: the ceilings of the device.
    """

    def __init__(
        self,
        kernels: Kernels,
        counts: Counts,
        precision: str = "tf32",
        row_scaled_inputs: frozenset[int] = frozenset(),
        encoded: frozenset[int] = frozenset(),
        constants: CostConstants = RATES,
    ) -> None:
        self.kernels, self.counts, self.precision, self.constants = kernels, counts, precision, constants
        written = kernels.row_scaled | row_scaled_inputs
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
            traffic, flops, seconds = self._fallback(instance)
        for v in self.encodes.get(number, []):
            op = self.kernels.program.ops[v]
            moved = self.counts.rows(op.space) * (op.row_bytes + 2 * op.width)
            traffic.memory += moved
            seconds += self.constants.launch_seconds + moved / (self.constants.bytes_per_second * self.constants.map)
        return Cost(int(traffic.memory), int(flops), seconds)

    def _fallback(self, f: Fallback) -> tuple[Work, float, float]:
        """XLA's operators.

        XLA cuts a sum of products over all rows that a kernel could make: it copies both operands to pad them,
        multiplies parts, and adds these up.
        """
        program, rows, m = self.kernels.program, self.counts.rows, self.constants
        traffic = self._work()
        for v in (*f.reads, *f.writes):
            traffic.move(rows(program.ops[v].space), program.ops[v].row_bytes)
        sums = [program.ops[i] for i in f.ops if row_sum(program, i) is not None]
        for padded in (program.ops[a] for op in sums for a in op.args):
            traffic.move(2 * rows(padded.space), padded.row_bytes)
        products = [program.ops[i] for i in f.ops if program.ops[i].name == "linear"]
        flops = sum(2 * rows(op.space) * program.ops[op.args[1]].width for op in products)
        launches = 1 + 3 * len(sums)
        return traffic, flops, launches * m.launch_seconds + traffic.seconds(arithmetic=flops / m.scalar_flops)

    # --- templates ---------------------------------------------------------------------------------------------------

    def _gemm(self, g: Gemm) -> tuple[Work, float, float]:
        ops = self.kernels.program.ops
        rows = self.counts.rows(ops[g.product].space)
        traffic = self._work()
        self._rows_of(traffic, g.x, rows)
        weights = self.counts.rows(ops[g.w].space) * ops[g.w].row_bytes
        traffic.memory += weights + sum(self.counts.rows(ops[v].space) * self.row_bytes(v) for v in g.writes)
        flops = 2 * rows * math.prod(spec_sizes(g.spec, ops[g.x.name].shape, ops[g.w].shape).values())
        products = flops / dict(self.constants.flops)[self.precision]
        return traffic, flops, self.constants.gemm_seconds + traffic.seconds(self.constants.gemm, arithmetic=products)

    def _weight_gradient(self, o: WeightGradient) -> tuple[Work, float, float]:
        ops = self.kernels.program.ops
        rows, types = self.counts.rows(ops[o.x.name].space), self.counts.rows(ops[o.out].space)
        traffic = self._work()
        self._rows_of(traffic, o.x, rows)
        self._rows_of(traffic, o.y, rows)
        split = rows_per_split(rows)
        splits = rows / split + types
        width = sum(ops[v].width for v in o.writes)
        traffic.memory += 2 * splits * width * 4 + types * sum(ops[v].row_bytes for v in o.writes)
        flops = 2 * rows * width
        m = self.constants
        products = flops / dict(m.flops)[self.precision]
        rate = m.weight_gradient_cache_bytes_per_second
        moved = traffic.seconds(m.weight_gradient, arithmetic=products, cache_rate=rate)
        return traffic, flops, m.weight_gradient_seconds + min(split, 256) * m.position_seconds + moved

    def _row_products(self, p: RowProducts) -> tuple[Work, float, float]:
        """Every operand is read once; the sums of parts are written, and read by XLA."""
        program, m = self.kernels.program, self.constants
        rows, sums = self.counts.rows(program.ops[p.y].space), row_sums(program, p.outs)
        tiles = sum(s.tiles for s in sums)
        width = sum(s.num_products * math.prod(map(s.size, s.sides)) for s in sums)
        parts = math.ceil(rows / rows_per_part(rows, max(tiles, 1), 1)) if rows else 1
        traffic = self._work().move(rows, sum(program.ops[v].row_bytes for v in p.reads))
        traffic.memory += sum(program.ops[v].row_bytes for v in p.writes)
        traffic.memory += 8 * parts * (width + (0 if p.total is None else program.ops[p.total].width)) * (parts > 1)
        flops = 2 * rows * width
        moved = traffic.seconds(m.row_products, arithmetic=flops / dict(m.flops)[self.precision])
        return traffic, flops, m.launch_seconds * (1 + len(p.writes) * (parts > 1)) + moved

    def _traversal(self, t: Traversal) -> tuple[Work, float, float]:
        ops, rows = self.kernels.program.ops, self.counts.rows
        entries, segments = rows(t.space), rows(VIAS[t.via].coarse) if t.via else 0
        traffic = self._work()
        self._read_by(traffic, t)
        narrow = [v for v in t.entry_outputs if not _in_order(t) and ops[v].width < 8]
        traffic.memory += sum(entries * self.row_bytes(v) for v in t.entry_outputs if v not in narrow)
        traffic.memory += entries * self.sector(sum(entries * self.row_bytes(v) for v in narrow)) * bool(narrow)
        traffic.memory += sum(segments * self.row_bytes(v) for v in t.row_outputs)
        flops = entries * sum(ops[i].width for i in t.body)
        m, rate = self.constants, self.constants.traversal_cache_bytes_per_second
        if t.via is None:
            elements = flops / m.map_elements_per_second
            return traffic, flops, m.launch_seconds + traffic.seconds(m.map, arithmetic=elements, cache_rate=rate)
        work = self._elements(t) / m.elements_per_second
        seconds = m.traversal_seconds + traffic.seconds(m.traversal, arithmetic=work, cache_rate=rate)
        long_segments = not t.via.endswith(".node") or entries >= _PAIRS_OF_LONG_SEGMENTS * segments
        return traffic, flops, seconds + m.long_segments_seconds * long_segments

    def _elements(self, t: Traversal) -> float:
        """Elements of the tiles of a traversal's body. A product that is added is one operation with the addition."""
        ops = self.kernels.program.ops
        added = {
            a for i in t.body if ops[i].name in ("add", "sum_features") for a in ops[i].args if ops[a].name == "mul"
        }
        body = [i for i in t.body if i not in added and ops[i].name != "reshape"]
        elements = self.constants.entry_elements + sum(max(ops[v].width for v in (i, *ops[i].args)) for i in body)
        elements += sum(ops[a.out].width * (2 if a.kind == "weighted" else 1) for a in t.accumulators)
        segments = self.counts.rows(VIAS[t.via].coarse) if t.via else 0
        return self.counts.rows(t.space) * elements + segments * self.constants.segment_elements

    def _read_by(self, traffic: Work, t: Traversal) -> None:
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
                    traffic.gather(entries, row, table)
                    # Parts of a row share its exponent.
                    if o.value in self.row_scaled and (o.value, o.via) not in packed:
                        packed.add((o.value, o.via))
                        traffic.gather(entries, self.sector(table), table)
                elif in_order and t.space == Space.EDGE and o.via in ("dst", "destination_pair"):
                    traffic.memory += entries * row  # edges of a type are sorted by receiver
                elif o.via not in packed:  # narrow values of the same rows share a sector
                    packed.add(o.via)
                    traffic.gather(entries, self.sector(table), table)
            elif o.access == "shared":
                traffic.memory += row
            elif in_order or op.width >= 8:
                traffic.memory += entries * row
            elif self.array_of.get(o.value, o.value) not in packed:
                packed.add(self.array_of.get(o.value, o.value))
                traffic.memory += entries * self.sector(table)
        traffic.memory += 4 * entries * len(tables)

    def _work(self) -> Work:
        return Work(rates=self.constants)

    # --- bytes -------------------------------------------------------------------------------------------------------

    def row_bytes(self, value: int) -> int:
        op = self.kernels.program.ops[value]
        return 2 * op.width + 1 if value in self.row_scaled else op.row_bytes

    def table_bytes(self, value: int) -> int:
        return self.counts.rows(self.kernels.program.ops[value].space) * self.row_bytes(value)

    def sector(self, table: float) -> int:
        return self.constants.sector_bytes if table < self.constants.near_bytes else self.constants.burst_bytes

    def _rows_of(self, traffic: Work, o: Operand, rows: int) -> None:
        """Rows that a product reads."""
        if o.access == "gathered":
            traffic.memory += 4 * rows
            row, table = self.row_bytes(o.value), self.table_bytes(o.value)
            if o.via in _NEAR:  # tiles that read the same rows run together
                traffic.memory += min(rows * row, table)
                traffic.cache += max(0, rows * row - table)
            else:
                traffic.gather(rows, row, table)
        elif o.access == "shared":
            traffic.memory += self.row_bytes(o.value)
        else:
            traffic.memory += rows * self.row_bytes(o.value)

    def missed_bytes(self, reads: int, row: int, table: float) -> float:
        """Bytes from memory of `reads` rows of `row` bytes, gathered from a table of `table` bytes."""
        return self._work().gather(reads, row, table).memory


def _in_order(t: Traversal) -> bool:
    """Whether a traversal reads its entries in order."""
    return t.via is None or "type" in t.via or t.via == "destination_pair"


# Maps by which products gather rows of nodes in an order of tiles that keeps equal rows near (`with_near_tiles`).
_NEAR = ("source_pair.node", "destination_pair.node")
# With this many pairs of a node on average, some nodes have long segments of pairs.
_PAIRS_OF_LONG_SEGMENTS = 16
