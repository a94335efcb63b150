"""The apply step: a rule's text and an operator's shapes give a ShardingRule."""

from __future__ import annotations

import math
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.errors import RuleError
from autopar.rules.notation import SAME, Pattern, Term, Token, parse
from autopar.rules.rule import Dims, Exchange, Mirror, Ring, ShardingRule, Statistic

Shape = tuple[int, ...]


class Mismatch(Exception):
    """A short reason why a rule does not fit; shown once with the rule, the operator and the shapes."""


@dataclass(frozen=True)
class Place:
    """An item of a laid-out term: a token of one dim, or the ``ellipsis``-th ellipsis dim from the right."""

    token: Token | None
    ellipsis: int = -1


def bind(
    text: str,
    inputs: Sequence[Shape],
    outputs: Sequence[Shape],
    *,
    operator: str = "",
    family: str = "",
    slots: Sequence[Sequence[int]] | None = None,
    dims: Sequence[int] | None = None,
    keep: bool = False,
) -> ShardingRule:
    """Puts shapes into a rule.

    Args:
        text: the rule.
        inputs, outputs: global shapes, in the operator's order.
        operator, family: for messages and for the rule found.
        slots: for each input term the inputs it stands for (none when absent, several for a list); by default one each.
        dims: in a rule about given dims, where the token after ``...`` stands (negative counts from the end).
        keep: with ``dims``: a reduced dim stays as a dim of size 1.

    Raises:
        RuleError: when the rule cannot be read or does not fit; names the rule, the operator and the shapes.
    """
    pattern = parse(text)
    try:
        return _Binder(pattern, tuple(inputs), tuple(outputs), slots, dims, keep).rule(operator, family)
    except Mismatch as problem:
        shapes = ", ".join(str(list(shape)) for shape in inputs) + " -> " + ", ".join(str(list(shape)) for shape in outputs)
        raise RuleError(
            f"the rule {text!r} of {operator or 'an operator'} does not fit the shapes {shapes}: {problem}",
            "correct the operator's row in autopar.rules.table",
        ) from None


