"""The rule notation: one string says how an operator can be cut.

    m k, k n -> m n                     a factor that is not in an output is summed there
    ... d! -> ... d!                    `!`: whole on every rank;  `...`: any dims, broadcast from the right
    n (g i) _..., (g o) i _... -> n (g o) _...      `(g i)`: one dim of several factors, major to minor;  `_...`: any dims, whole
    ... d -> ... +d:max                 reduced by max (or min, product) instead of sum
    b h s e, b h s ~e                   an output that does not depend on `e` (replicated, not partial)
    [t x] k -> [y x] [t] k              `[t x]`: one dim whose entries stand in no order, so that any of its factors may split it; a factor
                                        of such dims has the extent that divides all of them
    m n +k, m k, k n -> m n +k          an input that must come partial over the axes of `k`
    ... _ * -> ... _                    `*`: one term for every tensor of a list;  `_`: one dim, whole;  `1`: a dim of size 1
    b?                                  this dim may be of size 1 and is then broadcast;  `a=2` gives a factor's extent;  `()` is a scalar

Clauses follow a bar:

    | linear {0 1} {2}      partial sums flow from inputs 0 and 1 together, or from input 2 alone, to every output
    | exchange n: all_reduce sum          the operator is this collective when `n` is split
    | exchange x: all_to_all rows y       when `x` is split: ranks tell how many rows they have for each of `y`, and send them; of `counts`
                                        they tell alone
    | inner d: max(...) sum(...)        when `d` is split: all-reduces of statistics of those dims inside the operator
    | triangle s                        work grows along `s` as the rows of a triangle do: its last part does the most
    | mirror s: {0} {3 4}               ranks may trade half of their part of `s` with the rank as far from the other end, and all have
                                        the same to do: half of these tensors (inputs, then outputs) travels, a group as one
    | ring s t: {1 2}                   where `s` is split, so may `t` be, over the same axes: these inputs travel once around the ranks

Reading is pure and cached (``parse``); putting in shapes is a separate step (``autopar.rules.binding``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

from autopar.errors import RuleError
from autopar.sharding import REDUCTIONS

SAME = "same"
"""The mark of a factor that an output does not depend on."""

_REDUCTION = "|".join(REDUCTIONS)
_TOKEN = re.compile(
    rf"\s*(?:(?P<ellipsis>\.\.\.!?|_\.\.\.)|(?P<suffix>[+~](?:[A-Za-z][A-Za-z0-9]*|\.\.\.)(?::(?:{_REDUCTION}))?)"
    r"|(?P<name>[A-Za-z][A-Za-z0-9]*(?:=\d+)?[!?]?|_)|(?P<size>\d+)|(?P<open>[(\[])|(?P<close>\)\??|\])|(?P<many>\*))"
)
_HINT = "a rule reads like 'm k, k n -> m n'; see the module docstring of autopar.rules.notation"


@dataclass(frozen=True)
class Token:
    """One dim of a term, or an ellipsis.

    Args:
        names: factors, major to minor; ``_`` is a factor without a name, whole.
        kind: ``dim``; ``ellipsis`` (``...``); ``rest`` (``_...``).
        size: the literal size of a dim written as a number (its names are empty), else None.
        optional: written with ``?``: of size 1 it is broadcast.
        loose: written in brackets: its entries stand in no order.
    """

    names: tuple[str, ...] = ()
    kind: str = "dim"
    size: int | None = None
    optional: bool = False
    loose: bool = False


@dataclass(frozen=True)
class Term:
    """One tensor of a rule, or, with ``many``, every tensor of a list. ``suffixes``: (factor, reduction or same)."""

    dims: tuple[Token, ...]
    suffixes: tuple[tuple[str, str], ...] = ()
    many: bool = False


@dataclass(frozen=True)
class Pattern:
    """A rule as written, before shapes are put in.

    Args:
        text: what was written.
        inputs, outputs: the terms.
        whole: factors that stay whole (``...`` for the ellipsis's).
        given: extents written with ``=``.
        flows: groups of inputs (None means all): partial sums of a group's inputs together pass to every output.
        inner: (factor, reduction, dims): an all-reduce inside the operator when the factor is split.
        triangles: factors along which the work grows from nothing, evenly.
        mirror: (factor, groups of tensors): what travels where ranks trade halves of their parts of the factor.
        ring: (factor, factor of what travels, inputs that travel).
        exchange: (factor, kind, reduction, experts): the collective that the operator is where the factor is split (``Exchange``).
    """

    text: str
    inputs: tuple[Term, ...]
    outputs: tuple[Term, ...]
    whole: frozenset[str] = frozenset()
    given: tuple[tuple[str, int], ...] = ()
    flows: tuple[tuple[int, ...] | None, ...] = ()
    inner: tuple[tuple[str, str, tuple[Token, ...]], ...] = ()
    triangles: frozenset[str] = frozenset()
    mirror: tuple[str, tuple[tuple[int, ...], ...]] | None = None
    ring: tuple[str, str, tuple[int, ...]] | None = None
    exchange: tuple[str, str, str, str] | None = None

    @property
    def names(self) -> frozenset[str]:
        """Every factor named in it."""
        return frozenset(name for term in self.inputs + self.outputs for token in term.dims for name in token.names) - {"_"}


@lru_cache(maxsize=16384)
def parse(text: str) -> Pattern:
    """Reads a rule.

    Raises:
        RuleError: with the rule and the word that cannot be read.

    >>> parse("m k, k n -> m n").names == {"m", "k", "n"}
    True
    """
    try:
        return _parse(text)
    except _Unreadable as problem:
        raise RuleError(f"cannot read the rule {text!r}: {problem}", _HINT) from None


class _Unreadable(Exception):
    """A short reason, given once with the whole rule by ``parse``."""


def _parse(text: str) -> Pattern:
    body, *clauses = text.split("|")
    if body.count("->") != 1:
        raise _Unreadable("it needs one '->' between inputs and outputs")
    left, right = body.split("->")
    whole: set[str] = set()
    given: dict[str, int] = {}
    pattern = Pattern(text, _terms(left, whole, given), _terms(right, whole, given))
    if not pattern.outputs:
        raise _Unreadable("it has no output (a scalar is written '()')")
    known = pattern.names | {"..."}
    for term in pattern.inputs + pattern.outputs:
        for name, _ in term.suffixes:
            if name not in known:
                raise _Unreadable(f"the suffix names {name!r}, which is in no tensor")
        if sum(token.kind != "dim" for token in term.dims) > 1:
            raise _Unreadable("a tensor has more than one '...'")
    for name in (name for term in pattern.inputs for name, mark in term.suffixes if mark == SAME):
        raise _Unreadable(f"'~{name}' is for outputs")
    pattern = replace(pattern, whole=frozenset(whole), given=tuple(sorted(given.items())))
    for clause in clauses:
        pattern = _clause(pattern, clause.strip())
    return pattern


def _terms(text: str, whole: set[str], given: dict[str, int]) -> tuple[Term, ...]:
    return tuple(_term(part, whole, given) for part in text.split(",")) if text.strip() else ()


def _term(text: str, whole: set[str], given: dict[str, int]) -> Term:
    if not text.strip():
        raise _Unreadable("an empty tensor between commas (a scalar is written '()')")
    if text.strip().startswith("()"):
        text = text.strip()[2:]
    tokens: list[Token] = []
    suffixes: list[tuple[str, str]] = []
    group: list[str] | None = None
    opened = ""
    many, position, text = False, 0, text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise _Unreadable(f"{text[position:].split()[0]!r} in {text.strip()!r}")
        position = match.end()
        word = match[0].strip()
        if group is not None and match.lastgroup not in ("name", "close"):
            raise _Unreadable(f"{word!r} inside parentheses in {text.strip()!r}")
        if (suffixes and match.lastgroup not in ("suffix", "many")) or many:
            raise _Unreadable(f"{word!r} follows a suffix in {text.strip()!r}")
        match match.lastgroup:
            case "ellipsis":
                tokens.append(Token(kind="rest" if word.startswith("_") else "ellipsis"))
                if word.endswith("!"):
                    whole.add("...")
            case "suffix":
                name, _, reduction = word[1:].partition(":")
                suffixes.append((name, SAME if word[0] == "~" else reduction or "sum"))
            case "name":
                name, _, size = word.rstrip("!?").partition("=")
                if size:
                    given[name] = int(size)
                if word.endswith("!"):
                    whole.add(name)
                if group is not None and word.endswith("?"):
                    raise _Unreadable(f"{word!r}: write '?' after the parentheses")
                if group is None:
                    tokens.append(Token((name,), optional=word.endswith("?")))
                else:
                    group.append(name)
            case "size":
                tokens.append(Token(size=int(word)))
            case "open":
                group, opened = [], word
            case "close":
                if not group or {"(": ")", "[": "]"}[opened] != word[0]:
                    raise _Unreadable(f"a {word[0]!r} with nothing before it in {text.strip()!r}")
                tokens.append(Token(tuple(group), optional=word.endswith("?"), loose=opened == "["))
                group = None
            case _:
                many = True
    if group is not None:
        raise _Unreadable(f"a {opened!r} is not closed in {text.strip()!r}")
    names = [name for token in tokens for name in token.names if name != "_"]
    if len(set(names)) != len(names):
        raise _Unreadable(f"a factor stands twice in {text.strip()!r}")
    return Term(tuple(tokens), tuple(suffixes), many)


def _clause(pattern: Pattern, text: str) -> Pattern:
    word, _, rest = text.partition(" ")
    if word == "linear":
        groups = re.findall(r"\{([^{}]*)\}", rest)
        if not groups or re.sub(r"\{[^{}]*\}|\s", "", rest):
            raise _Unreadable(f"the clause {text!r}: write the inputs in braces, as in 'linear {{0 1}} {{2}}'")
        for group in groups:
            if not re.fullmatch(r"\s*(all|(\d+\s*)*)\s*", group):
                raise _Unreadable(f"{{{group}}} in the clause {text!r}: input numbers, or 'all'")
        flows = tuple(None if group.strip() == "all" else tuple(int(item) for item in group.split()) for group in groups)
        return replace(pattern, flows=pattern.flows + flows)
    if word == "inner":
        name, colon, statistics = rest.partition(":")
        parts = re.findall(rf"({_REDUCTION})\(([^()]*)\)", statistics)
        if not colon or name.strip() not in pattern.names | {"..."} or not parts:
            raise _Unreadable(f"the clause {text!r}: write 'inner d: max(...) sum(...)' for a factor of the rule")
        inner = tuple((name.strip(), reduction, _term(dims or "()", set(), {}).dims) for reduction, dims in parts)
        return replace(pattern, inner=pattern.inner + inner)
    if word == "triangle":
        if not rest.split() or not pattern.names >= set(rest.split()):
            raise _Unreadable(f"the clause {text!r}: write 'triangle s' for a factor of the rule")
        return replace(pattern, triangles=pattern.triangles | set(rest.split()))
    if word == "mirror":
        match = re.fullmatch(r"(\w+):((?:\s*\{[\d\s]*\d[\d\s]*\})+)", rest.strip())
        if not match or match[1] not in pattern.names:
            raise _Unreadable(f"the clause {text!r}: write 'mirror s: {{0}} {{3 4}}' for a factor of the rule")
        sent = tuple(tuple(int(item) for item in group.split()) for group in re.findall(r"\{([^{}]*)\}", match[2]))
        return replace(pattern, mirror=(match[1], sent))
    if word == "ring":
        match = re.fullmatch(r"(\w+) (\w+):\s*\{([\d\s]*\d[\d\s]*)\}", rest.strip())
        if not match or not pattern.names >= {match[1], match[2]}:
            raise _Unreadable(f"the clause {text!r}: write 'ring s t: {{1 2}}' for factors of the rule")
        return replace(pattern, ring=(match[1], match[2], tuple(map(int, match[3].split()))))
    if word == "exchange":
        match = re.fullmatch(r"(\w+): (\w+)(?: (\w+))?(?: (\w+))?", rest.strip())
        if not match or match[1] not in pattern.names:
            raise _Unreadable(f"the clause {text!r}: write 'exchange n: all_reduce sum' for a factor of the rule")
        return replace(pattern, exchange=(match[1], match[2], match[3] or "", match[4] or ""))
    raise _Unreadable(f"the clause {text!r} is none of linear, inner, triangle, mirror, ring, exchange")
