"""The integer program of a core, from arrays straight into HiGHS: LP first, memory rows only when they are broken.

Linear relaxations of sharding problems are nearly always integral, so most of the work is one LP; integrality is asked for only when
the LP's answer lacks it. Rows of memory are many thousands and few of them bind: the most exceeded times are added, round by round. An
answer that respects the rows only within the solver's tolerance is cut off by counting its items, which is exact.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from .arrays import Floats, Ints, offsets
from .incumbent import Incumbent
from .kernels.constants import NEVER
from .reduction import Core, reduce
from .settings import SETTINGS


def solve_array_program(incumbent: Incumbent) -> None:
    """Reduce, then solve the core exactly."""
    core = reduce(incumbent.problem)
    incumbent.spend(core.work)
    solve_core(incumbent, core)


def solve_core(incumbent: Incumbent, core: Core, excluded: float = np.inf, work: float = np.inf) -> None:
    """Solve the core with at most ``work``.

    Answers of cost ``excluded`` or more are missing from the core, and that cost is known to be reached.
    """
    if core.infeasible:
        incumbent.exhaust(excluded)
    elif core.num_nodes == 0:
        incumbent.offer(core.expand(np.zeros(0, dtype=np.int64)))
        incumbent.prove(core.constant)
    else:
        _Program(incumbent, core, excluded, incumbent.spent + min(work, incumbent.work_left)).run()


@dataclass
class _Program:
    """One HiGHS model and its rows of memory. ``allowed`` is what the incumbent may have spent in the end."""

    incumbent: Incumbent
    core: Core
    excluded: float
    allowed: float
    scale: float = 1.0
    times: set[int] = field(default_factory=set)

    def run(self) -> None:
        """Solve the LP until its answer respects the memory, then the integer program likewise."""
        self.model = self._model()
        choices, bound = len(self.core.costs), None
        for integral in (False, True):
            if integral:
                self.model.setOptionValue("mip_abs_gap", SETTINGS.closing_gap * self.incumbent.gap * max(bound or 0.0, 0.0) / self.scale)
                self.model.changeColsIntegrality(choices, np.arange(choices, dtype=np.int32), np.ones(choices, dtype=np.uint8))
            while not self._ended():
                values, bound = self._solve(integral)
                if bound is None:
                    return
                self.incumbent.prove(bound)
                if values is None:
                    return
                picked = self._rounded(values)
                whole = integral or not _between(values).any()
                self.incumbent.offer(self.core.expand(picked))
                if not self._add_rows(values, picked if whole else None):
                    if whole:
                        return
                    break

    def _ended(self) -> bool:
        return self.incumbent.over or self.incumbent.spent >= self.allowed

    def _model(self) -> Any:
        import highspy

        core = self.core
        finite = np.flatnonzero(core.edge_costs < NEVER)
        node = np.repeat(np.arange(core.num_nodes), np.diff(core.node_ptr))
        edge = np.searchsorted(core.edge_ptr, finite, side="right") - 1
        u, v = core.edges[edge, 0], core.edges[edge, 1]
        sizes = np.diff(core.node_ptr)
        within = finite - core.edge_ptr[edge]
        # Rows: one a node; then for each edge one a choice of u and one a choice of v, in the edge's own order.
        row_u = core.num_nodes + offsets(sizes[core.edges[:, 0]] + sizes[core.edges[:, 1]])
        first = row_u[edge] + within // sizes[v]
        second = row_u[edge] + sizes[u] + within % sizes[v]
        columns = len(core.costs)
        at_u, at_v = _spread(core, 0, row_u[:-1], sizes), _spread(core, 1, row_u[:-1] + sizes[core.edges[:, 0]], sizes)
        rows = np.concatenate([node, first, second, at_u[0], at_v[0]])
        cols = np.concatenate([np.arange(columns), columns + np.tile(np.arange(len(finite)), 2), at_u[1], at_v[1]])
        data = np.concatenate([np.ones(columns + 2 * len(finite)), -np.ones(len(at_u[0]) + len(at_v[0]))])
        order = np.argsort(cols, kind="stable")
        costs = np.concatenate([core.costs, core.edge_costs[finite]]).astype(np.float64)
        self.scale = max(1.0, float(costs.max(initial=0.0)) / SETTINGS.largest_coefficient)
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(costs), int(row_u[-1])
        lp.col_cost_ = costs / self.scale
        lp.col_lower_, lp.col_upper_ = np.zeros(len(costs)), np.ones(len(costs))
        lp.row_lower_ = lp.row_upper_ = np.where(np.arange(lp.num_row_) < core.num_nodes, 1.0, 0.0)
        lp.a_matrix_.start_ = offsets(np.bincount(cols, minlength=len(costs)))
        lp.a_matrix_.index_, lp.a_matrix_.value_ = rows[order], data[order]
        highspy.Highs.resetGlobalScheduler(True)  # others may have begun with more threads, which HiGHS does not change by itself
        model = cast(Any, highspy.Highs)()
        model.setOptionValue("threads", 1)
        model.setOptionValue("output_flag", False)
        model.setOptionValue("presolve", "off")  # the core is reduced; 8B on 4 stages in 8 GiB: 149 CPU s, 181 with it
        model.setOptionValue("mip_rel_gap", SETTINGS.closing_gap * max(self.incumbent.gap, SETTINGS.negligible))
        model.setOptionValue("mip_abs_gap", 0.0)
        model.setOptionValue("mip_feasibility_tolerance", SETTINGS.tight)
        model.setOptionValue("primal_feasibility_tolerance", SETTINGS.tight)
        model.setOptionValue("random_seed", int(self.incumbent.seed) % 2**31)
        model.passModel(lp)
        return model

    def _solve(self, integral: bool) -> tuple[Floats | None, float | None]:
        """Solve for values of the choices and a bound; no bound when the rows have no answer, no values when work ran out."""
        import highspy

        run_counted(self.model, self.incumbent, self.allowed, integral)
        status, info = self.model.getModelStatus(), self.model.getInfo()
        if status == highspy.HighsModelStatus.kInfeasible:
            self.incumbent.exhaust(self.excluded)
            return None, None
        optimal = status == highspy.HighsModelStatus.kOptimal
        value = info.mip_dual_bound if integral else info.objective_function_value
        known = optimal or integral
        bound = self.core.constant + (value * self.scale * (1 - SETTINGS.tight) if known and np.isfinite(value) else 0.0)
        bound = min(bound, self.excluded)
        has_values = optimal or (integral and info.primal_solution_status == 2)
        values = np.array(self.model.getSolution().col_value)[: len(self.core.costs)] if has_values else None
        if not optimal and values is not None:
            self.incumbent.offer(self.core.expand(self._rounded(values)))
            values = None
        return values, bound

    def _rounded(self, values: Floats) -> Ints:
        """Pick the largest choice of each node."""
        starts = self.core.node_ptr[:-1]
        node = np.repeat(np.arange(self.core.num_nodes), np.diff(self.core.node_ptr))
        best = np.maximum.reduceat(values, starts)
        place = np.flatnonzero(values == best[node])
        picked = np.full(self.core.num_nodes, -1, dtype=np.int64)
        picked[node[place][::-1]] = place[::-1]
        return picked - starts

    def _add_rows(self, values: Floats, picked: Ints | None) -> bool:
        """Add rows for the most exceeded times; False if none is exceeded."""
        items = self.core.items
        if len(items.capacity) == 0:
            return False
        excess = (items.over_time(items.usage * values[items.owner]) - items.capacity) / items.capacity.clip(1)
        exact = None if picked is None else items.used(self.core.node_ptr[:-1] + picked) - items.capacity
        broken = excess > SETTINGS.negligible if exact is None else exact > 0
        if picked is None:
            broken[list(self.times)] = False  # the model has these rows, and keeps to them within its tolerance
        times = np.flatnonzero(broken)
        added = times[np.argsort(-excess[times], kind="stable")][: SETTINGS.rows_at_once].tolist()
        for moment in added:
            if moment in self.times:
                assert picked is not None
                self._cut(moment, picked)
            else:
                self._add_time(moment)
        return bool(added)

    def _add_time(self, moment: int) -> None:
        """Add the row of a time."""
        items = self.core.items
        live = np.flatnonzero((items.begin <= moment) & (moment < items.end))
        room = float(max(1, items.capacity[moment]))
        choices, place = np.unique(items.owner[live], return_inverse=True)  # HiGHS takes no row in which a column stands twice
        usage = np.bincount(place, items.usage[live], len(choices))
        self.model.addRow(-np.inf, float(items.capacity[moment]) / room, len(choices), choices.astype(np.int32), usage / room)
        self.times.add(moment)

    def _cut(self, moment: int, picked: Ints) -> None:
        """Forbid the choices that together exceed the room at a time already in the model."""
        items = self.core.items
        live = items.owner[(items.begin <= moment) & (moment < items.end)]
        together = np.intersect1d(live, self.core.node_ptr[:-1] + picked).astype(np.int32)
        self.model.addRow(-np.inf, len(together) - 1.0, len(together), together, np.ones(len(together)))


def _between(values: Floats) -> NDArray[np.bool_]:
    """Mark the values that are not whole."""
    return np.abs(values - np.rint(values)) >= SETTINGS.negligible


def _spread(core: Core, side: int, first_row: Ints, sizes: Ints) -> tuple[Ints, Ints]:
    """List (row, column) of the choices of each edge's node on that side, one row a choice."""
    nodes = core.edges[:, side]
    counts = sizes[nodes]
    within = np.arange(counts.sum()) - np.repeat(offsets(counts)[:-1], counts)
    return np.repeat(first_row, counts) + within, np.repeat(core.node_ptr[nodes], counts) + within


