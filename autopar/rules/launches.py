"""Kernels that the host issues for an operator, as the runtime runs its body on a GPU.

A kernel is a call of torch that is no view and does more than make memory: the host pays for the call, whatever the device makes of it.
``kernel_launches`` is another fact: into how many equal parts an operator's work falls, each at least a launch long.

Copies that depend on how operands lie in memory are not counted, since a graph does not say how they lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.cost_models.collectives import KINDS
from autopar.graph import Argument, Op, Ref, Tensor
from autopar.rules.dispatch import splits_experts
from autopar.rules.expansion import plain_factors, way_of
from autopar.rules.facts import kernel_launches
from autopar.rules.lookup import find_row
from autopar.rules.signature import Row, call_of
from autopar.sharding import InnerCollective, Strategy

NARROW = frozenset({"bfloat16", "float16"})
"""Dtypes whose statistics are float32: bodies convert operands and results."""
GROUPED_DTYPES = frozenset({"bfloat16", "float16", "float32"})
"""Dtypes of torch's grouped product."""
GROUPED_BYTES = 16
"""Bytes that divide each row of a grouped product's operands."""
INDEX_CHECK = 6
"""Kernels that look whether every index is one of the whole table, on a rank with a part of it."""
IGNORED_CHECK = 2
"""More of them where one index stands for no entry."""
WINDOW = 7
"""Kernels that find the choices of the experts at hand, but for their sort. Their number is read back. Only the first operator of a phase
that reads these choices issues them (``find_askers``)."""
DISPATCH_WINDOW = WINDOW + 2
"""With those that fill rows up."""
EXPERT_WAY = 22
"""Kernels that find which rows go to which rank, before and after their numbers are told. Only the first operator of a phase that reads
these choices issues them."""
EXPERT_EXCHANGE = EXPERT_WAY + 5
"""With those that put rows in order, and fill them up."""
CALLS_INSIDE = 2
"""Calls of a collective inside an operator: its start and its wait."""


