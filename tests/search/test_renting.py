"""The bound for which memory is paid, against every set of second runs and plans on meshes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import numpy as np
import pytest

from autopar.effort import unlimited
from autopar.schedule import make_schedule, memory, step_seconds
from autopar.schedule.instructions import LEAN_LIMITS
from autopar.search.baselines.checkpointing import apply_policies
from autopar.search.baselines.recipes import find_baselines
from autopar.search.bounds import surrogate
from autopar.search.bounds.memory_dual import lagrangian_bound
from autopar.search.bounds.surrogate import Master, Multipliers, Term, floor_of_model
from autopar.search.choices.pins import Pins
from autopar.search.choices.space import Space
from autopar.search.driver.phase_table import Search
from autopar.search.folding.tied_model import TiedModel, tie_model
from autopar.search.ilp.build import build_model
from autopar.search.ilp.critical_path import Path
from autopar.search.ilp.decode import decode_assignment
from autopar.search.ilp.model import Model
from autopar.search.settings import DUAL_LEAST_SHARE
from autopar.solvers import solve
from tests.search.requests import asked, budget
from tests.search.small_graphs import small_machine
from tests.search.test_again import chain, drawn, every_set, one_rank
from tests.search.test_folding import folding, graph, machine

SLOWDOWN, MESH = 0.15, "dp=4"


def heavy(space: Space) -> Model:
    return build_model(space, recompute_times=1, small_share=0.0)


def first(model: Model) -> Multipliers:
    return Master(model, SLOWDOWN).first_weights()


def answer(model: Model) -> np.ndarray:
    choices = solve(model.problem(None)[0], time_limit=600.0).choices
    assert choices is not None
    return model.expand(choices)


def rests(model: Model) -> list[int]:
    return [time for time in sorted(set(model.op_times.values())) if model.is_idle(time)]


@cache
def tied(mesh: str) -> TiedModel:
    made = tie_model(heavy(Space(folding().graph, machine(mesh), "adamw", Pins())), folding())
    assert made is not None
    return made


def lean_peak(mesh: str) -> float:
    """Bytes of fully sharded data parallelism that gathers nothing ahead."""
    on = machine(mesh)
    plan = find_baselines(Space(graph(), on, "adamw", Pins()))["fsdp"]
    return float(memory(make_schedule(graph(), plan, on, LEAN_LIMITS), "adamw").peak)


@pytest.mark.parametrize("mesh", ["x=1", "x=2"])
@pytest.mark.parametrize("seed", [None, *range(4)], ids=str)
def test_no_set_of_second_runs_is_below_it(seed: int | None, mesh: str) -> None:
    some, on = (chain(4), one_rank()) if seed is None else (drawn(seed), small_machine(seed, mesh))
    space = Space(some, on, "sgd", Pins())
    plain = build_model(space)
    sets = list(every_set(some, decode_assignment(plain, answer(plain)), on))
    model = heavy(space)
    free, raised = min(seconds for seconds, _ in sets), 0
    for limit in sorted({peak for _, peak in sets}):
        best = min(seconds for seconds, peak in sets if peak <= limit)
        bounds = [lagrangian_bound(model, first(model), float(limit), (time,), unlimited()) for time in range(0, len(some.ops), 4)]
        assert max(bounds) <= best * (1 + 1e-9)
        raised += max(bounds) > free * 1.001
    assert raised or seed is not None, "where memory is short something has to be made again"


@pytest.mark.slow
def test_no_plan_on_a_mesh_is_below_it() -> None:
    on, model = machine(MESH), tied(MESH)
    plan = find_baselines(Space(graph(), on, "adamw", Pins()))["fsdp"]
    schedule = make_schedule(graph(), dict(apply_policies(graph(), plan, on))["full"], on, LEAN_LIMITS)
    bound = lagrangian_bound(model, first(model), float(memory(schedule, "adamw").peak), rests(model), unlimited())
    assert bound <= step_seconds(schedule, "adamw")


@pytest.mark.slow
def test_bound_with_folded_layers_is_near_that_of_the_whole_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without chains of dependencies, of which there are more in the whole graph than its answers tell in so few rounds."""
    model, whole = tied(MESH), heavy(Space(graph(), machine(MESH), "adamw", Pins()))
    assert not model.is_idle(model.op_times[folding().group.repeats[1][0]])
    times = rests(model)
    later = [whole.op_times[name] for name, at in model.op_times.items() if at in times]
    allowed = 0.55 * lean_peak(MESH)
    pairs = ((whole, later), (model, times))
    monkeypatch.setattr(surrogate, "PATH_GAIN", np.inf)  # no path enters
    found = [lagrangian_bound(some, first(some), allowed, at, unlimited()) for some, at in pairs]
    free = lagrangian_bound(whole, first(whole), 2.0**60, later, unlimited())
    assert found[0] > free * 1.001, "memory is short"
    assert found[0] * 0.97 <= found[1] <= found[0] * (1 + 2e-3), "a bound on layers left free"


