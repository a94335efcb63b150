"""From an operator to its rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from autopar.errors import RuleError
from autopar.graph import Op, Tensor
from autopar.rules.binding import bind
from autopar.rules.computed import FLOATS, is_exact
from autopar.rules.notation import parse
from autopar.rules.rule import ShardingRule
from autopar.rules.signature import OperatorCall, Row, call_of, dims_of
from autopar.rules.table import ROWS

BY_NAME: Mapping[str, Row] = {row.name: row for row in ROWS}
OWN: dict[str, Row] = {}
"""Rows that users gave (``autopar.rules.own``)."""

MAY_BE_EMPTY = frozenset({"pointwise", "random", "contraction", "reduction", "view", "softmax", "gather", "cross-entropy", "factory"})
"""Families whose operators take tensors without elements."""
IN_EQUAL_PARTS = frozenset({"linear algebra", "own"})
"""Families whose operators are not tested on parts of unequal sizes."""


EQUAL_WORDS: Mapping[str, str] = {"": "", "all": "  (in equal parts)", "inner": "  (in equal parts where counted over)"}
"""What the printed table says of ``Row.equal``."""


def _equal(row: Row) -> str:
    """Which of an operator's factors are split in equal parts alone: see ``Row.equal``."""
    return "all" if row.family in IN_EQUAL_PARTS else row.equal


def find_row(target: str) -> Row | None:
    """The row of an operator: by its full name (``aten.view.dtype``), else without the overload (``aten.view``)."""
    return _listed(target) or OWN.get(target) or OWN.get(target.rpartition(".")[0])


@lru_cache(maxsize=4096)
def _listed(target: str) -> Row | None:
    """The same of the table alone; looked up once a name, since every fact of an operator is asked for by its target."""
    return BY_NAME.get(target) or BY_NAME.get(target.rpartition(".")[0])


def find_rule(op: Op, tensors: Mapping[str, Tensor]) -> ShardingRule:
    """The sharding rule of an operator of a graph.

    Args:
        op: the operator.
        tensors: the graph's tensors by name.

    Returns:
        its rule with shapes put in; ``known`` is False, and everything whole, for an operator without a row and for a call that its
        row does not fit; ``reason`` says which.
    """
    inputs = tuple(tensors[name] for name in op.inputs)
    outputs = tuple(tensors[name] for name in op.outputs)
    shapes = tuple(map(_shape_dtype, inputs)), tuple(map(_shape_dtype, outputs))
    return find_rule_of_shapes(op.target, op.args, op.kwargs, *shapes)


ShapeDtype = tuple[tuple[int, ...], str]


def _shape_dtype(tensor: Tensor) -> ShapeDtype:
    return tensor.shape, tensor.dtype


@lru_cache(maxsize=65536)
def find_rule_of_shapes(
    target: str,
    args: tuple[object, ...],
    kwargs: tuple[tuple[str, object], ...],
    inputs: tuple[ShapeDtype, ...],
    outputs: tuple[ShapeDtype, ...],
) -> ShardingRule:
    """``find_rule`` of an operator by what its rule depends on: arguments, and shapes and dtypes of its tensors."""
    row = find_row(target)
    if row is None:
        return unknown(target, [shape for shape, _ in inputs], [shape for shape, _ in outputs], "it has no row in the table")
    op = Op(target, target, ("",) * len(inputs), ("",) * len(outputs), args, kwargs)
    try:
        return bound(row, call_of(op, row, tuple(Tensor("", *item) for item in inputs), tuple(Tensor("", *item) for item in outputs)))
    except RuleError as problem:
        return unknown(target, [shape for shape, _ in inputs], [shape for shape, _ in outputs], problem.message)


def bound(row: Row, call: OperatorCall) -> ShardingRule:
    """The row's rule with the call's shapes put in."""
    texts = row.rule(call) if callable(row.rule) else row.rule
    slots = list(call.slots) if "(" in row.operator and not callable(row.rule) else None
    dims = dims_of(call, row)
    keep = bool(row.keep and call.arguments[row.keep])
    inputs, outputs = [t.shape for t in call.inputs], [t.shape for t in call.outputs]
    problem: RuleError | None = None
    for written in (texts,) if isinstance(texts, str) else texts:
        for text in _present(written, call, row):
            try:
                rule = bind(text, inputs, outputs, operator=call.target, family=row.family, slots=slots, dims=dims, keep=keep)
                return _of_parts(_of_dtypes(rule, call), row)
            except RuleError as error:
                problem = problem or error
    assert problem is not None
    raise problem


