"""Bytes and products of one way of computing something, and the time that these take.

A pass that chooses between two ways describes each as `Work` and takes the one of fewer seconds:

    once = Work().move(counts.nodes, 2 * row_bytes)
    each = Work().move(counts.edges, row_bytes)
    if once.seconds() < each.seconds(): ...

The cost model of whole kernels (`cost/model.py`) adds its bytes up in `Work`, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dejax.pallas.machine import H200
from dejax.rgnn.ir.inter import Op, Space


@dataclass(frozen=True, slots=True)
class Counts:
    """How many rows each space of a graph has: all that the passes know of it."""

    nodes: int
    edges: int
    source_pairs: int
    destination_pairs: int
    edge_types: int
    node_types: int
    typed_sources: bool = False  # whether all sources of an edge type have one node type, known to the graph

    def rows(self, space: Space) -> int:
        return 1 if space == Space.GRAPH else int(getattr(self, f"{space}s"))

    def from_memory(self, op: Op, arrays: float = 1.0) -> bool:
        """Whether the L2 cache is too small for the rows of a value, or for `arrays` such arrays."""
        return arrays * self.rows(op.space) * op.row_bytes > H200.cache_bytes


@dataclass(frozen=True, slots=True)
class CostConstants:
    """Ceilings of a device, and the part of them that kernels reach; fitted to whole kernels on an H200.

    `dejax.pallas.machine.Machine` has what schedules need: sizes and latencies of the device that runs. These constants
    predict times, and are an H200's whatever the device.

    Attributes:
      bytes_per_second: the rate of a copy, bytes read plus written.
      cache_bytes_per_second: the rate of reading rows that are in the L2 cache.
      weight_gradient_cache_bytes_per_second: the same for weight gradients, which load rows ahead.
      traversal_cache_bytes_per_second: the same for traversals, most of whose rows are row-scaled float16.
      kept_bytes: how much of a gathered table the cache holds.
      skew: if the cache holds a share s of a table, s ** skew of the reads find their row in it.
      near_bytes: a narrow value gathered from a larger table than this moves a burst instead of a sector.
      sector_bytes, burst_bytes: what a read of a few bytes moves, from the cache and from memory.
      flops: rate of products by precision; in `f32`, a third of the rate of float16 products.
      scalar_flops: without tensor cores.
      launch_seconds: the time of a kernel without work.
      encoding_seconds: constant time of putting rows in row-scaled float16.
      measuring_seconds: of the kernel that measures the scales of columns, and of the divisions by these in a program.
      gemm, weight_gradient, row_products, traversal, map: the share of the copy bandwidth that each template reaches.
      by_index: the rate of rows that edges read by an index of their own, compared with that of rows of edges.
      gemm_seconds, weight_gradient_seconds, traversal_seconds: constant time of each template.
      long_segments_seconds: constant time of a traversal that splits long segments.
      position_seconds: time of a weight gradient for each of the first 256 positions of a split.
      elements_per_second: the elements of tiles that one operator of a traversal's body computes in a second.
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
    sector_bytes: int = 32
    burst_bytes: int = 64
    flops: tuple[tuple[str, float], ...] = (("f32", 120e12), ("tf32", 350e12), ("bf16", 700e12))
    scalar_flops: float = 55e12
    launch_seconds: float = 2.8e-6
    encoding_seconds: float = 3.023e-6
    measuring_seconds: float = 5.5e-6
    gemm: float = 0.72
    weight_gradient: float = 0.74
    row_products: float = 0.95
    traversal: float = 0.80
    map: float = 0.94
    by_index: float = 0.8
    gemm_seconds: float = 2.4e-6
    weight_gradient_seconds: float = 3.4e-6
    traversal_seconds: float = 2.1e-6
    long_segments_seconds: float = 2.3e-6
    position_seconds: float = 5.8e-9
    elements_per_second: float = 3.8e12
    entry_elements: int = 10
    segment_elements: int = 39
    map_elements_per_second: float = 7.5e12


RATES = CostConstants()
# A table by type stays in the caches of each multiprocessor.
_REGISTER_LIKE = 1 << 20


@dataclass(slots=True)
class Work:
    """One way of computing something.

    Attributes:
      memory: bytes from and to device memory.
      cache: bytes that the L2 cache has.
      flops: the floating-point operations of products by tensor cores.
      rates: the ceilings of the device.
    """

    memory: float = 0.0
    cache: float = 0.0
    flops: float = 0.0
    rates: CostConstants = field(default=RATES)

    def move(self, rows: float, row_bytes: float) -> Work:
        """Adds rows that are read or written in order."""
        self.memory += rows * row_bytes
        return self

    def gather(self, reads: float, row_bytes: float, table_bytes: float) -> Work:
        """Adds rows that are read by an index: those that are read again are partly in the cache."""
        if table_bytes < _REGISTER_LIKE:
            return self.move(1, table_bytes)
        total = reads * row_bytes
        reread = max(0.0, total - table_bytes)
        kept = min(1.0, self.rates.kept_bytes / max(table_bytes, 1))
        missed = min(total, table_bytes) + reread * (1 - kept**self.rates.skew)
        self.memory += missed
        self.cache += total - missed
        return self

    def multiply(self, rows: float, multiplications: float) -> Work:
        """Adds products with `multiplications` multiplications for each row."""
        self.flops += 2 * rows * multiplications
        return self

    def seconds(
        self, share: float = 1.0, *, arithmetic: float = 0.0, cache_rate: float | None = None, precision: str = "tf32"
    ) -> float:
        """The time of what takes longest.

        Args:
          share: the share of the copy bandwidth that the kernel reaches.
          arithmetic: seconds of arithmetic besides the products.
          cache_rate: bytes per second of rows in the cache; by default those of products.
          precision: the precision of products.
        """
        m = self.rates
        memory = self.memory / (m.bytes_per_second * share)
        cache = (self.memory + self.cache) / (cache_rate or m.cache_bytes_per_second) if self.cache else 0.0
        products = self.flops / dict(m.flops)[precision]
        return max(memory, cache, products, arithmetic)
