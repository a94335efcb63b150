"""Rows of the table and operators' calls: arguments by name."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from autopar.errors import RuleError
from autopar.graph import Argument, Op, Ref, Tensor

REQUIRED = object()


@dataclass(frozen=True)
class OperatorCall:
    """An operator with its arguments by name, shapes and dtypes.

    Args:
        target: the operator.
        arguments: by the names of the row's signature, defaults filled in; tensors are ``Ref``.
        inputs, outputs: the tensors, in the operator's order.
        slots: for each tensor argument of the signature the inputs it holds: none, one, or several for a list.
    """

    target: str
    arguments: Mapping[str, Argument]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    slots: tuple[tuple[int, ...], ...]

    def shape(self, index: int) -> tuple[int, ...]:
        """Global shape of an input."""
        return self.inputs[index].shape

    def result(self, index: int = 0) -> tuple[int, ...]:
        """Global shape of an output."""
        return self.outputs[index].shape


@dataclass(frozen=True)
class WritesOver:
    """A pointwise operator's result may take the memory of one of its arguments, entry by entry.

    Args:
        overload: of the operator, the one that this is true of.
        places: the arguments whose memory it may be.
        out: the overload that writes its result where it is told, which is what it calls the argument that says where.
    """

    overload: str
    places: tuple[int, ...]
    out: str


@dataclass(frozen=True)
class LooksUp:
    """An input holds numbers of entries of a table.

    Args:
        numbers: the input that holds them.
        dim: of input 0, the one that has the entries, or the argument that says which: a number, or a list with the numbers in its place.
        size: the argument that says how many entries there are, where input 0 is not the table.
        entries: what messages call them; where given, numbers out of range are refused when the operator runs.
        ignored: the argument that is a number which stands for none of them.
    """

    numbers: int = 1
    dim: int | str = 0
    size: str = ""
    entries: str = ""
    ignored: str = ""


@dataclass(frozen=True)
class Row:
    """All facts of an operator: one row of the table.

    Args:
        family: the kind of operator.
        operator: ``aten.mm``, ``aten.slice(x, dim=0, start=None)``: without a signature every tensor argument is an input of
            the rule. In a signature a bare name is a tensor, ``name?`` an optional one, ``name*`` a list, ``name=`` a plain
            argument, with its default. A computed rule has a term for each tensor that is there, in this order.
        rule: the rule; several when they differ by the number of dims; or a function of the call that writes it.
        at: the argument that names the dims the rule is about; ``last:NAME`` means as many last dims as that argument has items.
        keep: the argument that keeps reduced dims as size 1.
        mask: the argument that says which outputs exist.
        local: what is written into arguments on a rank: (argument, formula), see ``autopar.rules.local``.
        alias: output 0 shares the storage of input 0.
        work: how many floating point operations: a name of ``autopar.rules.work``.
        once: why it may not run a second time to make its results again; empty when it may.
        equal: which factors are split in equal parts alone: ``all``, or ``inner``, those that the statistics inside count over.
        stores: it writes into input 0, some entries of it, and gives that as output 0.
        over: whose memory the result may take.
        reads: ``all``; ``results``, only as many bytes as it writes; ``terms``, rows of input 0 that it widens and adds up; or ``shape``,
            nothing but the shape of its inputs.
        kernels: of an operator that runs step by step along its argument ``gates``, the kernels of a step by its argument ``cell``.
        issues: kernels that the host issues for it, or a name of ``autopar.rules.launches``; views have none.
        number: what a plain number among its arguments does to the tensor: ``multiplies``, ``divides`` or ``adds``.
        looks_up: that an input holds numbers of entries.
        layout: the argument that says how input 0 lies over some axes of the mesh (``AxisLayout``).
        lies: how results lie in memory, where their family does not say: dims from the slowest to the fastest, or a word of
            ``autopar.rules.memory_order``.
    """

    family: str
    operator: str
    rule: str | tuple[str, ...] | Callable[[OperatorCall], str]
    at: str = ""
    keep: str = ""
    mask: str = ""
    local: tuple[tuple[str, str], ...] = ()
    alias: bool = False
    work: str = "elements"
    once: str = ""
    equal: str = ""
    stores: bool = False
    over: WritesOver | None = None
    reads: str = "all"
    kernels: tuple[tuple[str, int], ...] = ()
    issues: int | str = 1
    number: str = ""
    looks_up: LooksUp | None = None
    layout: str = ""
    lies: str = ""

    @property
    def seed(self) -> int | None:
        """The place of the argument that is the seed of what it draws; None for an operator that draws nothing."""
        name = next((argument for argument, formula in self.local if formula.startswith("seed ")), None)
        return None if name is None else [parameter.name for parameter in signature(self.operator)].index(name)

    @property
    def one_dtype(self) -> bool:
        """Whether torch runs it on operands of one dtype alone; without values (meta, fake) it lets others pass."""
        return self.work in ("contraction", "convolution")

    @property
    def name(self) -> str:
        """The operator without its signature."""
        return self.operator.partition("(")[0]

    @property
    def text(self) -> str:
        """The rule as it is printed in the table; a computed one is described by its function's first line."""
        if isinstance(self.rule, str):
            return self.rule
        if isinstance(self.rule, tuple):
            return "  or  ".join(self.rule)
        return f"computed: {(self.rule.__doc__ or '').strip().splitlines()[0].rstrip('.')}"