class _Binder:
    """One application of a pattern; lives for the length of ``bind``."""

    def __init__(
        self,
        pattern: Pattern,
        inputs: tuple[Shape, ...],
        outputs: tuple[Shape, ...],
        slots: Sequence[Sequence[int]] | None,
        dims: Sequence[int] | None,
        keep: bool,
    ) -> None:
        self.pattern, self.shapes = pattern, (inputs, outputs)
        self.slots = self._default_slots() if slots is None else [tuple(slot) for slot in slots]
        self.inputs = self._input_terms()
        self.outputs = _repeated(pattern.outputs, len(outputs), "output")
        if keep:
            self.outputs = [_keeping(term) for term in self.outputs]
        self.given = dict(pattern.given)
        self.dims = None if dims is None else self._positions(dims)
        self.along = self._along()
        self.places = [_lay_out(term, len(shape), self.dims, self.along) for term, shape in self._terms()]
        self.letters = self._letters()
        self.loose = {name for term, _ in self._terms() for token in term.dims if token.loose for name in token.names}
        self.extents: dict[str, int] = dict(self.given)

    def _terms(self) -> list[tuple[Term, Shape]]:
        return list(zip([*self.inputs, *self.outputs], [*self.shapes[0], *self.shapes[1]], strict=True))

    def _default_slots(self) -> list[tuple[int, ...]]:
        terms, count = self.pattern.inputs, len(self.shapes[0])
        if len(terms) == 1 and terms[0].many:
            return [tuple(range(count))]
        if len(terms) != count or any(term.many for term in terms):
            raise Mismatch(f"it has {len(terms)} inputs, the operator {count}")
        return [(index,) for index in range(count)]

    def _input_terms(self) -> list[Term]:
        if len(self.slots) != len(self.pattern.inputs):
            raise Mismatch(f"it has {len(self.pattern.inputs)} inputs, the operator {len(self.slots)}")
        found: dict[int, Term] = {}
        for term, slot in zip(self.pattern.inputs, self.slots, strict=True):
            found.update(dict.fromkeys(slot, term))
        if sorted(found) != list(range(len(self.shapes[0]))):
            raise Mismatch(f"it covers inputs {sorted(found)} of {len(self.shapes[0])}")
        return [found[index] for index in range(len(self.shapes[0]))]

    def _positions(self, dims: Sequence[int]) -> tuple[int, ...]:
        rank = next((len(shape) for term, shape in self._terms() if _follower(term)), len(self._terms()[0][1]))
        if rank == 0:
            return ()
        if any(not -rank <= dim < rank for dim in dims):
            raise Mismatch(f"dims {list(dims)} of a tensor of {rank} dims")
        return tuple(sorted({dim % rank for dim in dims}))

    def _along(self) -> str | None:
        """The factor that stands for the given dims, if it has a name."""
        if self.dims is None:
            return None
        followers = (_follower(term) for term in [*self.inputs, *self.outputs])
        return next((token.names[0] for token in followers if token and token.names and token.names[0] != "_"), None)

    def _letters(self) -> list[str]:
        """Names for the ellipsis dims, left to right; sets their extents."""
        depth = max((place.ellipsis + 1 for places in self.places for place in places), default=0)
        used = self.pattern.names
        return [letter for letter in string.ascii_letters if letter not in used][:depth]

    def rule(self, operator: str, family: str) -> ShardingRule:
        shapes = [shape for _, shape in self._terms()]
        self._ellipsis_extents(shapes)
        self._solve(shapes)
        dims = [self._dims(places, shape) for places, shape in zip(self.places, shapes, strict=True)]
        count = len(self.inputs)
        order = list(dict.fromkeys(name for term in dims for names in term for name in names if name != "_"))
        whole = self._many(self.pattern.whole)
        extents = tuple((name, self.extents[name]) for name in order)
        splittable = [name for name in order if name not in whole]
        from_inputs = {name for term in dims[:count] for names in term for name in names}
        return ShardingRule(
            operator,
            family,
            tuple(dims[:count]),
            tuple(dims[count:]),
            self.shapes,
            extents,
            frozenset(name for name in order if name in whole),
            tuple(self._input_partial(term, splittable) for term in self.inputs),
            tuple(self._output_partial(*item, splittable, from_inputs) for item in zip(self.outputs, dims[count:], strict=True)),
            self._flows(),
            tuple(self._inner(splittable)),
            frozenset(name for name in splittable if name in self.pattern.triangles),
            self._mirror(splittable),
            self._ring(splittable, order),
            Exchange(*self.pattern.exchange) if self.pattern.exchange and self.pattern.exchange[0] in splittable else None,
            loose=frozenset(name for name in order if name in self.loose),
        )

    def _ellipsis_extents(self, shapes: Sequence[Shape]) -> None:
        depth = len(self.letters)
        for places, shape in zip(self.places, shapes, strict=True):
            for place, extent in zip(places, shape, strict=True):
                if place.token is None:
                    name = self.letters[depth - 1 - place.ellipsis]
                    known = self.extents.get(name, 1)
                    if known != 1 and extent not in (1, known):
                        raise Mismatch(f"sizes {known} and {extent} do not broadcast")
                    self.extents[name] = max(known, extent) if extent else extent

    def _solve(self, shapes: Sequence[Shape]) -> None:
        """Finds every factor's extent: a dim with one unknown factor gives it by division, loose ones what divides all of them."""
        pending = [
            (token, extent)
            for places, shape in zip(self.places, shapes, strict=True)
            for place, extent in zip(places, shape, strict=True)
            if (token := place.token) is not None and (token.names or token.size is not None)
        ]
        for name in self.loose:
            self.extents[name] = math.gcd(*(extent for token, extent in pending if name in token.names))
        pending = [(token, extent) for token, extent in pending if not token.loose]
        for optional in (False, True):
            progress = True
            while progress:
                progress = False
                for token, extent in pending:
                    unknown = [name for name in token.names if name != "_" and name not in self.extents]
                    if (token.optional and not optional) or len(unknown) != 1 or "_" in token.names:
                        continue
                    known = math.prod(self.extents[name] for name in token.names if name in self.extents)
                    if known == 0 or extent % known:
                        raise Mismatch(f"a dim of size {extent} is not a multiple of {known} in '{' '.join(token.names)}'")
                    self.extents[unknown[0]] = extent // known
                    progress = True
        for token, extent in pending:
            self._check(token, extent)

    def _check(self, token: Token, extent: int) -> None:
        unknown = [name for name in token.names if name != "_" and name not in self.extents]
        if unknown:
            raise Mismatch(f"the extent of {unknown[0]!r} is not determined")
        product = math.prod(self.extents[name] for name in token.names if name != "_")
        if token.size is not None:
            if extent != token.size:
                raise Mismatch(f"a dim of size {extent} where the rule has {token.size}")
        elif "_" in token.names:
            if product and extent % product:
                raise Mismatch(f"a dim of size {extent} is not a multiple of {product}")
        elif extent != product and not (token.optional and extent == 1):
            raise Mismatch(f"a dim of size {extent} where {' '.join(token.names)!r} is {product}")

    def _dims(self, places: Sequence[Place], shape: Shape) -> Dims:
        found: list[tuple[str, ...]] = []
        for place, extent in zip(places, shape, strict=True):
            if place.token is None:
                name = self.letters[len(self.letters) - 1 - place.ellipsis]
                found.append((name,) if extent == self.extents[name] and extent > 1 else ())
                continue
            names = [name for name in place.token.names if name == "_" or self.extents[name] > 1]
            if (place.token.optional and extent == 1) or not [name for name in names if name != "_"]:
                names = []
            found.append(tuple(names))
        return tuple(found)

    def _many(self, names: frozenset[str] | set[str]) -> set[str]:
        """Names with the ellipsis and the factor of several given dims written out."""
        found: set[str] = set()
        for name in names:
            found.update(self._written_out(name))
        return found

    def _written_out(self, name: str) -> list[str]:
        if name == "...":
            return list(self.letters)
        if name == self.along and self.dims is not None and len(self.dims) != 1:
            return [f"{name}{index}" for index in range(len(self.dims))]
        return [name]

    def _input_partial(self, term: Term, splittable: Sequence[str]) -> tuple[tuple[str, str], ...]:
        marks = {name: mark for written, mark in term.suffixes for name in self._written_out(written)}
        return tuple((name, marks[name]) for name in splittable if name in marks)

    def _output_partial(self, term: Term, dims: Dims, splittable: Sequence[str], from_inputs: set[str]) -> tuple[tuple[str, str], ...]:
        marks = {name: mark for written, mark in term.suffixes for name in self._written_out(written)}
        there = {name for names in dims for name in names}
        found = []
        for name in splittable:
            mark = marks.get(name, "sum")
            if name not in there and mark != SAME and (name in from_inputs or name in marks):
                found.append((name, mark))
        return tuple(found)

    def _flows(self) -> tuple[tuple[int, ...], ...]:
        """The groups of inputs; absent inputs leave their group, a scalar in the place of a listed one breaks it."""
        found = []
        for group in self.pattern.flows:
            if group is None:
                found.append(tuple(range(len(self.inputs))))
            elif len(self.pattern.inputs) == 1 and self.pattern.inputs[0].many:
                found += [group] if all(index < len(self.inputs) for index in group) else []
            else:
                inputs = tuple(sorted(index for slot in group for index in self.slots[slot]))
                found += [inputs] if inputs or not group else []
        return tuple(found)

    def _mirror(self, splittable: Sequence[str]) -> Mirror | None:
        if self.pattern.mirror is None or self.pattern.mirror[0] not in splittable:
            return None
        return Mirror(*self.pattern.mirror)

    def _ring(self, splittable: Sequence[str], present: Sequence[str]) -> Ring | None:
        if self.pattern.ring is None or self.pattern.ring[0] not in splittable or self.pattern.ring[1] not in present:
            return None
        return Ring(*self.pattern.ring)

    def _inner(self, splittable: Sequence[str]) -> Iterator[Statistic]:
        for factor, reduction, tokens in self.pattern.inner:
            names: list[str] = []
            for token in tokens:
                names += self.letters if token.kind == "ellipsis" else list(token.names)
            present = tuple(name for name in names if self.extents[name] > 1)
            elements = math.prod(token.size for token in tokens if token.size is not None)
            over = tuple(name for name in self._written_out(factor) if name in splittable)
            if over:
                yield Statistic(over, reduction, present, elements)


