"""Folded layers against the whole graph, the oracle: the same assignments, the same costs, bounds that hold for free layers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autopar.cli.target import load_target
from autopar.cost_models import Machine, Mesh, load_hardware
from autopar.effort import Budget, unlimited
from autopar.graph import Graph, Phase
from autopar.importer import capture_graph
from autopar.schedule.legality import check_legal
from autopar.schedule.scheduled_plan import ScheduledPlan
from autopar.search import Thresholds, find_plan
from autopar.search.baselines.recipes import find_baselines
from autopar.search.bounds.surrogate import PHASES, Evaluation, Master, Multipliers, Term, floor_of_model, floor_of_space
from autopar.search.choices.pins import resolve_pins
from autopar.search.choices.space import Space
from autopar.search.driver.phase_table import Search
from autopar.search.folding.fold import Folding, fold_layers
from autopar.search.folding.tied_model import Decomposition, TiedModel, tie_model
from autopar.search.ilp.build import build_model
from autopar.search.ilp.decode import decode_assignment
from autopar.search.ilp.model import InSequence, Model, Weights
from autopar.search.ilp.overlap import LearnedOverlap
from autopar.search.settings import DECOMPOSITION_ENOUGH, FEWEST_REPEATS, IDLE_ROUNDS, OUTSIDE_SHARE
from autopar.solvers import evaluate, solve
from tests.search.requests import asked, budget

SPLIT_WIDTH = {"module:layers.[0-9]": "R R S0"}
"""What layers pass on is split as the next one cannot use it: what crosses from layer to layer costs."""
DEEP = f"zoo:gpt2,layers={FEWEST_REPEATS + 1},width=64,heads=4,batch=8,seq=32,vocab=128"


@cache
def graph() -> Graph:
    target = load_target(DEEP, "train", device="meta")
    return capture_graph(target.model, target.args, target.kwargs, mode="train", loss=target.loss, loss_args=target.loss_args)


def machine(mesh: str = "dp=4") -> Machine:
    return Machine(Mesh.parse(mesh), load_hardware("h100-sxm"), "roofline")


@cache
def folding() -> Folding:
    found = fold_layers(graph())
    assert found is not None
    return found


@cache
def models(mesh: str) -> tuple[Model, TiedModel]:
    on, pins = machine(mesh), resolve_pins(graph(), machine(mesh).mesh, SPLIT_WIDTH)
    inner = folding().pins(pins)
    assert inner is not None
    made = tie_model(build_model(Space(folding().graph, on, "adamw", inner)), folding())
    assert made is not None
    return build_model(Space(graph(), on, "adamw", pins)), made


def test_four_repeats_are_left() -> None:
    found = folding()
    assert len(graph().ops) - len(found.graph.ops) == (FEWEST_REPEATS + 1 - 4) * len(found.group.repeats[0])
    assert found.represented_count == FEWEST_REPEATS - 1
    known = {item.tensor for item in found.graph.inputs}
    for op in found.graph.ops:
        assert set(op.inputs) <= known
        known |= set(op.outputs)


def test_baselines_unfold_to_those_of_the_whole_graph() -> None:
    on, pins = machine("dp=2,tp=2"), resolve_pins(graph(), machine("dp=2,tp=2").mesh, {})
    inner = folding().pins(pins)
    assert inner is not None
    whole = find_baselines(Space(graph(), on, "adamw", pins))
    short = find_baselines(Space(folding().graph, on, "adamw", inner))
    assert whole.keys() == short.keys()
    for name, wanted in whole.items():
        made = folding().unfold(short[name])
        assert made is not None
        assert (made.inputs, made.strategies, made.reads) == (wanted.inputs, wanted.strategies, wanted.reads)
        assert set(made.layouts) == set(wanted.layouts)


def weights_of(model: Model) -> dict[str, Weights]:
    slowdown = model.space.machine.hardware.overlap_slowdown
    cuts = Master(model, slowdown)
    return {"sequence": InSequence(), "exposure": LearnedOverlap.first(slowdown), "mixture": cuts.first_weights()}


@pytest.mark.parametrize("name", ["sequence", "exposure", "mixture"])
def test_tied_costs_are_those_of_the_whole_and_bounds_hold_for_free_layers(name: str) -> None:
    whole, tied = models("dp=4")
    weights = weights_of(tied)[name]
    problem, unit = tied.problem(None, weights)
    found = solve(problem, time_limit=600.0, gap=1e-6)
    assert found.choices is not None
    assert found.objective is not None
    optimum = found.objective * unit
    # the tied answer costs the same in the whole graph
    choices = _in_whole(whole, tied, tied.expand(found.choices))
    priced = weights_of(whole)[name].price(whole)
    cost = sum(float(table[choices[number]]) for number, table in enumerate(priced.nodes))
    cost += sum(float(table[choices[e.source], choices[e.target]]) for e, table in zip(whole.edges, priced.edges, strict=True))
    assert cost == pytest.approx(optimum, rel=1e-6)
    # no free answer costs less than the bound, which is close
    free, free_unit = whole.problem(None, weights_of(whole)[name])
    oracle = solve(free, time_limit=600.0, gap=1e-6)
    assert oracle.objective is not None
    answer, joint = tied.expand(found.choices), Decomposition(tied, weights.price(tied))
    joint.layer.cost = lambda choices: -np.inf  # type: ignore[method-assign]  # so that every step solves the outside too
    bound = joint.bound(optimum, unlimited(), answer, np.inf)
    assert 0.97 * oracle.objective * free_unit <= bound <= oracle.objective * free_unit * (1 + 1e-9)
    # steps by the layer alone come as far
    pieces = Decomposition(models("dp=4")[1], weights.price(tied))
    alone = pieces.bound(optimum, unlimited(), answer, np.inf)
    assert bound * (1 - 2 * DECOMPOSITION_ENOUGH) <= alone <= oracle.objective * free_unit * (1 + 1e-9)
    # a bound that is wanted is reached with no more steps than it takes
    steps: list[int] = []
    for wanted in (0.5 * optimum, np.inf):
        counted = Decomposition(models("dp=4")[1], weights.price(tied))
        step, calls = counted.layer.solve, list[int]()
        counted.layer.solve = lambda *given, step=step, calls=calls: (calls.append(1), step(*given))[1]  # type: ignore[method-assign]
        assert counted.bound(optimum, unlimited(), answer, wanted) >= min(wanted, alone)
        steps.append(len(calls))
    assert steps[0] == 1 <= steps[1]
    # the tied answer costs the same in pieces
    inner, outer = (piece.cost(answer) for piece in (pieces.layer, pieces.outside))
    assert outer + pieces.times * inner == pytest.approx(optimum, rel=1e-6)


def test_the_outside_has_its_part_of_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where steps on the layer never agree with the outside; those that gain nothing end before."""
    tied = models("dp=4")[1]
    for moves, steps in ((True, 0), (False, 1 + IDLE_ROUNDS)):
        pieces = Decomposition(tied, weights_of(tied)["mixture"].price(tied))
        given, inner, outer = budget(10.0), list[float](), list[float]()
        answers = [np.zeros(len(piece.costs), np.int64) for piece in (pieces.layer, pieces.outside)]
        for paid in pieces.layer.paid.values():
            answers[0][paid] = [len(pieces.layer.costs[node]) - 1 for node in paid]  # other than what pays

        def of_layer(potentials: object, turn: Budget) -> tuple[float, np.ndarray]:
            inner.append(turn.left)  # noqa: B023
            turn.charge(1.0)
            return 0.1 - (0.1 * 0.8 ** len(inner) if moves else 0.1), answers[0]  # noqa: B023

        def of_outside(potentials: object, turn: Budget) -> tuple[float, np.ndarray]:
            outer.append(turn.left)  # noqa: B023
            return 1.0, answers[1]  # noqa: B023

        with monkeypatch.context() as patch:
            patch.setattr(pieces.layer, "solve", of_layer)
            patch.setattr(pieces.outside, "solve", of_outside)
            patch.setattr(pieces.layer, "cost", lambda choices: 0.1)
            pieces.bound(100.0, given, answers[0], np.inf)
        assert len(outer) == 1 and outer[0] >= OUTSIDE_SHARE * 10.0
        assert len(inner) == (steps or (1 - OUTSIDE_SHARE) * 10.0)


