"""What calls take beside what they send, against the calls of lists: with buckets and without, second runs included."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product

import numpy as np
import pytest

from autopar.graph import Phase
from autopar.schedule import AGAIN, Limits, Schedule, make_schedule, memory, step_seconds
from autopar.search.bounds import PHASES, Cuts, Mixture, Term
from autopar.search.building import build_model
from autopar.search.calls import ALONE, GROUPS, ONCE, READERS, WAYS, Charges, Group, chain, resting, stored_shares
from autopar.search.extract import extract
from autopar.search.folded import folded
from autopar.search.model import Model, Priced
from autopar.search.pins import Pins
from autopar.search.resharding import COPIES, ROLES
from autopar.search.space import Space
from solvers import solve
from tests.graphs import machine, random_graph
from tests.search.test_folding import folding

SLOWDOWN = 0.15
FEW, MANY = (Limits(bucket_bytes=size, ahead_bytes=2**40, aside_bytes=0) for size in (0, 2**40))
"""No two values share a call, and all that may."""
CLOSE = 1 + 1e-9


@dataclass(frozen=True)
class Drawn:
    """As ``Weights``: any prices, so that the answer is any plan; dear ones where nothing is resharded, at times."""

    seed: int

    def price(self, model: Model) -> Priced:
        draw = np.random.default_rng(self.seed)
        moving = draw.random() - 0.7

        def edge(table: np.ndarray) -> np.ndarray:
            found = np.where(table > 0.0, moving, 0.0) + draw.random(table.shape)
            return np.where(np.isfinite(table), np.maximum(found, 0.0), np.inf)

        return Priced([draw.random(node.seconds.shape) for node in model.nodes], [edge(one.seconds) for one in model.edges])


@cache
def model_of(seed: int) -> Model:
    graph = random_graph(seed, layers=4, batch=16, width=16)
    return build_model(Space(graph, machine("x=2,y=2"), "adamw", Pins()), again=1, share=0.0)


@cache
def choices_of(seed: int, draw: int) -> np.ndarray:
    found = solve(model_of(seed).problem(None, Drawn(draw))[0], time_limit=600.0, gap=0.05).choices
    assert found is not None
    return found


@cache
def listed(seed: int, draw: int, limits: Limits) -> Schedule:
    model = model_of(seed)
    return make_schedule(model.space.graph, extract(model, choices_of(seed, draw)), model.space.machine, limits)


def draws_of(seed: int) -> list[int]:
    """Draws whose second runs are all read, as other plans have none."""
    model, found = model_of(seed), []
    for draw in range(16):
        picked = zip(model.nodes, choices_of(seed, draw), strict=True)
        again = {node.name + AGAIN for node, choice in picked if node.picks is not None and node.picks[choice] >= 0}
        if again <= listed(seed, draw, FEW).operations.keys():
            found.append(draw)
    return found


def charges_of(seed: int, mixture: Mixture, schedule: Schedule) -> Charges:
    return Charges(mixture, model_of(seed), memory(schedule, "adamw").peak)


def taken(charges: Charges, schedule: Schedule) -> tuple[dict[tuple[Phase, int], float], Counter[tuple[Phase, int]]]:
    """What the calls of each phase and role take beside what they send, and how many of them are of several values."""
    where, found, shared = charges.model.space.machine, defaultdict[tuple[Phase, int], float](float), Counter[tuple[Phase, int]]()
    for item in schedule.instructions:
        if item.kind == "start" and not schedule.collectives[item.of].late:
            call = schedule.collectives[item.of]
            group = item.half, next(role for role, kinds in enumerate(ROLES) if call.kind in kinds)
            held = [link in where.links(call.axes) for link in charges.model.space.links]
            found[group] += float(charges.links[item.half] @ held) * where.latency_seconds(call.kind, call.axes)
            found[group] += charges.compute[item.half] * where.copy_seconds(call.copied_bytes, call.dtype)
            shared[group] += len(call.parts) > 1
    return found, shared


def copies_counted(charges: Charges, choices: np.ndarray, group: Group) -> float:
    """What the mixture has of a group's copies."""
    phase, role = group
    return sum(
        charges.compute[phase] * charges.model.calls(edge)[choices[edge.source], choices[edge.target], role, COPIES][1] / edge.readers
        for edge in charges.model.edges if edge.tensor is not None and edge.phase == phase
    )  # fmt: skip


def test_groups_count_no_more_than_their_calls_take() -> None:
    """By any way that holds for what shares calls there, in a rank's memory that the list fills."""
    kinds = Counter[bool]()
    for seed in range(6):
        mixture = Cuts(model_of(seed), SLOWDOWN).first()
        for draw, limits in product(draws_of(seed), (FEW, MANY)):
            schedule, choices = listed(seed, draw, limits), choices_of(seed, draw)
            charges = charges_of(seed, mixture, schedule)
            seconds, shared = taken(charges, schedule)
            _, groups = charges.of(mixture.price(charges.model), choices)
            for number, group in enumerate(GROUPS):
                least = copies_counted(charges, choices, group)
                for (reader, way), count in np.ndenumerate(groups[number]):
                    if WAYS[way] != "alone" or not shared[group]:
                        part = float(count) + least - (0.0 if shared[group] else charges.constant[group][way])
                        assert part <= seconds[group] * CLOSE + 1e-15, (seed, draw, group, WAYS[way], READERS[reader])
                        kinds[shared[group] > 0] += part > 1e-9
    assert min(kinds[True], kinds[False]) > 200


