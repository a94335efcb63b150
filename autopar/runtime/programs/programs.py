"""Programs of a module: the planned one, and one for each further mode and shape that it is called with.

A plan holds for one mode and one set of shapes. Evaluation, a frozen part or a shorter last batch needs another program. The first rank
captures and plans it, with every parameter and buffer where it already lies, and sends the plan to the others. Programs are kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.cost_models import Machine
from autopar.errors import AutoparError, MismatchError, TimeLimitError, UsageError
from autopar.graph import Graph, GraphInput, to_json
from autopar.importer import Capture, capture, named_tensors
from autopar.importer.arguments.containers import changed
from autopar.plan import Plan
from autopar.recording import record, replay
from autopar.runtime.programs.padding import Padding
from autopar.runtime.programs.parts import captured_again, copied_alone
from autopar.runtime.programs.rows import check_one_batch, described
from autopar.runtime.programs.settings import Change, Settings, holds_values
from autopar.runtime.ranks.agreement import everyones, together
from autopar.runtime.ranks.placement import from_placements
from autopar.runtime.steps.calls import LacksLossError, Nesting, OtherCallError
from autopar.runtime.steps.step import Step
from autopar.schedule import Schedule
from autopar.search import SearchResult, Shared, find_plan
from autopar.sharding import ShardingSpec

MOST = 16
"""Programs beside the planned one, at most: calls in ever new shapes would plan for ever."""
SECONDS = 20.0
"""Seconds of the first time limit of the search for a program; doubled until there is a plan."""
LONGEST = 320.0
"""Seconds of the last time limit: a call without a plan then fails."""

Shapes = tuple[tuple[str, tuple[int, ...], bool, str], ...]
"""Name, global shape and whether a gradient is wanted of each input, and its dtype where that is no floating one."""
log = logging.getLogger("autopar")


@dataclass(frozen=True)
class Key:
    """What a program is for.

    Args:
        training: the flag of each part of the model, in the order of ``Module.modules``.
        trained: which parameters require grad.
        mode: ``train`` where gradients may be asked for.
        changes: attributes of the model that are others than it was planned with.
        nesting: of a call that is nested otherwise than the planned one, or has other plain values: empty for others.
    """

    training: tuple[bool, ...]
    trained: tuple[bool, ...]
    mode: Literal["train", "inference"]
    shapes: Shapes
    changes: tuple[Change, ...] = ()
    nesting: Nesting = ""


@dataclass
class Programs:
    """A module's programs by what they are for.

    Args:
        main: the planned one.
        training, settings: the training flags and the attributes it was captured with.
        loss: as planned; needed to capture again.
        optimizer, memory_limit: what the others are planned for: the optimizer by name, the limit per rank with the optimizer's states.
        states_bytes: of the optimizer, which lie beside a program without a backward.
        bind: a capture and its schedule -> what runs them; None without the model, when there is nothing to capture.
        padding: how calls are padded to the planned lengths; None where they are run as they come.
    """

    main: Step
    training: tuple[bool, ...]
    loss: Callable[..., Any] | None = None
    optimizer: str = "none"
    memory_limit: int = 0
    states_bytes: int = 0
    bind: Callable[[Capture, Schedule], Step] | None = None
    settings: Settings = field(default_factory=Settings)
    padding: Padding | None = None
    made: dict[Key, Step] = field(default_factory=dict)

    def find(self, parts: Sequence[nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Step, dict[str, torch.Tensor]]:
        """The program of a call, and the call's tensors by input name. Collective where it is a new one.

        Args:
            parts: the model's modules, the whole first.

        Raises:
            UsageError: the call has floats of another dtype than planned, or there are too many programs.
        """
        nesting, tensors = self.named_inputs(parts[0], args, kwargs)
        training, changes = tuple([part.training for part in parts]), self.settings.changes(parts)
        if not nesting and training == self.training and not changes and self._are_as_planned(tensors):
            return self.main, tensors
        whole = self._whole_shapes(tensors)
        shapes = tuple((name, whole[name], tensor.requires_grad, _exact_dtype(tensor)) for name, tensor in tensors.items())
        as_planned = not nesting and self._planned == {name: (shape, dtype) for name, shape, _, dtype in shapes}
        if as_planned and training == self.training and not changes:
            return self.main, tensors
        if self.bind is None:
            raise self.other_call(self.main.graph, self._inputs)
        if any(training) and self.main.graph.mode == "inference":
            raise UsageError("the plan is for inference, and a part of the model is in training mode", "call eval() on the module")
        for item in self._inputs:
            if item.name in tensors and not (self._planned[item.name][1] and _exact_dtype(tensors[item.name])):
                self.main.check_dtype(item, tensors[item.name])
        trained = tuple([parameter.requires_grad for parameter in parts[0].parameters()])
        differentiate = self.main.graph.mode == "train" and torch.is_grad_enabled()
        key = Key(training, trained, "train" if differentiate or any(training) else "inference", shapes, changes, nesting)
        if key not in self.made:
            with torch.inference_mode(False):  # steps that train may run the program too
                self.made[key] = self._make(key, parts[0], args, kwargs, tensors)
        step = self.made[key]
        return step, step.call.tensors(args, kwargs)

    def other_call(self, graph: Graph, inputs: Sequence[GraphInput]) -> UsageError:
        """The refusal of a call that is not the planned one, where there is no model to plan it with.

        Args:
            graph, inputs: what a call as planned takes.
        """
        shapes = {item.name: whole_shape(graph, item) for item in inputs}
        words = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        rows = f"; rows that each rank passes: {described(self.main, inputs, shapes)}" if self.main.inputs == "local" else ""
        planned = f"{'training' if graph.mode == 'train' else 'evaluation'}, {words}{rows}"
        hint = "call it as it was planned, or compile the model, which can be planned for further calls"
        return UsageError(f"an exported program runs the planned call alone: {planned}", hint)

    def named_inputs(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Nesting, dict[str, torch.Tensor]]:  # fmt: skip
        """How a call is nested, empty for one as planned, and its tensors by input name.

        Raises:
            UsageError: a call that lacks arguments, or that no program can be made for.
        """
        try:
            tensors = self.main.call.tensors(args, kwargs)
            if [*tensors] == [*self._planned]:
                return "", tensors
            return "", {item.name: input_of(tensors, item) for item in self._inputs}
        except OtherCallError:
            if self.bind is None:
                raise
        except LacksLossError as error:
            if self.bind is None:
                raise
            if model.training or not self.main.call.is_of_model_alone(args, kwargs):
                hint = f"{error.hint}; for the model's outputs alone call eval() first, and pass its arguments by name"
                raise LacksLossError(error.message, hint) from None
        own, own_kwargs, loss_args = self._parted(args, kwargs)
        loss = self.loss if loss_args else None
        return self.main.call.nesting(own, own_kwargs, loss_args), named_tensors(model, tuple(own), own_kwargs, loss, loss_args)

    def _parted(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any], tuple[Any, ...]]:
        """What of a call is the model's, by position and by name, and the loss's: nothing where the call is of the model alone."""
        call = self.main.call
        return (args, kwargs, ()) if call.is_of_model_alone(args, kwargs) else call.parted(args, kwargs)

    def name_of(self, step: Step) -> str:
        """The name of a program, the same on all ranks that run it."""
        return step.graph.sha256

    def add(self, step: Step, parameters: Sequence[nn.Parameter]) -> None:
        """A further program, for calls of the shapes that it was planned for, without gradients of inputs.

        Raises:
            MismatchError: weights that do not lie as in the planned one.
        """
        weights = [item for item in self.main.graph.inputs if item.kind in ("parameter", "buffer")]
        known = {(item.kind, item.name): self.main.spec(item.tensor) for item in weights}
        for item in step.graph.inputs:
            spec = step.spec(item.tensor)
            if known.get((item.kind, item.name), spec) != spec:
                message = f"{item.name} lies as {spec} in one plan and as {known[item.kind, item.name]} in another"
                raise MismatchError(message, "plan one of them, and the others with its specs as constraints")
        shapes = tuple((item.name, whole_shape(step.graph, item), False, _planned_dtype(step.graph, item)) for item in step.given)
        trained = tuple([parameter.requires_grad for parameter in parameters])
        self.made[Key(self.training, trained, step.graph.mode, shapes)] = step

    def __deepcopy__(self, memo: Any) -> Any:
        """Raises UsageError: a part is copied by itself."""
        raise copied_alone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises UsageError: a compiled module cannot be pickled."""
        hint = "save its state_dict(), with torch.distributed.checkpoint where it is large; `autopar export` writes programs"
        raise UsageError("a compiled module cannot be pickled: its programs belong to this rank's process", hint)

    @cached_property
    def _inputs(self) -> tuple[GraphInput, ...]:
        return self.main.given

    @cached_property
    def _planned(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """The whole shape and dtype of each planned input."""
        graph = self.main.graph
        return {item.name: (whole_shape(graph, item), _planned_dtype(graph, item)) for item in self._inputs}

    def _are_as_planned(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether a call's inputs, whole, are of the planned shapes and dtypes, told without asking for more."""
        return self.main.inputs == "global" and [(tensor.shape, tensor.dtype) for tensor in tensors.values()] == self._planned_whole

    @cached_property
    def _planned_whole(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """The whole shape and dtype of each planned input, in order."""
        graph = self.main.graph
        return [(whole_shape(graph, item), getattr(torch, graph.tensors[item.tensor].dtype)) for item in self._inputs]

    def _whole_shapes(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
        """The global shapes of a call's inputs, by name.

        Raises:
            UsageError: the rows that each rank passes make up no batch.
        """
        if self.main.inputs == "global":
            return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        known = {item.name: item for item in self._inputs}
        found = {name: self._shape(known[name], tensor) for name, tensor in tensors.items() if name in known}
        check_one_batch(self.main, found, tensors)
        return {name: found[name] if name in found else self._beside(found, tensors, tensor) for name, tensor in tensors.items()}

    def _beside(self, found: Mapping[str, tuple[int, ...]], tensors: Mapping[str, torch.Tensor], tensor: torch.Tensor) -> tuple[int, ...]:
        """The global shape of a rank's part of an input that the plan does not have: it has as many rows as the first that it has."""
        first = next((name for name, shape in found.items() if shape), None)
        if isinstance(tensor, DTensor) or first is None or tensor.shape[:1] != tensors[first].shape[:1]:
            return tuple(tensor.shape)
        return (found[first][0], *tensor.shape[1:])

    def _shape(self, item: GraphInput, tensor: torch.Tensor) -> tuple[int, ...]:
        """The global shape of a planned input, of which each rank passes its part."""
        if isinstance(tensor, DTensor):
            return tuple(tensor.shape)
        spec, sizes, graph = self.main.spec(item.tensor), self.main.place.mesh.sizes, self.main.graph
        planned, parts = graph.tensors[item.tensor].shape, graph.parts(item.tensor)
        if not spec.is_even(planned, sizes):  # a part of another size does not say how large the whole is
            own = self.main.place.own_shape(planned, spec)
            if tuple(tensor.shape) != ((parts * own[0], *own[1:]) if parts > 1 else own):
                message = f"each rank's part of input {item.name} is {list(tensor.shape)} here, the plan was made for {list(own)}"
                raise UsageError(message, "parts of unequal sizes cannot change: pass whole tensors or DTensors (inputs='global')")
            return whole_shape(graph, item)
        return tuple(extent * (spec.parts(dim, sizes) if dim < len(spec.dims) else 1) for dim, extent in enumerate(tensor.shape))

    def _make(
        self, key: Key, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> Step:  # fmt: skip
        rank = next((rank for rank, other in enumerate(everyones(key, self.main.place.team)) if other != key), None)
        if rank is not None:
            raise called_otherwise(rank, key, "here")
        if len({id(step) for step in self.made.values()} - {id(self.main)}) == MOST:
            hint = "pad batches to a few shapes, and pass numbers that change as tensors"
            raise UsageError(f"the module was called in {MOST + 1} ways beside the planned one", hint)
        log.info("planning %s beside the plan", _words(key))
        with self.settings.kept():
            captured = together(lambda: self._captured(key, model, args, kwargs, tensors), self.main.place.team)
        same_values = not any(holds_values(value) for _, _, value in key.changes)
        if self.main.graph.microbatches == 1 and same_values and not key.nesting and _same_forward(captured.graph, self.main.graph):
            return self.main
        assert self.bind is not None
        return self.bind(captured, replay(self._plan(captured.graph, model), captured.graph))

    def _captured(
        self, key: Key, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> Capture:  # fmt: skip
        """The model captured with stand-ins of the call's global shapes."""
        own, own_kwargs, loss_args = self._parted(args, kwargs)
        with_loss = bool(loss_args) or not self.main.graph.arguments.get("loss_args")
        if loss_args and self.loss is None:
            raise UsageError("a program for this call needs the loss, which is not known", "pass loss= to compile")
        shapes = {name: shape for name, shape, *_ in key.shapes}
        stand_ins = {
            id(tensor): torch.empty(shapes[name], dtype=tensor.dtype, device="meta").requires_grad_(tensor.requires_grad)
            for name, tensor in tensors.items()
        }
        given = (tuple(own), dict(own_kwargs), loss_args)
        own, own_kwargs, loss_args = changed(lambda tensor: stand_ins.get(id(tensor), tensor), given)
        with torch.enable_grad(), captured_again(model.modules()):
            return capture(
                model, own, own_kwargs, mode=key.mode, loss=self.loss if with_loss else None, loss_args=loss_args,
                compute_dtype=self.main.graph.arguments.get("compute_dtype"), plain=self._plain(),
            )  # fmt: skip

    def _plain(self) -> dict[str, frozenset[int]]:
        """The parameters that are held in blocks are those of the planned program."""
        graph = self.main.graph
        return {
            item.name: frozenset(range(len(graph.tensors[item.tensor].shape)))
            for item in graph.of_kind("parameter") if item.blocks is None
        }  # fmt: skip

    def _plan(self, graph: Graph, model: nn.Module, pins: Mapping[str, str] | None = None) -> Plan:
        """The first rank's plan for the graph with all weights where they lie, and more ``pins``. Collective."""
        team = self.main.place.team
        outcome: list[Any] = [None]
        if team.rank == 0:
            machine = self.main.executable.schedule.machine
            memory_limit = self.memory_limit - (self.states_bytes if graph.mode == "inference" else 0)
            try:
                found = self._found(graph, machine, memory_limit, {**self._pins(graph, model), **(pins or {})})
                outcome = [record(found, target="a further call", memory_limit=memory_limit).to_json()]
            except AutoparError as error:
                outcome = [(type(error), error.message, error.hint)]
            except Exception as error:  # the others wait to hear of it
                outcome = [(RuntimeError, f"{type(error).__name__}: {error}")]
        if len(team.members) > 1:
            dist.broadcast_object_list(outcome, team.first, team.group)
        if isinstance(outcome[0], tuple):
            kind, *words = outcome[0]
            raise kind(*words)
        return Plan.from_json(outcome[0])

    def _found(self, graph: Graph, machine: Machine, memory_limit: int, pins: Mapping[str, str]) -> SearchResult:
        """The plan of the search. Raises what the search raises."""
        seconds, shared = SECONDS, Shared()
        while True:
            try:
                return find_plan(
                    graph, machine, memory_bytes=memory_limit, optimizer=self.optimizer, constraints=pins, time_limit=seconds,
                    baselines=False, shared=shared,
                )  # fmt: skip
            except TimeLimitError:
                if seconds >= LONGEST:
                    raise
                seconds *= 2

    def _pins(self, graph: Graph, model: nn.Module) -> dict[str, str]:
        """Weights lie where they lie, those that were put there since (``parametrize``) too; inputs where they came before if that divides
        them."""
        sizes = self.main.place.mesh.sizes
        known = {(item.kind, item.name): item.own_spec(self.main.spec(item.tensor), sizes) for item in self.main.graph.inputs}
        found = {}
        for item in graph.inputs:
            shape, spec = graph.tensors[item.tensor].shape, known.get((item.kind, item.name))
            if item.kind in ("parameter", "buffer"):
                found[item.name] = str(spec or self._lying(model, item))
            elif item.kind == "input" and spec is None and self.main.inputs == "local":
                found[f"input:{item.name}"] = str(self._rows_beside(graph, shape))
            elif item.kind == "input" and spec is not None and spec.problem(shape, sizes) is None and spec.is_even(shape, sizes):
                found[f"input:{item.name}"] = str(spec)
        return found

    def _rows_beside(self, graph: Graph, shape: tuple[int, ...]) -> ShardingSpec:
        """Of an input that the plan does not have, where ranks pass rows: split as those of the first that it has (``_beside``)."""
        entering = {item.name: item for item in graph.of_kind("input")}
        first = next((item for item in self._inputs if item.name in entering and graph.tensors[entering[item.name].tensor].shape), None)
        if first is None or shape[:1] != graph.tensors[entering[first.name].tensor].shape[:1]:
            return ShardingSpec.replicated(len(shape))
        return ShardingSpec((self.main.spec(first.tensor).dims[0], *((),) * (len(shape) - 1)))

    def _lying(self, model: nn.Module, item: GraphInput) -> ShardingSpec:
        """How a weight lies that the planned program does not have."""
        path, _, name = item.name.rpartition(".")
        tensor = getattr(model.get_submodule(path), name)
        if not isinstance(tensor, DTensor):
            return ShardingSpec.replicated(tensor.dim())
        return from_placements(tensor.placements, tensor.dim(), self.main.place.mesh.sizes)


def called_otherwise(rank: int, key: Key, where: str) -> MismatchError:
    """The refusal of a call that is another one on rank ``rank``; ``key`` is of the call ``where`` says."""
    message = f"this rank and rank {rank} call the module in other modes or with other shapes ({_words(key)} {where})"
    return MismatchError(message, "call it on all ranks alike; a shorter last batch must be so on all of them")


def _exact_dtype(tensor: torch.Tensor) -> str:
    """The dtype of whole numbers and flags; nothing for floats, whose dtype is the planned one."""
    return "" if tensor.is_floating_point() or tensor.is_complex() else str(tensor.dtype).removeprefix("torch.")


def _planned_dtype(graph: Graph, item: GraphInput) -> str:
    """Of an input, as ``_exact_dtype``."""
    return _exact_dtype(torch.empty(0, dtype=getattr(torch, graph.tensors[item.tensor].dtype), device="meta"))


def input_of(tensors: Mapping[str, Any], item: GraphInput) -> torch.Tensor:
    """The tensor of an input among those of a call."""
    return tensors[item.name] if item.name in tensors else tensors[item.tensor]


def whole_shape(graph: Graph, item: GraphInput) -> tuple[int, ...]:
    """Of an input of a step: of all microbatches where it is cut."""
    shape, parts = graph.tensors[item.tensor].shape, graph.parts(item.tensor)
    return (parts * shape[0], *shape[1:]) if parts > 1 else shape


def _words(key: Key) -> str:
    shapes = ", ".join(f"{name} {list(shape)}" for name, shape, *_ in key.shapes)
    flags = "training" if all(key.training) else "part training, part evaluation" if any(key.training) else "evaluation"
    changed = "".join(f", {name} {value!r}" for _, name, value in key.changes)
    return f"{flags}{' with gradients' if key.mode == 'train' and not any(key.training) else ''}, {shapes}{changed}"


def _same_forward(graph: Graph, main: Graph) -> bool:
    """Whether the forward of ``main`` does what the whole of ``graph`` does."""
    if graph.sha256 == main.sha256:
        return True
    return graph.mode == "inference" and graph.arguments == main.arguments and _forward(graph) == _forward(main)


def _forward(graph: Graph) -> list[Any]:
    """What is computed before the first backward operator, with values named by who makes them."""
    number = {item.tensor: f"{item.kind} {item.name} {graph.tensors[item.tensor].dtype}" for item in graph.inputs}
    rows: list[Any] = []
    for op in graph.ops:
        if op.phase == "forward":
            rows.append([op.target, [number[name] for name in op.inputs], to_json(op.args), to_json(dict(op.kwargs))])
            rows += [[graph.tensors[name].shape, graph.tensors[name].dtype] for name in op.outputs]
            number |= {name: f"{len(rows)}:{index}" for index, name in enumerate(op.outputs)}
    return [rows, [(output.kind, output.name, number.get(output.tensor)) for output in graph.outputs if output.kind != "gradient"]]