def _of_parts(rule: ShardingRule, row: Row) -> ShardingRule:
    """Which factors may be split in unequal parts, and which of them must have something on every rank.

    Equal must be the parts of a factor that shares a dim with others (they would not be the dim's own parts), of one along which work
    grows, and of what the row says. Nothing is the largest or smallest of no elements, none of them can be read by index, and many kernels
    are not made for them.
    """
    shared = {name for term in rule.inputs + rule.outputs for names in term for name in names if len(names) > 1}
    counted = {name for item in rule.inner for name in item.over}
    equal = shared | rule.triangles | {"all": set(rule.free), "inner": counted}.get(_equal(row), set())
    full = counted | _reduced(rule)
    full |= {formula.removeprefix("start ") for _, formula in row.local if formula.startswith("start ")}
    full |= set(rule.free) if row.equal or row.family not in MAY_BE_EMPTY else set()
    return replace(rule, equal=frozenset(equal - {"_"}), full=frozenset(full))


def _reduced(rule: ShardingRule) -> set[str]:
    """The factors over which some output is reduced otherwise than by a sum."""
    return {name for partial in rule.output_partial for name, reduction in partial if reduction != "sum"}


def _of_dtypes(rule: ShardingRule, call: OperatorCall) -> ShardingRule:
    """A boolean tensor is no sum, nor are rounded parts one, and of complex numbers nothing but sums is made of parts: no collective
    multiplies them."""
    reduced = _reduced(rule) | {name for item in rule.inner for name in item.over}
    if reduced and call.inputs[0].dtype.startswith("complex"):
        kept = tuple(tuple(item for item in partial if item[0] not in reduced) for partial in rule.output_partial)
        rule = replace(rule, whole=rule.whole | reduced, inner=(), output_partial=kept)
    flows = tuple(group for group in rule.flows if _stay_sums(group, call))
    return rule if flows == rule.flows else replace(rule, flows=flows)


def _stay_sums(group: Iterable[int], call: OperatorCall) -> bool:
    """Whether partial sums of some inputs are partial sums in every result's dtype: floats are not rounded before they are added up."""
    results = {tensor.dtype for tensor in call.outputs}
    given = {call.inputs[index].dtype for index in group}
    floats = [(source, result) for source in given for result in results if source in FLOATS and not result.startswith("complex")]
    return "bool" not in given | results and all(is_exact(source, result) for source, result in floats)


def _present(text: str, call: OperatorCall, row: Row) -> tuple[str, ...]:
    """The rule for the outputs that the call's mask asks for. An output that is not asked for may still be there, of its own
    shape or of none in particular."""
    if not row.mask:
        return (text,)
    wanted = call.arguments[row.mask]
    body, bar, clauses = text.partition(" | ")
    left, _, right = body.partition("->")
    terms = right.split(",")
    if len(call.outputs) == len(terms):
        anything = [term if keep else "_..." for term, keep in zip(terms, wanted, strict=True)]
        return text, f"{left}->{','.join(anything)}{bar}{clauses}"
    return (f"{left}->{','.join(term for term, keep in zip(terms, wanted, strict=True) if keep)}{bar}{clauses}",)


def unknown(target: str, inputs: Sequence[tuple[int, ...]], outputs: Sequence[tuple[int, ...]], reason: str) -> ShardingRule:
    """Everything whole on every rank, for the reason given."""
    return ShardingRule(
        target,
        "unknown",
        tuple(((),) * len(shape) for shape in inputs),
        tuple(((),) * len(shape) for shape in outputs),
        (tuple(inputs), tuple(outputs)),
        input_partial=((),) * len(inputs),
        output_partial=((),) * len(outputs),
        known=False,
        reason=reason,
    )


def table() -> tuple[tuple[str, str, str], ...]:
    """THE table as text: (family, operator, rule), one row an operator."""
    return tuple((row.family, row.name, row.text + EQUAL_WORDS[_equal(row)]) for row in ROWS)


def check_table() -> None:
    """Reads every rule that is written as text.

    Raises:
        RuleError: for the first that cannot be read.
    """
    for row in ROWS:
        for text in (row.rule,) if isinstance(row.rule, str) else row.rule if isinstance(row.rule, tuple) else ():
            parse(text)