@pytest.mark.parametrize("seed", range(6))
def test_no_step_is_shorter_than_what_is_counted(seed: int) -> None:
    """With the sums of the mixture, and any ways mixed; also where a mixture counts a link's work itself."""
    model = model_of(seed)
    links = Mixture({Term(phase, "node", compute=compute): 0.5 for phase in PHASES for compute in (True, False)}, SLOWDOWN)
    draws, counted = np.random.default_rng(seed), 0
    for mixture in (Cuts(model, SLOWDOWN).first(), links):
        for draw, limits in product(draws_of(seed), (FEW, MANY)):
            schedule, choices = listed(seed, draw, limits), choices_of(seed, draw)
            charges = charges_of(seed, mixture, schedule)
            _, shared = taken(charges, schedule)
            total, groups = charges.of(mixture.price(model), choices)
            plain = total
            for number, group in enumerate(GROUPS):
                ways = draws.dirichlet(np.ones(2 * (len(WAYS) - 1))).reshape(2, -1) if shared[group] else ALONE[:, -1:]
                offered = groups[number, :, :-1] if shared[group] else groups[number, :, -1:]
                total += float((ways * offered).sum())
            assert total <= step_seconds(schedule, "adamw") * CLOSE
            counted += total > plain * (1 + 1e-3)
    assert counted > 10


@pytest.mark.parametrize("seed", range(3))
def test_prices_come_to_what_an_answer_counts(seed: int) -> None:
    """Of the tables that a problem is made of, and of the answer's own sums; and ways differ."""
    model, draws = model_of(seed), np.random.default_rng(seed)
    mixture = Cuts(model, SLOWDOWN).first()
    charges = Charges(mixture, model, 1e6)
    choices = choices_of(seed, 1)
    total, groups = charges.of(mixture.price(model), choices)
    assert len({float(one) for one in groups.sum(axis=(0, 1))}) >= len(WAYS) - 1
    for _ in range(3):
        ways = {group: draws.dirichlet(np.ones(2 * len(WAYS))).reshape(2, -1) for group in GROUPS}
        priced = charges.counted(ways).price(model)
        nodes = sum(float(table[one]) for table, one in zip(priced.nodes, choices, strict=True))
        edges = sum(float(table[choices[edge.source], choices[edge.target]]) for edge, table in zip(model.edges, priced.edges, strict=True))
        mixed = sum(float((ways[group] * (groups[number] - charges.constant[group])).sum()) for number, group in enumerate(GROUPS))
        assert nodes + edges == pytest.approx(total + mixed, rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_on_a_chain_each_tensor_is_read_once(seed: int) -> None:
    """So that its calls follow one another; and it is as long as there is one."""
    model = model_of(seed)
    for phase in PHASES:
        edges = [model.edges[number] for number in chain(model, phase)]
        assert all(edge.phase == phase for edge in edges)
        assert len({edge.source for edge in edges}) == len({edge.target for edge in edges}) == len(edges)
        assert all(later.source == earlier.target for later, earlier in pairwise(edges))
        assert len(edges) > 4


def test_parameters_of_equal_layers_have_shares_as_often_as_they_stand_there() -> None:
    """So that no mean counts more than one of them does."""
    tied = folded(build_model(Space(folding().graph, machine("x=2"), "adamw", Pins())), folding())
    for model in (model_of(0), tied):
        assert model is not None
        shares = stored_shares(model)
        times = {name: float(model.node_times[model.number["input", name]]) for name in shares}
        assert sum(times[name] * share for name, share in shares.items()) == pytest.approx(1.0)
    assert max(times.values()) > 1.0


@pytest.mark.parametrize("seed", range(3))
def test_every_plan_holds_what_rests(seed: int) -> None:
    for draw in range(8):
        held = memory(listed(seed, draw, FEW), "adamw")
        assert resting(model_of(seed)) <= held.resting
    assert resting(model_of(seed)) > 0.0


@pytest.mark.parametrize("seed", range(3))
def test_no_price_is_negative(seed: int) -> None:
    """What the mixture has of copies is taken off, whatever its weights: nothing is left where nothing else counts."""
    model, draws = model_of(seed), np.random.default_rng(seed)
    for _ in range(30):
        mixture = Mixture({Term(phase, compute=True): float(draws.random()) for phase in PHASES}, 0.0)
        charges = Charges(mixture, model, 1e6)
        assert min(float(table.min()) for table in charges.counted(dict.fromkeys(GROUPS, ONCE)).price(model).edges) == 0.0