def _repeated(terms: tuple[Term, ...], count: int, what: str) -> list[Term]:
    """The terms with the one marked ``*`` written out so that there are ``count``."""
    many = [index for index, term in enumerate(terms) if term.many]
    if not many:
        if len(terms) != count:
            raise Mismatch(f"it has {len(terms)} {what}s, the operator {count}")
        return list(terms)
    times = count - len(terms) + 1
    return [*terms[: many[0]], *([terms[many[0]]] * times), *terms[many[0] + 1 :]]


def _keeping(term: Term) -> Term:
    """A reduced output with the reduced dims kept as dims of size 1."""
    bare = [token.kind for token in term.dims] == ["ellipsis"]
    return replace(term, dims=(*term.dims, Token(size=1))) if bare else term


def _follower(term: Term) -> Token | None:
    """The token right after ``...``: in a rule about given dims it stands for them."""
    kinds = [token.kind for token in term.dims]
    index = kinds.index("ellipsis") + 1 if "ellipsis" in kinds else len(kinds)
    return term.dims[index] if index < len(kinds) else None


def _lay_out(term: Term, rank: int, dims: tuple[int, ...] | None, along: str | None) -> list[Place]:
    """Which token stands at each dim of a tensor of ``rank`` dims."""
    tokens: list[Token] = []
    follower = _follower(term) if dims is not None else None
    for token in term.dims:
        if dims is not None and len(dims) != 1 and (token is follower or (along is not None and token.names == (along,))):
            named = token.names and token.names[0] != "_"
            tokens += [replace(token, names=(f"{token.names[0]}{index}",)) if named else token for index in range(len(dims))]
        else:
            tokens.append(token)
    open_ended = next((index for index, token in enumerate(tokens) if token.kind != "dim"), None)
    if open_ended is None:
        if len(tokens) != rank:
            raise Mismatch(f"a tensor of {rank} dims where the rule has {len(tokens)}")
        return [Place(token) for token in tokens]
    count = rank - len(tokens) + 1
    if count < 0:
        raise Mismatch(f"a tensor of {rank} dims where the rule has at least {len(tokens) - 1}")
    if tokens[open_ended].kind == "rest":
        middle = [Place(Token(("_",)))] * count
    else:
        middle = [Place(None, count - 1 - index) for index in range(count)]
    before, after = [Place(token) for token in tokens[:open_ended]], [Place(token) for token in tokens[open_ended + 1 :]]
    if follower is None or dims is None:
        return before + middle + after
    if before or len(after) != len(dims):
        raise Mismatch("in a rule about given dims, one token follows '...' and none comes before it")
    at = dict(zip(dims, after, strict=True))
    rest = iter(middle)
    return [at[dim] if dim in at else next(rest) for dim in range(rank)]