@pytest.mark.slow
def test_paths_raise_the_bound_where_collectives_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where gathers and reductions take long: for the loss's own call nobody waits."""
    mesh = "dp=8"
    model, allowed = tied(mesh), 0.8 * lean_peak(mesh)
    chained = lagrangian_bound(model, first(model), allowed, rests(model), unlimited())
    monkeypatch.setattr(surrogate, "PATH_GAIN", np.inf)  # no path enters
    assert chained > lagrangian_bound(model, first(model), allowed, rests(model), unlimited()) * 1.001


def test_weights_without_paths() -> None:
    path = Path((1, 2), (0,))
    mixed = Multipliers({Term("forward", path=path): 0.25, Term("forward", "node"): 0.75, Term("backward", path=path): 1.0}, SLOWDOWN)
    assert mixed.without_paths().weights == {Term("forward", "node"): 1.0, Term("backward", compute=True): 1.0}


def test_bound_without_work_is_zero() -> None:
    model = tied(MESH)
    assert lagrangian_bound(model, first(model), 1.0, rests(model), budget(0.0)) == 0.0


def test_bound_grows_without_an_error_where_nothing_fits() -> None:
    """No price is enough there; its program's coefficients must stay within what doubles tell apart."""
    model = tied(MESH)
    assert lagrangian_bound(model, first(model), 1000.0, rests(model), unlimited()) > floor_of_model(model)


def searched(spent: float) -> Search:
    """A search that has spent so much of 100 work seconds."""
    search = Search(tied(MESH), asked(2**30, work=100.0, recompute=True), True)
    search.budget.charge(spent)
    return search


def test_memory_dual_is_not_begun_with_little_work() -> None:
    search = searched(0.0)
    search.price_memory(search.budget.at_most(0.9 * DUAL_LEAST_SHARE * 100.0))
    assert search.budget.meter.spent == 0.0 and search.bound == search.claims.bound


@dataclass
class CountingModel(TiedModel):
    """Counts the proofs for free layers."""

    proofs: int = 0

    def prove_bound(self, *given: Any) -> float:
        self.proofs += 1
        return 0.0


@pytest.mark.parametrize(("spent", "settles"), [(0.0, True), (105.0, True), (111.0, False)])
def test_last_proof_exceeds_the_budget_by_little(spent: float, settles: bool) -> None:
    """A tenth of the budget of 100 work seconds, less what a solve has taken."""
    search = searched(spent)
    search.model = model = CountingModel(**{item.name: getattr(search.model, item.name) for item in fields(search.model)})
    search.claims.longest_solve = 0.1
    search.claims.pending = [(1.0, 1.0, first(model), answer(model))]
    search.prove_claims(search.budget)
    assert bool(model.proofs) is settles and not search.claims.pending
