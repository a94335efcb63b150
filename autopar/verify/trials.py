"""The same steps on the single-device model and on the sharded one, recorded in the same form, so that they can be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.attributes import in_place_of_originals
from autopar.graph import Graph
from autopar.importer import cut_call, on_one_device, without_fast_path
from autopar.importer.arguments.containers import renewed
from autopar.importer.export.precision import autocast_of, call_in
from autopar.runtime.execution.binding import bind
from autopar.runtime.module.sharded_module import ShardedModule
from autopar.runtime.optimizers.host_optimizer import HostOptimizer, is_hosted, mark_hosted
from autopar.runtime.ranks.backends import LockstepRanks
from autopar.runtime.ranks.collectives import Observed
from autopar.runtime.ranks.placement import from_placements, gather, in_double, replica_difference
from autopar.runtime.steps.accumulation import rows_in_reach, run_step
from autopar.runtime.steps.calls import leaves
from autopar.runtime.steps.simulation import entering, scatter_all
from autopar.runtime.weights.sharding import Place
from autopar.schedule import Schedule
from autopar.sharding import ShardingSpec
from autopar.torch_compat import local_of, map_tensors
from autopar.verify.chance import without_chance
from autopar.verify.live_memory import LiveMemory
from autopar.verify.trainers import Parted, trainer

MEASURED = 3
"""Steps after the first whose memory is measured on launched ranks, whatever number is asked for; in the first there are no moments yet."""
Tensors = dict[str, torch.Tensor]
Say = Callable[[str], None]
"""Is told what is being done, for a line of progress."""


def silent(_: str) -> None:
    """Says nothing."""


def told(turns: int, say: Say, where: str) -> Iterator[int]:
    """The turns of a trial, each said as it begins."""
    for turn in range(turns):
        say(f"step {turn + 1} of {turns} {where}")
        yield turn


@dataclass
class Trial:
    """What a run gave; whole tensors on the CPU.

    Args:
        outputs: by path; ``buffer:NAME`` for the new values of mutated buffers.
        gradients: by parameter or input name.
        losses: of each step, before its update.
        observed: the collectives of the first step.
        peak_bytes: of live storages on one rank in forward and backward, with optimizer states; the mean of ranks in one process.
        replica_difference: between two ranks' copies of the same block.
    """

    outputs: Tensors = field(default_factory=dict)
    gradients: Tensors = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    observed: list[Observed] = field(default_factory=list)
    peak_bytes: int = 0
    replica_difference: float = 0.0


@dataclass(frozen=True)
class Case:
    """What is run.

    Args:
        graph: as captured.
        model: with values, on the CPU. A trial changes it: run each in a process of its own.
        args, kwargs, loss, loss_args: the call.
        tangents: the gradient of each output, by name, where there is no scalar loss.
        steps: of training; of a model that does not train, one.
        optimizer: what trains, by the plan's name.
    """

    graph: Graph
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss: Callable[..., Any] | None
    loss_args: tuple[Any, ...]
    tangents: Mapping[str, torch.Tensor]
    steps: int
    optimizer: str = "adamw"

    @property
    def trains(self) -> bool:
        return self.graph.mode == "train"

    def inputs(self) -> Tensors:
        """The tensors of the call, by input name."""
        trees = self.graph.arguments
        places = (("args", list(self.args)), ("kwargs", dict(self.kwargs)), ("loss_args", list(self.loss_args)))
        return {name: tensor for key, value in places if key in trees for name, tensor in leaves(trees[key], value)}

    def microbatches(self) -> list[Case]:
        """The calls that make up a step: one with the whole batch, unless that is not what the plan's microbatches add up to."""
        made = self.graph.accumulation
        if made.whole:
            return [self]
        call = self.args, self.kwargs, self.loss_args
        calls = (cut_call(call, made.microbatches, number) for number in range(made.microbatches))
        return [replace(self, args=args, kwargs=kwargs, loss_args=loss_args) for args, kwargs, loss_args in calls]

    def run(self, model: nn.Module, call: Case) -> Tensors:
        """The outputs of a call, as they count in the step."""
        made, recording = self.graph.accumulation, self.graph.arguments.get("recording", False)
        with on_one_device(), without_chance(), without_fast_path(), torch.set_grad_enabled(self.trains or recording), rows_in_reach(made):
            args, kwargs = renewed((call.args, dict(call.kwargs)))
            compute_dtype = self.graph.arguments.get("compute_dtype")
            with autocast_of(compute_dtype):
                result = call_in(model, compute_dtype, args, kwargs)
                outputs = self.outputs(result if self.loss is None else self.loss(result, *call.loss_args))
            return outputs if made.whole else {name: tensor * made.weight for name, tensor in outputs.items()}

    def outputs(self, result: Any) -> Tensors:
        """The tensors of a result, by output name."""
        return dict(leaves(self.graph.arguments["outputs"], result))

    def mutated(self) -> Iterator[str]:
        """Names of the buffers that a call changes."""
        return (output.name for output in self.graph.outputs if output.kind == "buffer")

    def loss_of(self, outputs: Mapping[str, torch.Tensor]) -> float:
        """The loss; where there is none, the root mean square of the outputs (a sum of them could cancel to nothing)."""
        if not self.tangents:
            return outputs["loss"].item()
        squares = [in_double(outputs[name].detach()).abs().square() for name in self.tangents]
        return float((sum(square.sum() for square in squares) / max(1, sum(square.numel() for square in squares))).sqrt())

    def backward(
        self, outputs: Mapping[str, torch.Tensor], tangents: Mapping[str, torch.Tensor] | None = None, begin: torch.Tensor | None = None
    ) -> None:  # fmt: skip
        """Backward from the loss, or from the outputs with the tangents; placed ones where the outputs are.

        Args:
            begin: the loss's own gradient, which autograd makes where it is not given.
        """
        if not self.tangents:
            if outputs["loss"].requires_grad:
                outputs["loss"].backward(begin)
            return
        given = self.tangents if tangents is None else tangents
        names = [name for name in self.tangents if outputs[name].requires_grad]
        torch.autograd.backward([outputs[name] for name in names], [given[name] for name in names])


