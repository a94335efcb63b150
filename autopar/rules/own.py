"""Rules that users give, in a line each, for operators of their own: read wherever a row of the table is."""

from __future__ import annotations

import re

from autopar.errors import UsageError
from autopar.rules.lookup import BY_NAME, OWN, find_rule_of_shapes
from autopar.rules.notation import parse
from autopar.rules.signature import Row

_OPERATOR = re.compile(r"^(\w+)::(\w+)(?:\.(\w+))?$")


def rule(operator: str, text: str, *, once: bool = False) -> None:
    """Says how an operator of one's own can be cut.

    Args:
        operator: ``mylib::op``, as it is registered with ``torch.library``; with ``.overload`` for that overload alone.
        text: a term of dims for each tensor argument, in order, and one for each result: ``"b s d, d -> b s d"``. A factor that is not in
            a result is summed there, ``d!`` is whole on every rank, ``_`` is a dim that is never split, ``...`` any dims; partial sums
            pass where ``| linear {0}`` says from which input (``autopar.rules.notation`` has the rest). A gradient that is an operator
            of its own has a rule of its own. Arguments that hold sizes are passed as they are: leave those dims whole.
        once: the operator must not run a second time to save memory, since it would not make the same again.

    The rule holds in this process, from now on: give it beside the operator, so that ranks that import one have the other. What is given
    last holds.

    Raises:
        UsageError: a name that is not ``namespace::operator``, or an operator of torch's or of this package.
        RuleError: a text that cannot be read.
    """
    match = _OPERATOR.match(operator)
    if match is None:
        raise UsageError(f"{operator!r} is not the name of an operator", "write it as it is registered, 'mylib::op'")
    name = ".".join(part for part in match.groups() if part)
    if match[1] in ("aten", "autopar", "prim", "prims") or name in BY_NAME:
        raise UsageError(f"{operator} is not an operator of your own", "autopar rules lists the rules that are there")
    parse(text)
    OWN[name] = Row("own", name, text, once="its rule says that it runs once" if once else "")
    find_rule_of_shapes.cache_clear()
