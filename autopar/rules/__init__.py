"""How operators can be cut: the rule notation, THE table, and what follows from them. No torch.

    find_rule(op, tensors)                  -> ShardingRule
    strategies(rule, tensors, sizes)        -> every legal way to run it on a mesh
    localize(op, tensors, strategy, ...)    -> its arguments on one rank

notation           the text of a rule, parsed
table              THE table: one row an operator, with all that is known of it
computed           rules that depend on arguments, each written by a function (computed_layout, computed_indexing; writing: their words)
signature          a row, and an operator's arguments by the names it gives them
binding, rule      a rule's text and an operator's shapes -> ShardingRule
lookup, own        an operator -> its ShardingRule; rules that users give
expansion          a ShardingRule on a mesh -> strategies (inner_exchange: the ways in which ranks exchange parts inside of an operator)
local              what changes in arguments on a rank
work               floating point operations
facts              what else follows from a row: aliasing, memory, draws, numbers that are looked up
launches           kernels that the host issues
repeating          views that repeat: of less memory than their size
memory_order       how results lie in memory: in order, turned, with gaps (copied: the operands that a kernel copies for that)
dispatch           rows that are dispatched to experts
products           contractions that are products of two matrices, and additions that these do as well
"""

from __future__ import annotations

from autopar.rules.binding import bind
from autopar.rules.copied import find_copied
from autopar.rules.dispatch import dispatched_results, find_askers, find_dispatched, splits_experts
from autopar.rules.expansion import plain_factors, strategies, way_of
from autopar.rules.facts import (
    STORING,
    axis_layout,
    bytes_moved,
    count_entries,
    effect_of_number,
    family,
    ignored_number,
    is_alias,
    kernel_launches,
    looked_up,
    may_write_over,
    out_variant,
    reads_values,
    seed_of,
    storage_roots,
    stores,
    takes_one_dtype,
    why_each,
    why_once,
)
from autopar.rules.launches import issued_kernels, reads_back
from autopar.rules.local import find_strategy, localize
from autopar.rules.lookup import find_rule, table
from autopar.rules.memory_order import IN_ORDER, MemoryOrder, find_orders, keeps_order, view_copies
from autopar.rules.notation import parse
from autopar.rules.own import rule
from autopar.rules.products import CONTRACTION, Product, find_fusable_additions, find_product, is_plain_addition
from autopar.rules.repeating import DENSE, Repeated, find_expanded, find_repeated, is_expansion, repeats, stored_elements
from autopar.rules.rule import ShardingRule
from autopar.rules.work import flops

__all__ = [
    "CONTRACTION",
    "DENSE",
    "IN_ORDER",
    "STORING",
    "MemoryOrder",
    "Product",
    "Repeated",
    "ShardingRule",
    "axis_layout",
    "bind",
    "bytes_moved",
    "count_entries",
    "dispatched_results",
    "effect_of_number",
    "family",
    "find_askers",
    "find_copied",
    "find_dispatched",
    "find_expanded",
    "find_fusable_additions",
    "find_orders",
    "find_product",
    "find_repeated",
    "find_rule",
    "find_strategy",
    "flops",
    "ignored_number",
    "is_alias",
    "is_expansion",
    "is_plain_addition",
    "issued_kernels",
    "keeps_order",
    "kernel_launches",
    "localize",
    "looked_up",
    "may_write_over",
    "out_variant",
    "parse",
    "plain_factors",
    "reads_back",
    "reads_values",
    "repeats",
    "rule",
    "seed_of",
    "splits_experts",
    "storage_roots",
    "stored_elements",
    "stores",
    "strategies",
    "table",
    "takes_one_dtype",
    "view_copies",
    "way_of",
    "why_each",
    "why_once",
]  # fmt: skip