def run_single(case: Case, say: Say = silent) -> Trial:
    """The model as the user wrote it, on one device."""
    with in_place_of_originals(case.model.modules()):
        return _run_single(case, say)


def _run_single(case: Case, say: Say) -> Trial:
    trial = Trial()
    model = case.model if case.trains else case.model.eval()
    optimizer = trainer(case.optimizer, dict(model.named_parameters()), case.graph) if case.trains else None
    inputs = case.inputs()
    asked = {name: tensor for name, tensor in inputs.items() if tensor.requires_grad}  # a forward that asks for more has it for itself
    for turn in told(case.steps, say, "on one device"):
        parts = case.microbatches()
        outputs = case.run(model, parts[0])
        for part in parts[1:]:
            case.backward(outputs)
            so_far = {name: tensor.detach() for name, tensor in outputs.items()}
            outputs = {name: tensor + so_far[name] for name, tensor in case.run(model, part).items()}
        if turn == 0:
            buffers = _held(model)
            trial.outputs = {name: tensor.detach().clone() for name, tensor in outputs.items()}
            trial.outputs |= {f"buffer:{name}": buffers[name].detach().clone() for name in case.mutated()}
        if optimizer is None:
            continue
        trial.losses.append(case.loss_of(outputs))
        with without_chance():
            case.backward(outputs)
        if turn == 0:
            found = _with_gradient(model, asked, case.graph)
            trial.gradients = {name: tensor.grad.to_dense().resolve_conj().clone() for name, tensor in found}
        for parameter in model.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad.to_dense().resolve_conj()  # as a plan makes it
        optimizer.step()
        forget_gradients(model, inputs)
    for name, tensor in inputs.items():
        tensor.requires_grad_(name in asked)
    return trial