@dataclass(frozen=True)
class Issue:
    """An operator that the host issues.

    Args:
        strategy: how it is split; None asks for the fewest kernels under any strategy.
        sizes: of the mesh's axes.
    """

    op: Op
    row: Row
    tensors: Mapping[str, Tensor]
    strategy: Strategy | None = None
    sizes: Sequence[int] = ()

    @cached_property
    def arguments(self) -> Mapping[str, Argument]:
        """By name."""
        return call_of(self.op, self.row, (), ()).arguments

    def given(self, name: str) -> bool:
        """Whether an optional tensor is there."""
        return isinstance(self.arguments[name], Ref)

    def dtype(self, name: str) -> str:
        """An operand's dtype; empty where it is not there."""
        argument = self.arguments[name]
        return self.tensors[self.op.inputs[argument.index]].dtype if isinstance(argument, Ref) else ""

    def shape(self, name: str) -> tuple[int, ...]:
        """An operand's shape on a rank, the largest."""
        argument = self.arguments[name]
        assert isinstance(argument, Ref), name
        shape = self.tensors[self.op.inputs[argument.index]].shape
        return shape if self.strategy is None else self.strategy.inputs[argument.index].local_shape(shape, self.sizes)

    def parts(self, factor: str) -> int:
        """Into how many parts a factor is split."""
        axes = () if self.strategy is None else plain_factors(self.strategy).get(factor, ())
        return math.prod(self.sizes[axis] for axis in axes)

    def splits(self, factor: str) -> bool:
        """Whether a factor is split."""
        return self.parts(factor) > 1

    def part(self, factor: str, extent: int) -> int:
        """A rank's extent of a factor, the largest; one without a strategy."""
        return 1 if self.strategy is None else -(-extent // self.parts(factor))

    @property
    def narrow(self) -> int:
        """Operands and results in a narrow dtype."""
        return sum(self.tensors[name].dtype in NARROW for name in (*self.op.inputs, *self.op.outputs))

    def unlike(self, dtype: str, *names: str) -> int:
        """Operands of another dtype than this one."""
        return sum(self.given(name) and self.dtype(name) != dtype for name in names)


def issued_kernels(
    op: Op, tensors: Mapping[str, Tensor], strategy: Strategy | None = None, sizes: Sequence[int] = (), *, asks: bool = True
) -> int:  # fmt: skip
    """Kernels that the host issues for an operator, with the collectives inside it.

    Args:
        strategy: how it is split; None gives the fewest kernels under any strategy.
        sizes: of the mesh's axes.
        asks: of a dispatch or a combine, whether it is one of ``find_askers``.
    """
    row = find_row(op.target)
    if row is None or row.alias:
        return int(row is None)
    issue = Issue(op, row, tensors, strategy, sizes)
    if not asks and strategy is not None and splits_experts(op, strategy):
        known = EXPERT_WAY + CALLS_INSIDE if strategy.inner else WINDOW
        return issued_kernels(op, tensors, strategy, sizes) - known
    if strategy is not None and strategy.inner:
        inside = sum(CALLS_INSIDE + sends_copy(item) for item in strategy.inner)
        return inside + INSIDE[f"{row.name} {way_of(strategy)}".rstrip()](issue)
    return row.issues if isinstance(row.issues, int) else FORMULAS[row.issues](issue)


def reads_back(op: Op, tensors: Mapping[str, Tensor], strategy: Strategy | None = None, *, asks: bool = True) -> bool:
    """Whether the host reads values of the operator, and so waits for the device: of experts split among ranks, numbers of rows.

    Args:
        strategy: how it is split; None leaves experts whole.
        asks: as of ``issued_kernels``.
    """
    if strategy is not None and splits_experts(op, strategy):
        return asks
    row = find_row(op.target)
    return row is not None and row.name in READING and READING[row.name](Issue(op, row, tensors))


# --- operators without collectives inside ------------------------------------------------------------------------------


def _recurrence(issue: Issue) -> int:
    return kernel_launches(issue.op, issue.tensors)


def _recurrence_backward(issue: Issue) -> int:
    """Beside each step's: the gates of all steps again, and the gradients of weight and bias."""
    return _recurrence(issue) + {"lstm": 10, "gru": 12, "tanh": 7, "relu": 7}[str(issue.arguments["cell"])]


def _rms_norm(issue: Issue) -> int:
    return 5 + issue.given("weight") + issue.narrow - (issue.dtype("weight") in NARROW)


def _rms_norm_backward(issue: Issue) -> int:
    return 8 + issue.given("weight") + issue.narrow - (issue.dtype("weight") in NARROW)


def _wide(issue: Issue) -> str:
    """The dtype of statistics."""
    return "float32" if issue.dtype("x") in NARROW else issue.dtype("x")


def _batch_norm(issue: Issue) -> int:
    """torch's own kernel, and running statistics one after the other where these have another dtype."""
    wide = _wide(issue)
    affine = 2 - sum(issue.dtype(name) == wide for name in ("weight", "bias")) if wide != issue.dtype("x") else 0
    running = [issue.dtype(name) for name in ("running_mean", "running_var")]
    if running == [wide, wide]:
        return 1 + affine
    return 6 + affine + _running(issue, wide)


def _running(issue: Issue, wide: str) -> int:
    """Two products, a sum and a conversion each; a copy where there is no old value."""
    running = [issue.dtype(name) for name in ("running_mean", "running_var")]
    return sum(3 + (dtype != wide) if dtype else 1 for dtype in running)


def _batch_norm_backward(issue: Issue) -> int:
    return 1 + 3 * issue.unlike(issue.dtype("mean"), "weight")


def _attention(issue: Issue) -> int:
    """By a fused kernel. Queries with keys before them take two calls, which are merged."""
    shared = _repeats_heads(issue)
    if not _sees_earlier(issue):
        return 1 + 2 * shared + _mask(issue)
    if issue.given("mask"):
        return 1 + 2 * shared + _mask(issue) + 3
    return 2 * (1 + 2 * shared) + 9 + 3 * (issue.dtype("q") in NARROW)


def _attention_backward(issue: Issue) -> int:
    """Gradients of repeated heads are summed and laid out; those of stretches of keys are put together."""
    shared = _repeats_heads(issue)
    state = 1 if _takes_groups(issue) else 2
    summed = 4 * shared + 2 * (shared and issue.shape("k")[1] > 1)
    if not _sees_earlier(issue):
        return 1 + state + summed + _mask(issue)
    if issue.given("mask"):
        return 1 + state + summed + _mask(issue) + 6
    return 2 * (1 + state + 4 * shared) + 9


def _takes_groups(issue: Issue) -> bool:
    """Whether flash or cuDNN's kernels run: the others need a key head for each query head."""
    return issue.dtype("q") in NARROW and not issue.given("mask")


def _mask(issue: Issue) -> int:
    """Kernels that make a boolean mask one that is added."""
    return 3 if issue.dtype("mask") == "bool" else 0


def _sees_earlier(issue: Issue) -> bool:
    """Whether some rank's queries begin behind the first key of a causal mask."""
    return bool(issue.arguments["causal"]) and (issue.arguments["offset"] != 0 or issue.splits("s"))


def _repeats_heads(issue: Issue) -> bool:
    """Whether several query heads of a rank share a key head, and the kernel needs one for each."""
    return issue.strategy is not None and issue.shape("q")[1] != issue.shape("k")[1] and not _takes_groups(issue)


def _expert_contract(issue: Issue) -> int:
    """Where each expert's rows end, and one grouped product; else a product for each expert."""
    rows, result = _terms(issue)[2:]
    outer = not set(rows) <= set(result)
    if _is_grouped(issue):
        return 8 if outer else 3
    return 4 + 2 * issue.part("e", _number(issue, "experts"))


def _dispatch(issue: Issue) -> int:
    """Choices sorted by expert, and their rows taken; of some experts, those at hand are found, waited for and filled up."""
    return 2 + _several_choices(issue) + DISPATCH_WINDOW * issue.splits("y")


def _dispatch_ids(issue: Issue) -> int:
    return 2 + DISPATCH_WINDOW * issue.splits("y")


def _combine(issue: Issue) -> int:
    """Choices sorted by expert, and rows put back or added up where they belong."""
    if not issue.splits("y"):
        return _combine_all(issue)
    more = issue.given("weights") + (_number(issue, "choices") > 1 and not _weighs_wide(issue))
    return _combine_all(issue) + DISPATCH_WINDOW - 1 + more


def _combine_all(issue: Issue) -> int:
    """With a row for each choice."""
    weighed, narrows = issue.given("weights"), issue.tensors[issue.op.outputs[0]].dtype in NARROW
    if _number(issue, "choices") == 1:
        return 2 + weighed + (narrows and weighed and _weighs_wide(issue))
    return 3 + weighed + narrows


def _weighs_wide(issue: Issue) -> bool:
    """Whether weighted rows have a wide dtype."""
    return issue.dtype("rows") not in NARROW or issue.dtype("weights") not in ("", *NARROW)


def _several_choices(issue: Issue) -> bool:
    tokens, ids = (issue.tensors[name].shape[0] for name in issue.op.inputs[:2])
    return tokens < ids


def _terms(issue: Issue) -> list[list[str]]:
    """Factors of both operands, of the experts' numbers and of the result."""
    return [term.split() for term in str(issue.arguments["equation"]).replace("->", ",").split(",")]


def _number(issue: Issue, name: str) -> int:
    value = issue.arguments[name]
    assert isinstance(value, int), name
    return value


def _is_grouped(issue: Issue) -> bool:
    """Whether torch's grouped product takes an ``expert_contract``."""
    first, second, ids, _ = _terms(issue)
    sizes = dict(zip((*first, *second), (*issue.shape("a"), *issue.shape("b")), strict=True))
    inner = [sizes[name] for name in first if name not in ids]
    columns = [sizes[name] for name in second if name not in ids and name not in first and name != "e"]
    itemsize = 2 if issue.dtype("a") in NARROW else 4
    return issue.dtype("a") in GROUPED_DTYPES and not any(math.prod(some) * itemsize % GROUPED_BYTES for some in (inner, columns))


def _grouped_mm(issue: Issue) -> int:
    """By torch's kernel in bfloat16; else a product for each expert."""
    if issue.dtype("x") == "bfloat16":
        return 17 - issue.splits("e")
    return _each_expert(issue, issue.tensors[issue.op.inputs[1]].shape[0])


def _grouped_outer(issue: Issue) -> int:
    return _each_expert(issue, _number(issue, "experts"))


def _each_expert(issue: Issue, experts: int) -> int:
    """Bounds, then a product and a copy for each expert."""
    return 5 + 2 * issue.part("e", experts)


def _diagonal(issue: Issue) -> int:
    """A copy; of a part of it, into zeros."""
    return 1 + (issue.splits("r") or issue.splits("c"))


def _embedding(issue: Issue) -> int:
    return 9 + INDEX_CHECK if issue.splits("v") else 1


def _embedding_backward(issue: Issue) -> int:
    return 10 + 2 * (issue.arguments["padding_idx"] != -1) if issue.splits("v") else 1


def _nll_loss(issue: Issue) -> int:
    return 12 + INDEX_CHECK + IGNORED_CHECK if issue.splits("c") else 1


def _nll_loss_backward(issue: Issue) -> int:
    return 13 if issue.splits("c") else 1


FORMULAS: Mapping[str, Callable[[Issue], int]] = {
    "attention": _attention, "attention backward": _attention_backward,
    "batch norm": _batch_norm, "batch norm backward": _batch_norm_backward,
    "diagonal": _diagonal, "embedding": _embedding, "embedding backward": _embedding_backward,
    "combine": _combine, "dispatch": _dispatch, "dispatch ids": _dispatch_ids,
    "expert contract": _expert_contract, "grouped mm": _grouped_mm, "grouped outer": _grouped_outer,
    "nll loss": _nll_loss, "nll loss backward": _nll_loss_backward,
    "recurrence": _recurrence, "recurrence backward": _recurrence_backward,
    "rms norm": _rms_norm, "rms norm backward": _rms_norm_backward,
}  # fmt: skip
"""By the word in an operator's row."""


# --- bodies with collectives inside ------------------------------------------------------------------------------------


def _batch_norm_inside(issue: Issue) -> int:
    wide = _wide(issue)
    affine = 2 - sum(issue.dtype(name) == wide for name in ("weight", "bias"))
    return 12 + (wide != issue.dtype("x")) + affine + _running(issue, wide)


def _batch_norm_backward_inside(issue: Issue) -> int:
    mean = issue.dtype("mean")
    return 12 + issue.given("weight") + (issue.dtype("x") != mean) + 2 * issue.unlike(mean, "weight")


def _extreme_inside(issue: Issue) -> int:
    """Places are counted in as many bytes as values take."""
    dtype = issue.dtype("x")
    return 9 + 2 * (dtype not in ("float64", "int64")) + issue.narrow


def _mirrored(issue: Issue) -> int:
    """The half that stays and the half that came, each with keys before it."""
    return 2 * _attention(issue) + 2


def _mirrored_backward(issue: Issue) -> int:
    return 2 * _attention_backward(issue) + 4


def _ring(issue: Issue) -> int:
    """One call a turn, merged with those before; under a causal mask rows are put in order too."""
    turns, causal = _turns(issue), bool(issue.arguments["causal"])
    each = 1 + 2 * _repeats_heads(issue)
    return turns * each + 8 * (turns - 1) + 1 + 4 * causal + 2 * (issue.dtype("q") in NARROW)


def _ring_backward(issue: Issue) -> int:
    turns, causal = _turns(issue), bool(issue.arguments["causal"])
    each = 2 + (not _takes_groups(issue)) + 4 * _repeats_heads(issue)
    return turns * each + 3 * (turns - 1) + 4 + 8 * causal + 2 * (issue.dtype("q") in NARROW)


def _turns(issue: Issue) -> int:
    return 1 if issue.strategy is None else issue.strategy.turns


def _statistics(kernels: int) -> Callable[[Issue], int]:
    """Kernels of a body that converts its operands and results in narrow dtypes."""
    return lambda issue: kernels + issue.narrow


def _norm(issue: Issue) -> int:
    """A power before the sum and a root after it; a norm of order 0 counts."""
    return (1 if issue.arguments["ord"] == 0 else 3) + issue.narrow


def sends_copy(item: InnerCollective) -> bool:
    """Whether a collective inside an operator is made on a copy of its tensor: one that is waited for, and writes over what it sends or
    swaps parts."""
    return item.beside is None and (KINDS[item.kind].in_place or KINDS[item.kind].pairs)


def _ranks_held(issue: Issue) -> int:
    """Of how many ranks of a model's own collective one rank has the values; one, over the axes that the model says."""
    assert issue.strategy is not None
    return issue.strategy.inputs[0].local_shape(issue.tensors[issue.op.inputs[0]].shape, issue.sizes)[0]


def _kept_reduction(issue: Issue) -> int:
    return int(_ranks_held(issue) > 1)


def _kept_exchange(issue: Issue) -> int:
    return 2 * (_ranks_held(issue) > 1)


INSIDE: Mapping[str, Callable[[Issue], int]] = {
    "aten._softmax": _statistics(7), "aten._log_softmax": _statistics(9),
    "aten._softmax_backward_data": _statistics(4), "aten._log_softmax_backward_data": _statistics(5),
    "aten.var.correction": _statistics(9), "aten.var_mean.correction": _statistics(9),
    "aten.std.correction": _statistics(10), "aten.std_mean.correction": _statistics(10),
    "aten.logsumexp": _statistics(7), "aten.linalg_vector_norm": _norm, "aten.norm.ScalarOpt_dim": _norm, "aten.norm.Scalar": _norm,
    "autopar.attention mirrored": _mirrored, "autopar.attention_backward mirrored": _mirrored_backward,
    "autopar.attention ring": _ring, "autopar.attention_backward ring": _ring_backward,
    "autopar.batch_norm": _batch_norm_inside, "autopar.batch_norm_backward": _batch_norm_backward_inside,
    "autopar.extreme": _extreme_inside,
    **dict.fromkeys(("autopar.dispatch", "autopar.dispatch_ids"), lambda issue: EXPERT_EXCHANGE),
    "autopar.combine": lambda issue: EXPERT_WAY + _combine_all(issue),
    "autopar.all_gather": lambda issue: 0, "autopar.all_to_all": _kept_exchange,
    "autopar.all_reduce": _kept_reduction, "autopar.reduce_scatter": _kept_reduction,
}  # fmt: skip
"""By an operator's row, and the way in which ranks exchange parts: see ``autopar.runtime.instructions.inner``."""


# --- operators that the host waits for ---------------------------------------------------------------------------------


def _has_mask(issue: Issue) -> bool:
    """Whether an index is a mask: torch asks the device how many entries are true."""
    return any(issue.tensors[name].dtype == "bool" for name in issue.op.inputs[1:])


def _always(issue: Issue) -> bool:
    return True


READING: Mapping[str, Callable[[Issue], bool]] = {
    "autopar.expert_contract": lambda issue: not _is_grouped(issue),
    "autopar.grouped_mm": lambda issue: issue.dtype("x") != "bfloat16",
    "autopar.grouped_outer": _always,
    "aten.index": _has_mask, "aten._unsafe_index": _has_mask,
}  # fmt: skip
"""By an operator's row."""