@pytest.mark.parametrize("target", [DEEP, f"zoo:resnet,blocks={FEWEST_REPEATS + 2},batch=8"])
def test_the_longest_chain_of_equal_layers_is_that_of_the_whole_graph(target: str) -> None:
    """What stands for several layers is passed through once for each, in the same way in all."""
    found = load_target(target, "train", device="meta")
    graph = capture_graph(found.model, found.args, found.kwargs, mode="train", loss=found.loss, loss_args=found.loss_args)
    short, pins = fold_layers(graph), resolve_pins(graph, machine().mesh, {})
    assert short is not None
    tied = tie_model(build_model(Space(short.graph, machine(), "adamw", pins)), short)
    whole = build_model(Space(graph, machine(), "adamw", pins))
    assert tied is not None
    choices = tied.expand(solve(tied.problem(None)[0], time_limit=600.0, gap=1e-6).choices)
    mine, wanted = Evaluation(tied, choices), Evaluation(whole, _in_whole(whole, tied, choices))
    for phase in PHASES:
        plain, spanned = (
            [
                one.sum_of(Term(phase, path=one.model.dependencies(phase).longest_path(*one.counted_once, spans)), 0.0)
                for one in (mine, wanted)
            ]
            for spans in (False, True)
        )
        assert plain[0] == pytest.approx(plain[1], rel=1e-9)
        assert plain[0] <= spanned[0] <= spanned[1] * (1 + 1e-9), "spans across repeats are left out"


