"""The model as torch.export sees it: a graph of torch operators over named inputs.

The model runs once, on fake tensors, through the user's own Python; module paths and source lines are known here and
nowhere later.
"""

from __future__ import annotations

import linecache
import pickle
import random
import sys
import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from autopar import torch_compat
from autopar.errors import CaptureError, UsageError
from autopar.importer.arguments.calls import argument_names, input_name, nested, plain_leaf, tree_of
from autopar.importer.arguments.containers import Kind, closed, kind_of, opened
from autopar.importer.collectives.axis_groups import sees_one_rank
from autopar.importer.collectives.calls import kept_collectives
from autopar.importer.diagnosis.errors import (
    OWN_GENERATOR,
    Carried,
    at_line,
    is_known_cause,
    is_user_file,
    refuse_collective,
    refuse_conversion,
    refuse_rank,
)
from autopar.importer.diagnosis.provenance import MarkedLines, user_frame
from autopar.importer.export.hidden_state import check_kept, keeps_tensors
from autopar.importer.export.precision import COMPUTE_DTYPES, call_in
from autopar.importer.export.replaced_buffers import change, held_by
from autopar.importer.rewrite.adaptive import every_row
from autopar.importer.rewrite.called import Called
from autopar.importer.rewrite.normalisation import cumulative_averages
from autopar.importer.stand_ins.autograd_calls import Deferred, deferring, replaced
from autopar.importer.stand_ins.fake_weights import FakeWeights
from autopar.importer.stand_ins.indexing import Indexing
from autopar.importer.stand_ins.known_values import KnownValues

Whole = Callable[[], AbstractContextManager[None]]
"""Makes a context for the model's code, in which modules hold all of their attributes; torch may see fewer."""
Within = Callable[[Callable[[], object]], AbstractContextManager[Whole]]
"""From a call that runs the model once, the context of an export."""


def all_held(run: Callable[[], object]) -> AbstractContextManager[Whole]:
    """Where torch sees all of the model."""
    return nullcontext(nullcontext)


class ChangedNumberWarning(UserWarning):
    """A forward counts in Python."""


class DrawnOnceWarning(UserWarning):
    """A forward draws numbers elsewhere than in torch."""


class GradModeWarning(UserWarning):
    """A forward asks whether gradients are recorded, or whether it runs in inference mode."""


@dataclass(frozen=True)
class Value:
    """One flat input of the exported graph: a fake tensor, or a plain value that was baked in (``kind`` is ``plain``).

    ``hooks``: what the user registered on a parameter's gradient.
    """

    kind: Literal["input", "parameter", "buffer", "constant", "plain"]
    name: str
    value: Any
    aliases: tuple[str, ...] = ()
    hooks: tuple[Callable[..., Any], ...] = ()


@dataclass(frozen=True)
class Exported:
    """An exported model.

    Args:
        graph_module: the pre-dispatch graph; its placeholders are ``values``, in order.
        outputs: names of the tensors among the graph's flat results, in order.
        arguments: JSON trees of call and result, as in ``Graph.arguments``.
        loss: position of the scalar loss in ``outputs``, None when there is none.
        once: the forward noted in its modules that it need not do again what it did, so what it wrote to parameters is of this call.
        calls: what the graph's deferred operators stand for.
        left: the attributes, by path, in which the forward leaves what it made of its inputs, or another tensor than was there.
        result: the classes of what the model, or the loss, gives.
        read: paths of buffers whose values forward reads. They are constants.
    """

    graph_module: torch.fx.GraphModule
    values: tuple[Value, ...]
    outputs: tuple[str, ...]
    arguments: Mapping[str, Any]
    loss: int | None
    once: bool = False
    calls: tuple[Deferred, ...] = ()
    left: tuple[str, ...] = ()
    result: Kind | None = None
    read: Mapping[str, Tensor] = field(default_factory=dict)

    @cached_property
    def tensors(self) -> tuple[Value, ...]:
        """The tensors among the values, a tied one once: what the joint trace takes, so that it sums the gradients of ties."""
        unique = {(value.kind, value.name): value for value in reversed(self.values) if value.kind != "plain"}
        return tuple(reversed(unique.values()))


class HeldValues(dict[str, Tensor]):
    """Tensors by path, which torch does not take for tensors that a module holds."""