class _Asked:
    """Counts how often HiGHS asks whether to go on: at each simplex iteration, and at fixed points of an integer program.

    ``most`` is how often an integer program may ask, ``times`` how often one has; ``cancelled`` ends either.
    """

    def __init__(self, most: int | None) -> None:
        self.most, self.times, self.cancelled = most, 0, False

    def __call__(self, event: Any) -> None:
        if self.most is not None:
            self.times += 1
        if self.cancelled or (self.most is not None and self.times > self.most):
            event.interrupt()


def run_counted(model: Any, incumbent: Incumbent, allowed: float, integral: bool) -> None:
    """Run HiGHS until the incumbent has spent ``allowed``. Work is counted in simplex iterations.

    An integer program does not tell its iterations; its questions whether to go on are counted instead.
    """
    iteration = SETTINGS.iteration_work * (model.getNumRow() + model.getNumCol())
    most = max(1, int(min(1e9, (allowed - incumbent.spent) / iteration)))
    asked = _Asked(most // SETTINGS.iterations_between_questions if integral else None)
    model.setOptionValue("simplex_iteration_limit", most)
    model.setOptionValue("time_limit", max(0.01, incumbent.seconds_left) + model.getRunTime())
    model.cbMipInterrupt.subscribe(asked)
    model.cbSimplexInterrupt.subscribe(asked)
    try:
        _run_interruptible(model, asked)
    finally:
        model.cbMipInterrupt.unsubscribe(asked)
        model.cbSimplexInterrupt.unsubscribe(asked)
    iterations = max(model.getInfo().simplex_iteration_count, SETTINGS.iterations_between_questions * asked.times * integral)
    incumbent.spend(SETTINGS.start_work + iteration * iterations)


def _run_interruptible(model: Any, asked: _Asked) -> None:
    """Run HiGHS beside the main thread, so that Ctrl-C reaches Python and stops it."""
    worker = threading.Thread(target=model.run, daemon=True)
    worker.start()
    try:
        while worker.is_alive():
            worker.join(0.05)
    except KeyboardInterrupt:
        asked.cancelled = True
        worker.join(10.0)
        raise