@dataclass(frozen=True)
class Parameter:
    """One name of a signature: ``kind`` is tensor, list or plain."""

    name: str
    kind: str
    default: Any = REQUIRED


@cache
def signature(operator: str) -> tuple[Parameter, ...]:
    """The parameters written in a row's operator."""
    inside = operator.partition("(")[2].removesuffix(")")
    found = []
    for item in re.split(r",\s*(?![^\[(]*[\])])", inside) if inside else []:
        name, equals, default = item.strip().partition("=")
        if equals:
            found.append(Parameter(name, "plain", ast.literal_eval(default) if default else REQUIRED))
        else:
            found.append(Parameter(name.rstrip("?*"), "list" if name.endswith("*") else "tensor"))
    return tuple(found)


def call_of(op: Op, row: Row, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> OperatorCall:
    """The operator's arguments by the row's names.

    Raises:
        RuleError: when an argument the row needs is missing.
    """
    parameters = signature(row.operator)
    given = dict(op.kwargs)
    arguments: dict[str, Argument] = {}
    for index, parameter in enumerate(parameters):
        if index < len(op.args):
            arguments[parameter.name] = op.args[index]
        elif parameter.name in given:
            arguments[parameter.name] = given[parameter.name]
        elif parameter.kind != "plain":
            arguments[parameter.name] = None
        elif parameter.default is REQUIRED:
            raise RuleError(f"{op.target} has no argument {parameter.name!r}, which its rule needs", f"the row reads {row.operator!r}")
        else:
            arguments[parameter.name] = parameter.default
    for name, value in given.items():
        arguments.setdefault(name, value)
    slots = tuple(refs(arguments[parameter.name]) for parameter in parameters if parameter.kind != "plain")
    return OperatorCall(op.target, arguments, inputs, outputs, slots)


def refs(argument: Argument) -> tuple[int, ...]:
    """The inputs an argument refers to, in order."""
    if isinstance(argument, Ref):
        return (argument.index,)
    if isinstance(argument, tuple):
        return tuple(index for item in argument for index in refs(item))
    return ()


def dims_of(call: OperatorCall, row: Row) -> tuple[int, ...] | None:
    """The dims the rule is about, as the call's argument gives them; None when the row is not about given dims."""
    if not row.at:
        return None
    where, _, name = row.at.rpartition(":")
    value = call.arguments[name]
    if where == "last":
        return tuple(range(-len(value), 0))
    if value is None or value == ():
        return tuple(range(len(call.shape(0))))
    return (value,) if isinstance(value, int) else tuple(value)