class Program(nn.Module):
    """The model and its loss as one module; it takes and gives opened containers, the model those of ``call``.

    ``attributes``: the paths of plain tensor attributes; those that the forward assigned anew are in ``replaced``.
    ``drawn``: the generators outside of torch that it drew from. ``ran``: is told the result. ``values``: of buffers, by path;
    ``read``: those that it read. ``asked``: the questions of the mode of autograd that the user's code asks, with answer, file and line.
    """

    def __init__(
        self, model: nn.Module, loss: Callable[..., Any] | None, call: Sequence[Any], deferred: list[Deferred], compute_dtype: str | None,
        ran: Callable[[Any], None], attributes: Container[str], values: Mapping[str, Tensor],
    ) -> None:  # fmt: skip
        super().__init__()
        self.attributes = attributes
        self.values = HeldValues(values)
        self.replaced: set[str] = set()
        self.drawn: set[str] = set()
        self.read: set[str] = set()
        self.asked: set[tuple[str, bool, str, int]] = set()
        self.compute_dtype = compute_dtype
        self.model = model
        self.loss = loss
        self.call = call
        self.ran = ran
        self.whole: Whole = nullcontext
        self.deferred = (deferred,)  # export puts back every other attribute that changes while it traces

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], loss_args: tuple[Any, ...]) -> Any:
        traced, known = dict(self.model.named_parameters()), KnownValues()
        for path, stand_in in self.model.named_buffers(remove_duplicate=False):
            if path in self.values:
                known.note_buffer(path, stand_in, self.values[path])
        try:
            with (
                self.whole(), torch_compat.recorded_origins() as origin, deferring(self.deferred[0]), MarkedLines(origin, replaced),
                known, Called(), Indexing(known), cumulative_averages(), every_row(),
                torch_compat.refused_collectives(refuse_collective), torch_compat.refused_ranks(refuse_rank),
                torch_compat.answered_as_one_device(lambda: not sees_one_rank()), kept_collectives(),
                torch_compat.kept_modules(set(self.modules()), refuse_conversion), torch_compat.noticed_questions(self._asks),
            ):  # fmt: skip
                before = _generators()
                result, left = self._run(traced, *closed((args, kwargs, loss_args), self.call))
                self.read.update(known.read)
                self.drawn.update(name for name, state in _generators().items() if state != before.get(name))
                self.ran(result)  # export puts back the modules' attributes afterwards
                return left
        except Exception as error:
            raise Carried(error, known.maker_of(error)) from None

    def _asks(self, name: str, answer: bool, frame: FrameType) -> None:
        if is_user_file(frame.f_code.co_filename):
            self.asked.add((name, answer, frame.f_code.co_filename, frame.f_lineno))

    def _run(self, traced: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], loss_args: tuple[Any, ...]) -> tuple[Any, Any]:
        """The result of the model, or of the loss; and that opened, as what the program gives."""
        self.replaced.clear()
        held = held_by(self)
        outputs = call_in(self.model, self.compute_dtype, args, kwargs, traced)
        result = outputs if self.loss is None else self.loss(outputs, *loss_args)
        left, replaced = change(held, self.attributes, opened(result), COMPUTE_DTYPES.get(self.compute_dtype or ""))
        self.replaced.update(replaced)
        return result, left


def _generators() -> dict[str, Any]:
    """The states of the generators that programs draw from without torch."""
    numpy = sys.modules.get("numpy")
    return {"random": random.getstate(), **({} if numpy is None else {"numpy.random": pickle.dumps(numpy.random.get_state())})}


def check_plain(what: str, tensor: Tensor) -> None:
    """Raises UsageError: a tensor that is not laid out by strides, whose stand-in would be a dense one."""
    kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
    if kind != "strided":
        raise UsageError(f"{what} is a {kind} tensor; plans are made for dense ones", "make it dense: to_dense(), dequantize() or padding")