def _in_whole(whole: Model, tied: TiedModel, choices: np.ndarray) -> np.ndarray:
    group = tied.fold.group
    found = np.zeros(len(whole.nodes), dtype=np.int64)
    for (kind, name), number in whole.node_number.items():
        repeat = group.repeat_of(name)
        if name.startswith("output:"):
            index = int(name.removeprefix("output:"))
            tensor = whole.planned_graph.outputs[index].tensor
            if group.repeat_of(tensor) in group.left_out:
                alike = group.counterpart(tensor, 1)
                index = next(n for n, item in enumerate(whole.planned_graph.outputs) if (item.kind, item.tensor) == ("output", alike))
            found[number] = choices[tied.node_number[kind, f"output:{tied.fold.outputs.index(index)}"]]
        else:
            place = name if repeat is None or repeat not in group.left_out else group.counterpart(name, 1)
            found[number] = choices[tied.node_number[kind, place]]
    return found


def test_sums_of_an_answer_are_those_of_the_whole() -> None:
    whole, tied = models("dp=4")
    problem, _ = tied.problem(None)
    found = solve(problem, time_limit=600.0, gap=1e-2).choices
    assert found is not None
    short = Evaluation(tied, tied.expand(found))
    long = Evaluation(whole, _in_whole(whole, tied, short.choices))
    for one, other in ((short.compute, long.compute), (short.between, long.between), (short.inside, long.inside)):
        assert {key: value for key, value in one.items() if value} == pytest.approx({key: value for key, value in other.items() if value})
    assert short.optimizer == pytest.approx(long.optimizer)
    phases: tuple[Phase, ...] = ("forward", "backward")
    for phase in phases:
        longest, path = (Master(one.model, 0.0).longest_path(phase, *one.counted_once) for one in (long, short))
        assert 0.0 < short.sum_of(Term(phase, path=path), 0.0) <= long.sum_of(Term(phase, path=longest), 0.0) * (1 + 1e-9)


def test_folded_search_finds_as_good_a_plan_as_the_whole_search() -> None:
    short = find_plan(graph(), machine())
    assert short.sizes["nodes"] < len(models("dp=4")[0].nodes)
    long = find_plan(graph(), machine(), skip={"folding"})
    assert short.seconds <= long.seconds * (1 + 5e-3)
    assert short.bound_seconds <= long.seconds
    assert short.bound_seconds >= long.bound_seconds * (1 - 5e-3)
    assert short.baselines.keys() == long.baselines.keys()


class Giving(nn.Module):
    """A layer that gives what it made inside, as caches are given."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(self.up(x))
        return x + self.down(hidden), hidden


class Stack(nn.Module):
    """The loss, and what each layer gives."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Giving() for _ in range(layers))

    def forward(self, x: Tensor) -> dict[str, Tensor | list[Tensor]]:
        given = []
        for layer in self.layers:
            x, hidden = layer(x)
            given.append(hidden)
        return {"loss": x.square().mean(), "given": given}