def _held(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers; a frozen parameter may be what a plan calls a buffer."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def _with_gradient(model: nn.Module, inputs: Mapping[str, torch.Tensor], graph: Graph) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and inputs that got a gradient, by the gradient's name."""
    named = {item.name: graph.gradients.get(item.tensor, item.name) for item in graph.of_kind("input")}
    held = [*model.named_parameters(), *((named[name], tensor) for name, tensor in inputs.items())]
    return ((name, tensor) for name, tensor in held if tensor.grad is not None)


def forget_gradients(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> None:
    """Drops the gradients of a step."""
    for tensor in (*model.parameters(), *inputs.values()):
        tensor.grad = None


def run_sharded(case: Case, module: ShardedModule, say: Say = silent) -> Trial:
    """The compiled module on this rank of the default process group. Whole tensors are put together on rank 0, and missing elsewhere.

    The first step is given plain inputs, whole on all ranks, as users call it; later ones placed inputs, and ``MEASURED`` of them are
    measured. Their least peak counts: a backend's thread may hold the buffers of a collective that is done for a moment longer. What the
    loss's own gradient takes is autograd's, and of no plan.
    """
    begin: torch.Tensor | None = None
    trial, place, schedule = Trial(), module.place, module.schedule
    optimizer = trainer(case.optimizer, dict(module.named_parameters()), case.graph) if case.trains else None
    plain = case.inputs()
    placed = {name: _placed(tensor, schedule.specs[name_of(case.graph, name)], place) for name, tensor in plain.items()}
    tangents = placed_tangents(case, module)
    buffers = _held(module)
    changing = [] if case.trains else [local_of(buffers[name]) for name in case.mutated()]
    began = [(local, local.clone()) for local in changing]  # each call of a model that does not train begins as the first
    for turn in told(max(case.steps, 1 + MEASURED), say, f"on {place.mesh.ranks} ranks"):
        inputs = plain if turn == 0 else placed
        args, kwargs = with_inputs((case.args + case.loss_args, dict(case.kwargs)), plain, inputs)
        measured = 1 <= turn <= MEASURED
        held = [*module.parameters(), *module.buffers(), *module.constants.values(), *states_of(optimizer)]
        held += [*placed.values(), *tangents.values()]
        with LiveMemory(held) if measured else nullcontext() as memory, module.observed_collectives() as observed:
            outputs = case.outputs(module(*args, **kwargs))
            if optimizer is not None:
                case.backward(outputs, tangents, begin)
        if memory is not None:
            trial.peak_bytes = min(trial.peak_bytes or memory.peak, memory.peak)
        whole = {name: _collect(tensor, trial, place) for name, tensor in outputs.items()}
        if turn == 0 and "loss" in outputs:
            begin = torch.ones(outputs["loss"].shape, dtype=outputs["loss"].dtype, device=outputs["loss"].device)
        if turn == 0:
            changed = {f"buffer:{name}": _collect(buffers[name], trial, place) for name in case.mutated()}
            trial.observed, trial.outputs = list(observed), whole | changed
        if optimizer is None:
            for local, before in began:
                local.copy_(before)
            continue
        if turn < case.steps:
            trial.losses.append(case.loss_of(whole) if place.rank == 0 else 0.0)
        found = dict(_with_gradient(module, inputs, case.graph))
        if turn == 0:
            trial.gradients = {name: _collect(tensor.grad, trial, place) for name, tensor in found.items()}
        held = [*module.parameters(), *module.buffers(), *module.constants.values(), *placed.values(), *tangents.values()]
        held += [*(tensor.grad for tensor in found.values()), *outputs.values()]
        stepping = measured_step(optimizer, held)
        trial.peak_bytes = max(trial.peak_bytes, stepping if measured else 0)
        forget_gradients(module, inputs)
    return trial


def measured_step(optimizer: Any, held: Iterable[torch.Tensor], ranks: int = 1) -> int:
    """Steps, and gives the most bytes of live storages on a rank in it; 0 of an optimizer whose states stay on the device.

    Args:
        held: what is on the device beside the states.
        ranks: whose parts are in this process; of a parameter they are stepped together.
    """
    mine = [one for one in getattr(optimizer, "optimizers", [optimizer]) if isinstance(one, HostOptimizer)]
    for one in mine:
        one.at_once = ranks
    passes = any(is_hosted(parameter) for one in mine for group in one.param_groups for parameter in group["params"])
    with LiveMemory([*held, *states_of(optimizer)]) if passes else nullcontext() as memory:
        optimizer.step()
    return memory.peak // ranks if memory is not None else 0


def name_of(graph: Graph, name: str) -> str:
    """The graph's tensor behind an input name."""
    return next(item.tensor for item in graph.inputs if item.kind == "input" and item.name == name)


def _placed(tensor: torch.Tensor, spec: ShardingSpec, place: Place) -> torch.Tensor:
    placed = place.dtensor(place.own_part(tensor, spec), spec, tensor.shape)
    return placed.requires_grad_(tensor.requires_grad)


def placed_tangents(case: Case, module: ShardedModule) -> Tensors:
    """The gradients of the outputs, each as its output is: placed where that is split."""
    found = {}
    for item in case.graph.of_kind("tangent"):
        whole, spec = case.tangents[item.name], module.schedule.specs[item.tensor]
        found[item.name] = whole if spec.is_replicated else _placed(whole, spec, module.place)
    return found


def with_inputs(call: Any, plain: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> Any:
    """The call with each plain input replaced by the one of the same name."""
    other = {id(tensor): inputs[name] for name, tensor in plain.items()}
    return map_tensors(lambda tensor: other.get(id(tensor), tensor), call)


def states_of(optimizer: Any) -> Iterator[torch.Tensor]:
    """The optimizer's tensors of its parameters' size on the device; its step counters are not counted, here or in the prediction."""
    if optimizer is not None:
        for state in (state for parameter, state in optimizer.state.items() if not is_hosted(parameter)):
            yield from (value for value in state.values() if isinstance(value, torch.Tensor) and value.dim() > 0)


def _collect(tensor: torch.Tensor, trial: Trial, place: Place) -> torch.Tensor:
    """The whole tensor, on rank 0; empty elsewhere. Ranks' copies of the same block are compared on the way."""
    if isinstance(tensor, DTensor):
        local, spec = tensor.to_local().detach(), from_placements(tensor.placements, tensor.dim(), place.mesh.sizes)
    else:
        local, spec = tensor.detach(), ShardingSpec.replicated(tensor.dim())
    parts: list[torch.Tensor] | None = [local] * place.mesh.ranks if place.rank == 0 else None
    dist.gather_object(local.cpu().clone(), parts)
    if parts is None:
        return torch.empty(0)
    trial.replica_difference = max(trial.replica_difference, replica_difference(parts, spec, place.mesh))
    return gather(parts, spec, place.mesh)


def run_simulated(case: Case, schedule: Schedule, constants: Mapping[str, torch.Tensor], say: Say = silent) -> Trial:
    """The schedule on all ranks in this process, in lockstep; parameters are updated rank by rank."""
    trial, graph, mesh = Trial(), case.graph, schedule.machine.mesh
    executable = bind(schedule, LockstepRanks(mesh), torch.device("cpu"), dropout=False)
    held = _held(case.model)
    tangents = {item.name: item.tensor for item in graph.of_kind("tangent")}
    source = {"parameter": held, "buffer": held, "constant": constants, "input": case.inputs(), "tangent": case.tangents}
    given = {item.tensor: source[item.kind][item.name].detach() for item in graph.inputs}
    given |= {item.tensor: given[item.tensor].reshape(graph.tensors[item.tensor].shape) for item in graph.inputs if item.blocks is not None}
    scattered = {tensor: scatter_all(schedule, tensor, whole) for tensor, whole in given.items()}
    blocks = {item.name: item.blocks for item in graph.inputs if item.blocks is not None}
    tensor_of = {item.name: item.tensor for item in graph.of_kind("buffer")}
    changing = [] if case.trains else [part for name in case.mutated() for part in scattered[tensor_of[name]][0]]
    began = [(part, part.clone()) for part in changing]
    trained = {item.name: scattered[item.tensor][0] for item in graph.inputs if item.trained}
    for parts in trained.values():
        for part in parts:
            part.requires_grad_(True)
    mark_hosted(part for item in graph.inputs if item.tensor in schedule.states_on_host for part in trained[item.name])
    leaving = [value for output, value in schedule.outputs if output.kind != "gradient" or output.name not in trained]
    parted = {
        item.name: Parted(trained[item.name], schedule.specs[item.tensor], mesh, shape, item.own_shape(shape))
        for item in graph.inputs if item.trained for shape in (graph.tensors[item.tensor].shape,)
    }  # fmt: skip
    optimizer = trainer(case.optimizer, parted, graph) if case.trains else None
    for turn in told(max(case.steps, 2), say, f"on {mesh.ranks} simulated ranks"):
        observed: list[Observed] = []
        measured = turn == 1
        count = [part for parts in scattered.values() for one in parts for part in one]
        with LiveMemory([*count, *states_of(optimizer)]) if measured else nullcontext() as memory:
            ranks = run_step(executable, range(mesh.ranks), lambda number: entering(scattered, number, mesh.ranks), observed)
        if memory is not None:
            trial.peak_bytes = memory.peak // mesh.ranks
        whole: dict[tuple[str, str], torch.Tensor] = {}
        becoming: list[tuple[torch.Tensor, torch.Tensor]] = []
        for output, value in schedule.outputs:
            parts = [held[value] for held in ranks]
            trial.replica_difference = max(trial.replica_difference, replica_difference(parts, schedule.specs[value], mesh))
            tensor = gather(parts, schedule.specs[value], mesh)
            own = blocks.get(output.name) if output.kind == "gradient" else None
            whole[output.kind, output.name] = tensor if own is None else tensor.reshape(own.own_shape(tensor.shape))
            if output.kind == "buffer":
                becoming += zip(scattered[tensor_of[output.name]][0], [part.clone() for part in parts], strict=True)
            if output.kind == "gradient" and output.name in trained:
                for mine, new in zip(trained[output.name], parts, strict=True):
                    mine.grad = new.clone()
        for mine, new in becoming:  # after all that leaves is read: it may be what a buffer was
            mine.copy_(new)
        outputs = {name: tensor for (kind, name), tensor in whole.items() if kind == "output"}
        if turn == 0:
            trial.observed = observed
            trial.outputs = outputs | {f"buffer:{name}": tensor for (kind, name), tensor in whole.items() if kind == "buffer"}
            trial.gradients = {name: tensor for (kind, name), tensor in whole.items() if kind == "gradient"}
        if optimizer is None:
            for part, before in began:
                part.copy_(before)
            continue
        if turn < case.steps:
            trial.losses.append(case.loss_of(outputs))
        grads = [part.grad for parts in trained.values() for part in parts if part.grad is not None]
        stepping = measured_step(optimizer, [*count, *grads, *(held[value] for held in ranks for value in leaving)], mesh.ranks)
        trial.peak_bytes = max(trial.peak_bytes, stepping if measured else 0)
        optimizer.zero_grad()
    assert set(tangents) <= set(case.tangents)
    return trial