def export(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Callable[..., Any] | None,
    loss_args: tuple[Any, ...],
    weights: FakeWeights,
    *,
    train: bool,
    recording: bool | None = None,
    compute_dtype: str | None = None,
    within: Within = all_held,
) -> Exported:
    """Export the model on stand-ins of its inputs. Errors are torch's own; ``autopar.importer.diagnosis.errors`` reads them.

    Args:
        recording: whether autograd listens, as it does by default where the model trains; the graph's arguments say so where it was asked.
    """
    held = loss.named_parameters() if isinstance(loss, nn.Module) else ()
    if own := [name for name, parameter in held if parameter.requires_grad and id(parameter) not in weights.paths]:
        raise UsageError(
            f"the loss is a module with parameters of its own: {', '.join(own[:5])}",
            "make it part of the model: a module whose forward returns the loss trains them like any other",
        )
    tops = argument_names(model, args, kwargs, loss, loss_args)
    calls: list[Deferred] = []

    def stand_in(tensor: Tensor) -> Tensor:
        check_plain("an example input", tensor)
        with weights.mode:
            fake = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="cpu")
        return fake.requires_grad_(train and tensor.requires_grad)

    given = (args, kwargs, loss_args)
    args, kwargs, loss_args = opened(given)
    call = torch_compat.map_tensors(stand_in, (args, kwargs, loss_args))
    flagged: list[bool] = []
    keeping: list[bool] = []
    counted: dict[str, tuple[Any, Any]] = {}

    kinds: list[Kind] = []

    def ran(result: Any) -> None:
        kinds.append(kind_of(result))
        flagged.append(weights.flagged())
        keeping.append(keeps_tensors((*model.modules(), loss), weights.stand_ins.values()))
        counted.update({path: (was, now) for path, was, now in weights.changed() if not isinstance(was, bool) and was != now})

    module = Program(model, loss, given, calls, compute_dtype, ran, weights.constants, weights.values)
    once_through = Program(model, None, given, [], compute_dtype, lambda _: None, weights.constants, weights.values)
    # of two calls, one after another
    again = Program(model, loss, given, [], compute_dtype, lambda _: None, weights.constants, weights.values)
    listening = train if recording is None else recording
    with within(lambda: _run_once(once_through, call, weights)) as module.whole, torch.set_grad_enabled(listening):
        program = _exported(module, again, call, weights)
    leaves, _ = torch_compat.flatten_with_paths(call)
    names = [input_name(path, tops) for path, _ in leaves]
    for path, (was, now) in counted.items():
        text = f"the forward changes its number {path}, from {was} to {now}: what is computed from it stays as in the first call"
        warnings.warn(f"{text}; pass it as a tensor, or set it outside of the forward", ChangedNumberWarning, stacklevel=2)
    for name in sorted(module.drawn):
        text = f"the forward draws numbers from {name}: they are drawn once, while it is captured, and stay so in every call"
        warnings.warn(f"{text}; draw them with torch (torch.rand), or pass them as an input", DrawnOnceWarning, stacklevel=2)
    _warn_of_mode(module.asked, listening)
    values = _values(program, [leaf for _, leaf in leaves], names, weights)
    _check_replaced(program, values, module.replaced)
    left = tuple(sorted(module.replaced))
    if keeping[-1]:
        both = [torch_compat.map_tensors(stand_in, (args, kwargs, loss_args)) for _ in range(2)]
        with weights.mode, torch.set_grad_enabled(listening):
            left += check_kept(model, lambda given: again(*given), both, weights.stand_ins.values())
    outputs, tree, position = _outputs(program)
    arguments = {
        "args": [tree_of(item, tops, ("0", str(i))) for i, item in enumerate(args)],
        "kwargs": {key: tree_of(item, tops, ("1", key)) for key, item in kwargs.items()},
        "loss_args": [tree_of(item, tops, ("2", str(i))) for i, item in enumerate(loss_args)],
        "outputs": tree,
    }
    if compute_dtype is not None:
        arguments["compute_dtype"] = compute_dtype
    if recording:
        arguments["recording"] = True
    loss_at, once = (position, False) if train else (None, flagged[-1])
    read = {path: weights.values[path].detach().cpu().clone() for path in sorted(module.read)}
    return Exported(program.graph_module, values, outputs, arguments, loss_at, once, tuple(calls), left, kinds[-1], read)


def _warn_of_mode(asked: Iterable[tuple[str, bool, str, int]], listening: bool) -> None:
    """Warns of questions whose answer is the caller's. In a ``torch.no_grad()`` of the forward's own it is the forward's.

    Args:
        listening: whether autograd does around the forward, which is not in inference mode.
    """
    for name, answer, file, line in sorted(asked):
        if answer is (listening and name == "is_grad_enabled"):
            text = f"{file}:{line}: planned as if torch.{name}() were always {answer}: {linecache.getline(file, line).strip()}"
            hint = f"call the compiled module where torch.{name}() is {answer}, or compute the same in both cases"
            warnings.warn(f"{text}\nhint: {hint}", GradModeWarning, stacklevel=2)


def _exported(module: Program, again: Program, call: tuple[Any, ...], weights: FakeWeights) -> torch.export.ExportedProgram:
    """The program of a call. Some models make masks in another way where they are exported. Where a model and its loss fail, and ``again``,
    which is both, runs on these stand-ins otherwise, the model is told that nothing exports it.

    Raises:
        Carried: what the model or the loss raises. It says so where both run otherwise.
    """
    try:
        return torch.export.export(module, call, strict=False)
    except Carried as carried:
        if carried.maker is not None or is_known_cause(carried.error):
            raise
        try:
            _run_once(again, call, weights)
        except Exception:
            raise carried from None
        module.deferred[0].clear()
        try:
            with torch_compat.answered_as_not_exported():
                return torch.export.export(module, call, strict=False)
        except Exception:
            raise Carried(carried.error, runs=True) from None


