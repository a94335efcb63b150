"""All ways from one layout at once against the search of one pair, and what is kept to the names that were asked with."""

import itertools
import math
import random

import pytest

from autopar.cost_models import Figures, Link, Machine, Mesh, load_hardware
from autopar.reshard import search, trees
from autopar.reshard.cuts import prime_cut
from autopar.reshard.letters import Alphabet
from autopar.reshard.moves import Question, Way, moves_from, with_word
from tests.reshard_cases import machine

PER_MESH = 60
UNLIKE = Link(9e-6, 30e9, "ring", 3e-6, (("all_gather", Figures(3e-5, 2e10, "tree", 2e-5)), ("permute", Figures(6e-5, 5e9))))
MACHINES = {
    "nodes of 8": Machine(Mesh.parse("2x2x2x2"), load_hardware("h100-sxm")),
    "one node": Machine(Mesh.parse("2x4"), load_hardware("h100-sxm")),
    "other sizes": Machine(Mesh.parse("3x2x2"), load_hardware("v100")),
    "links unlike": machine("x=2,y=2,z=2", 5e-6, 100e9, y=UNLIKE),
    "bytes alone": machine("2x2x2", 0.0),
    "latency alone": machine("2x3", 1.0, math.inf),
}


def questions(on: Machine, count: int, limit: float = math.inf) -> list[Question]:
    draw = random.Random(0)
    alphabet = prime_cut(on).alphabet
    found = []
    while len(found) < count:
        offered = (1, alphabet.sizes[0], alphabet.ranks, alphabet.ranks, 3 * alphabet.ranks)
        capacities = tuple(draw.choice(offered) for _ in range(draw.randint(0, 4)))
        layouts = [layout(alphabet, capacities, draw) for _ in range(2)]
        free = sorted(set(range(len(alphabet.sizes))) - set(itertools.chain.from_iterable(layouts[0])))
        partial = tuple(letter for letter in free if draw.random() < 0.4)
        found.append(Question(alphabet, capacities, *layouts, partial, draw.choice((0.0, 2.0**10, 2.0**20, 2.0**30)), limit))
    return found


def layout(alphabet: Alphabet, capacities: tuple[int, ...], draw: random.Random) -> tuple[tuple[int, ...], ...]:
    words: list[tuple[int, ...]] = [()] * len(capacities)
    letters = list(range(len(alphabet.sizes)))
    for letter in draw.sample(letters, draw.randint(0, len(letters))):
        room = [dim for dim, word in enumerate(words) if capacities[dim] % alphabet.count((*word, letter)) == 0]
        if room:
            dim = draw.choice(room)
            words[dim] = (*words[dim], letter)
    return tuple(words)


def received(question: Question, way: Way) -> float:
    """Follows the moves, each one of those there are, from source to target; the fraction of the tensor that arrives."""
    alphabet, total = question.alphabet, 0.0
    state = (question.source, question.partial)
    for move in way.moves:
        assert move.before == state[0]
        block = 1 / math.prod(alphabet.count(word) for word in move.before)
        if move.kind == "slice":
            state, more = (with_word(move.before, *move.dims, move.before[move.dims[0]] + move.letters), state[1]), 0.0
            assert all(capacity % alphabet.count(word) == 0 for capacity, word in zip(question.capacities, move.after, strict=True))
        elif move.kind == "permute":
            assert [alphabet.count(word) for word in move.before] == [alphabet.count(word) for word in move.after]
            assert not set(itertools.chain.from_iterable(move.after)) & set(state[1])
            state, more = (move.after, state[1]), block
        else:
            there = moves_from(alphabet, question.capacities, state)
            state, more = next((after, part) for part, *how, after in there if how == [move.kind, move.letters, move.dims])
        assert move.after == state[0]
        total += more
    assert state == (question.target, ())
    return total


@pytest.mark.parametrize("name", MACHINES)
def test_ways_are_those_of_the_search_of_one_pair(name: str) -> None:
    for question in questions(MACHINES[name], PER_MESH):
        found, oracle = trees.solve(question), search.solve(question)
        assert found is not None and oracle is not None
        assert found.seconds == pytest.approx(oracle.seconds, rel=1e-9, abs=1e-30), question
        assert received(question, found) <= received(question, oracle) * (1 + 1e-9), question


def test_only_a_cheaper_way_than_the_limit_is_of_interest() -> None:
    for question in questions(MACHINES["nodes of 8"], PER_MESH, limit=3e-5):
        found, oracle = trees.solve(question), search.solve(question)
        assert (found is None) == (oracle is None), question
        assert found is None or found.seconds < question.limit


def test_layouts_are_listed_where_they_are_few() -> None:
    alphabet = prime_cut(MACHINES["nodes of 8"]).alphabet
    for capacities in ((), (16,), (16, 16, 1), (16, 16, 16, 16), (48, 16, 32, 4)):
        dims = sum(capacity > 1 for capacity in capacities)
        assert trees.listed(alphabet, capacities)
        assert len(trees.graph_of(alphabet, dims).states) == trees.number_of_states(4, dims)
    many = prime_cut(Machine(Mesh.parse("8x8"), load_hardware("h100-sxm"))).alphabet
    assert not trees.listed(many, (64, 64))