def test_layers_that_give_outputs_fold() -> None:
    on = machine("dp=2,tp=2")
    given = capture_graph(Stack(FEWEST_REPEATS + 2), (torch.randn(8, 16, 64),))
    found = fold_layers(given)
    assert found is not None
    assert len(given.outputs) - len(found.graph.outputs) == len(found.group.left_out) * 5 > 0, "an output and four gradients a layer"
    hidden = [f"output:{item.name}" for item in given.outputs if item.kind == "output" and given.tensors[item.tensor].shape]
    pins = resolve_pins(given, on.mesh, dict.fromkeys(hidden, "S0 R R"))
    inner = found.pins(pins)
    assert inner is not None
    assert found.pins(resolve_pins(given, on.mesh, dict.fromkeys(hidden[3:], "S0 R R"))) is None
    spaces = Space(given, on, "adamw", pins), Space(found.graph, on, "adamw", inner)
    whole, short = (find_baselines(space) for space in spaces)
    assert "megatron" in whole
    for name, wanted in whole.items():
        made = found.unfold(short[name])
        assert made is not None
        assert (made.inputs, made.strategies, made.reads) == (wanted.inputs, wanted.strategies, wanted.reads)
        assert set(made.layouts) == set(wanted.layouts)
    long, tied = build_model(spaces[0]), tie_model(build_model(spaces[1]), found)
    assert tied is not None
    problem, unit = tied.problem(None)
    answer = solve(problem, time_limit=600.0, gap=1e-6)
    assert answer.choices is not None
    assert answer.objective is not None
    choices = _in_whole(long, tied, tied.expand(answer.choices))
    priced = InSequence().price(long)
    cost = sum(float(table[choices[number]]) for number, table in enumerate(priced.nodes))
    cost += sum(float(table[choices[e.source], choices[e.target]]) for e, table in zip(long.edges, priced.edges, strict=True))
    assert cost == pytest.approx(answer.objective * unit, rel=1e-6)
    items, limit = tied.problem(2**40)[0], long.problem(2**40)[0]
    assert evaluate(items, answer.choices)[1] == pytest.approx(evaluate(limit, choices)[1], rel=0.02)


def test_weights_change_what_a_problem_costs_and_nothing_else() -> None:
    """What does not change is made once: a bound asks for one problem after another."""
    tied = models("dp=4")[1]
    one, other = tied.problem(None)[0], tied.problem(2**40, Multipliers({Term("forward", compute=True): 1.0}, 0.0))[0]
    assert not np.array_equal(one.costs, other.costs)
    for name in ("edges", "edge_ptr", "item_begin", "item_end", "item_usage"):
        assert getattr(one, name) is getattr(other, name)


def test_pins_on_some_of_the_layers_are_kept() -> None:
    inputs = [item for item in graph().inputs if ".3." in item.name and len(graph().tensors[item.tensor].shape) == 2]
    assert inputs
    some = resolve_pins(graph(), machine().mesh, {item.name: "R R" for item in inputs})
    assert folding().pins(some) is None
    everywhere = resolve_pins(graph(), machine().mesh, {item.name.replace(".3.", ".*."): "R R" for item in inputs})
    assert folding().pins(everywhere) is not None


class PessimisticSearch(Search):
    """Schedules at full depth take longer than the estimate ``flattered`` says."""

    flattered: ScheduledPlan | None = None

    def schedule_at_full_depth(self, found: ScheduledPlan) -> ScheduledPlan:
        exact = super().schedule_at_full_depth(found)
        return replace(exact, seconds=1.12 * found.seconds) if found is self.flattered else exact


EXTRAPOLATED = Thresholds(short_depths=(5, 6), deep_layers=FEWEST_REPEATS + 1)
"""Thresholds under which this file's graph is deep."""


def test_extrapolated_schedule_agrees_with_the_schedule_at_full_depth() -> None:
    model = replace(models("dp=4")[1], thresholds=EXTRAPOLATED)
    limit = 2**33
    search = PessimisticSearch(model, asked(limit, work=60.0), False)
    problem, _ = model.problem(None)
    answer = solve(problem, time_limit=600.0, gap=1e-2).choices
    assert answer is not None
    found = search.schedule(decode_assignment(model, model.expand(answer)), None, tries=0)
    assert found.estimated and len(found.schedule.graph.ops) == len(graph().ops) - len(folding().group.repeats[0])
    search.flattered = flattered = replace(found, seconds=0.98 * found.seconds)
    assert search.offer(found, "auto") and search.offer(flattered, "auto")
    search.settle_best()
    best = search.best
    assert best is not None and not best.estimated and best.schedule.graph is graph(), "what is kept was scheduled whole"
    assert best.seconds < 1.05 * found.seconds, "what an estimate flattered does not stay the best"
    check_legal(best.schedule, "whole")
    assert found.memory.peak == pytest.approx(best.memory.peak, rel=1e-3)
    assert found.seconds == pytest.approx(best.seconds, rel=0.03)
    near = Search(model, asked(best.memory.peak, work=60.0), False)
    assert not near.schedule(found.assignment, None, tries=0).estimated, "near the limit nothing is guessed"


def test_the_floor_of_a_folded_space_is_that_of_the_whole_graph() -> None:
    on = machine("x=2,y=2")
    spaces = [Space(some, on, "adamw", resolve_pins(some, on.mesh, {})) for some in (graph(), folding().graph)]
    whole = floor_of_model(build_model(spaces[0]))
    assert floor_of_space(spaces[0], None) == pytest.approx(whole)
    assert floor_of_space(spaces[1], folding()) == pytest.approx(whole)