def _run_once(program: Program, call: tuple[Any, ...], weights: FakeWeights) -> None:
    with weights.mode, torch.no_grad():
        program(*call)


def _values(program: torch.export.ExportedProgram, flat_inputs: list[Any], names: list[str], weights: FakeWeights) -> tuple[Value, ...]:
    from torch.export.graph_signature import InputKind

    inputs = iter(zip(flat_inputs, names, strict=True))
    found: list[Value] = []
    nodes = program.graph_module.graph.find_nodes(op="placeholder")
    for node, spec in zip(nodes, program.graph_signature.input_specs, strict=True):
        target = (spec.target or "").removeprefix("model.")
        if spec.kind is InputKind.USER_INPUT:
            value, name = next(inputs)
            found.append(Value("input" if isinstance(value, Tensor) else "plain", name, value))
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            value = program.state_dict.get(spec.target or "", program.constants.get(spec.target or ""))
            assert value is not None, f"export names {spec.target} but does not hold it"
            name, *aliases = weights.paths.get(id(value), [target])
            kind: Any = "parameter" if spec.kind is InputKind.PARAMETER else "buffer"
            kind = "constant" if target in weights.constants or id(value) not in weights.paths else kind  # a buffer of the loss
            hooks = weights.hooks.get(id(value), ())
            found.append(Value(kind, target if kind == "constant" else name, value, tuple(aliases), hooks))
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            value = program.constants[spec.target or ""]
            if torch_compat.is_fake(value):
                raise CaptureError(
                    f"the forward comes by a weight of shape {list(value.shape)} otherwise than by its module's attribute",
                    "read parameters and buffers where they are registered (self.weight), not from lists and dictionaries beside them",
                )
            found.append(Value("constant", target, value))
        elif isinstance(program.constants.get(spec.target or ""), torch.Generator):
            message, hint = OWN_GENERATOR
            raise CaptureError(at_line(message, user_frame(next(iter(node.users), node))), hint)
        else:
            raise CaptureError(
                f"the model holds an object torch.export passes as {spec.kind.name.lower()}: {spec.target}",
                "keep tensors in parameters, buffers or plain tensor attributes",
            )
    return tuple(found)


def _check_replaced(program: torch.export.ExportedProgram, values: Sequence[Value], replaced: Container[str]) -> None:
    """Raises CaptureError: the forward reads a tensor and then puts another in its place, as a state that goes from call to call. What it
    only puts there (weights that a hook computes, attention kept to be looked at) is of this call."""
    for node, value in zip(program.graph_module.graph.find_nodes(op="placeholder"), values, strict=True):
        if value.kind == "constant" and value.name in replaced and node.users:
            message = f"the forward reads the tensor {value.name} and then puts another in its place, which its next call would read"
            hint = "register it as a buffer, whose new value is kept: self.register_buffer(name, tensor, persistent=False)"
            raise CaptureError(at_line(message, user_frame(next(iter(node.users)))), hint)


def _outputs(program: torch.export.ExportedProgram) -> tuple[tuple[str, ...], Any, int | None]:
    """Names of the flat outputs, their JSON tree, and which one is the scalar loss."""
    from torch.export.graph_signature import OutputKind

    specs = program.graph_signature.output_specs
    if any(spec.kind not in (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT) for spec in specs):
        kinds = sorted({spec.kind.name.lower() for spec in specs})
        raise CaptureError(f"torch.export returns results of kinds {', '.join(kinds)}", "return plain tensors from forward")
    nodes = program.graph_module.graph.output_node().args[0]
    out_spec = program.call_spec.out_spec
    assert out_spec is not None
    result = torch_compat.unflatten(list(nodes), out_spec)
    leaves, _ = torch_compat.flatten_with_paths(result)
    scalar = [_is_scalar(leaf) for _, leaf in leaves]
    single = len(leaves) == 1
    names = ["loss" if single and scalar[0] else ".".join(path) or "0" for path, _ in leaves]
    named = list(zip(leaves, names, strict=True))
    shown = ({"tensor": name} if isinstance(leaf, torch.fx.Node) else plain_leaf(leaf) for (_, leaf), name in named)
    tree = nested(result, shown, result=True)
    tensors = [(name, leaf) for (_, leaf), name in named if isinstance(leaf, torch.fx.Node)]
    loss = next((index for index, (name, leaf) in enumerate(tensors) if name == "loss" and _is_scalar(leaf)), None)
    return tuple(name for name, _ in tensors), tree, loss


def _is_scalar(leaf: Any) -> bool:
    if not isinstance(leaf, torch.fx.Node):
        return False
    value = leaf.meta.get("val")
    return isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point()
