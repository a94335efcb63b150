"""The loops in which the time of large problems goes, each written once.

    constants     numbers that kernels and their callers share
    views         the arrays that a kernel is given, as typed buffers
    presolve      exact steps on one edge or node, from queues
    tables        those steps inside one table
    log           undoing the steps
    dominance     choices that another can replace
    trws          message passing, its bound and its reduced costs
    layout        tables copied from one layout to another
    elimination   best choices of nearly all nodes at once
    joins         rows of sparse tables paired, thinned, and what others add to them
    lns_moves     which of the proposed changes are taken
    timetables    the clock of a pipeline's timetable, orders made by rules, local search over orders
    order_tree    branch and bound over the orders of a pipeline

A kernel is plain Python over buffers, and Cython compiles the same file where a C compiler is there at installation: its ``.pxd`` beside
it says which C types its arguments have. Without a compiler it runs as it is, some 50 times slower, with the same answers. All are
``nogil`` there only to make Cython refuse what is not plain C; they hold the interpreter's lock.
"""

from __future__ import annotations

from ..arrays import on_arrays
from . import dominance as _dominance
from . import elimination as _elimination
from . import joins as _joins
from . import layout as _layout
from . import lns_moves as _lns_moves
from . import log as _log
from . import order_tree as _order_tree
from . import presolve as _presolve
from . import tables as _tables
from . import timetables as _timetables
from . import trws as _trws
from . import views as _views

COMPILED = not any(
    str(module.__file__).endswith(".py")
    for module in (_dominance, _elimination, _joins, _layout, _lns_moves, _log, _order_tree, _presolve, _tables, _timetables, _trws, _views)
)
"""Whether all kernels run as machine code."""

accept_groups = on_arrays(_lns_moves.accept_groups)
add_least = on_arrays(_joins.add_least)
bound_rest = on_arrays(_order_tree.bound_rest)
certify = on_arrays(_trws.certify)
compact_tables = on_arrays(_layout.compact_tables)
copy_open_entries = on_arrays(_layout.copy_open_entries)
dominate = on_arrays(_dominance.dominate)
explore = on_arrays(_order_tree.explore)
extrapolate = on_arrays(_trws.extrapolate)
fill_reduced_costs = on_arrays(_trws.fill_reduced_costs)
fill_tails = on_arrays(_order_tree.fill_tails)
gather_beliefs = on_arrays(_trws.gather_beliefs)
group_changes = on_arrays(_lns_moves.group_changes)
improve_orders = on_arrays(_timetables.improve_orders)
join_rows = on_arrays(_joins.join_rows)
least_rows = on_arrays(_joins.least_rows)
link = on_arrays(_presolve.link)
maximal_times = on_arrays(_log.maximal_times)
orient_tables = on_arrays(_layout.orient_tables)
pass_both = on_arrays(_trws.pass_both)
plan_order = on_arrays(_elimination.plan_order)
replay = on_arrays(_log.replay)
run_orders = on_arrays(_timetables.run_orders)
run_queues = on_arrays(_presolve.run_queues)
run_warm_ups = on_arrays(_timetables.run_warm_ups)
schedule_by_list = on_arrays(_timetables.schedule_by_list)
sweep = on_arrays(_elimination.sweep)
trace = on_arrays(_log.trace)
wake = on_arrays(_presolve.wake)

__all__ = [
    "COMPILED", "accept_groups", "add_least", "bound_rest", "certify", "compact_tables", "copy_open_entries", "dominate", "explore",
    "extrapolate", "fill_reduced_costs", "fill_tails", "gather_beliefs", "group_changes", "improve_orders", "join_rows", "least_rows",
    "link", "maximal_times", "orient_tables", "pass_both", "plan_order", "replay", "run_orders", "run_queues", "run_warm_ups",
    "schedule_by_list", "sweep", "trace", "wake",
]  # fmt: skip
