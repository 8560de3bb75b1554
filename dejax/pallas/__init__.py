"""Kernel templates for typed and irregular rows, on plain arrays: they know no graph, no IR and no module."""

from dejax.pallas._shapes import feature_mask, next_power_of_two
from dejax.pallas._triton import label, maximum, minimum, offsets_fit
from dejax.pallas.formats.encode import to_row_scaled
from dejax.pallas.formats.row_scaled import RowScaled, rounded
from dejax.pallas.formats.table_slice import TableSlice
from dejax.pallas.padding import clear_rows
from dejax.pallas.products.grouped_gemm import grouped_gemm
from dejax.pallas.products.product_schedule import GemmSchedule, WeightGradientSchedule
from dejax.pallas.products.requests import GemmEpilogue, GemmGroups, GemmOutput, GroupedGemm, GroupedWeightGradient
from dejax.pallas.products.row_products import row_products
from dejax.pallas.products.sums import sum_rows
from dejax.pallas.products.weight_gradient import grouped_weight_gradient, split_table
from dejax.pallas.special import erf, exp
from dejax.pallas.traversal.accumulate import Reduction
from dejax.pallas.traversal.factored import Factored, whole
from dejax.pallas.traversal.request import LongSegmentTable, Outputs, RowSegments, TileOperand
from dejax.pallas.traversal.template import map_entries, traverse
from dejax.pallas.traversal.traversal_schedule import TraversalSchedule

__all__ = [
    "Factored",
    "GemmEpilogue",
    "GemmGroups",
    "GemmOutput",
    "GemmSchedule",
    "GroupedGemm",
    "GroupedWeightGradient",
    "LongSegmentTable",
    "TileOperand",
    "Outputs",
    "Reduction",
    "RowScaled",
    "RowSegments",
    "TableSlice",
    "TraversalSchedule",
    "WeightGradientSchedule",
    "clear_rows",
    "erf",
    "exp",
    "feature_mask",
    "grouped_gemm",
    "grouped_weight_gradient",
    "label",
    "map_entries",
    "maximum",
    "minimum",
    "next_power_of_two",
    "offsets_fit",
    "rounded",
    "row_products",
    "split_table",
    "sum_rows",
    "to_row_scaled",
    "traverse",
    "whole",
]
