"""A pipeline's module on one rank: the parameters of its stages under the model's own names, and a call that runs the whole step.

Each rank is given the whole batch, and reads what its stages read. The call returns the loss on every rank. ``loss.backward()`` hands out
gradients that are already there.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.cost_models import Mesh
from autopar.errors import MismatchError, UsageError
from autopar.graph import GraphInput, GraphOutput
from autopar.importer import Capture, capture
from autopar.pipeline import stage_mesh
from autopar.pipeline.timetable import stages_split
from autopar.pipeline_plan import PipelinePlan
from autopar.recording.pipelines import ReplayedPipeline, replay_pipeline
from autopar.runtime.execution.executable import Executable
from autopar.runtime.execution.loss_gradient import LossScale, is_narrow
from autopar.runtime.module.compiling import (
    bind_step,
    check_torch,
    example_of,
    find_device,
    join_launched,
    own_constants,
    share_device_mesh,
    start_process_group,
)
from autopar.runtime.module.sharded_module import ShardedModule
from autopar.runtime.pipelines.mail import Groups, ProcessMail, Ranks, create_groups
from autopar.runtime.pipelines.programs import Absent, PipelinePrograms, Running
from autopar.runtime.pipelines.step import StageRun, starts_scaled
from autopar.runtime.programs.programs import Programs
from autopar.runtime.programs.settings import Settings, held_by
from autopar.runtime.ranks.agreement import everyones, together
from autopar.runtime.ranks.collectives import Values
from autopar.runtime.ranks.groups import Team, team_of
from autopar.runtime.steps.accumulation import AccumulatedCall
from autopar.runtime.steps.calls import CallTree
from autopar.runtime.steps.step import Step
from autopar.runtime.steps.training_step import Call
from autopar.runtime.weights.sharding import Initialise, Place, copy_tree, initialise, own_specs, own_tensors, shard_weights
from autopar.schedule import Schedule
from autopar.seeds import check_seed
from autopar.torch_compat import flatten_axes, forward_of, join_total_norms

LOSS = GraphOutput("loss", "output", "loss")


class StageCall(AccumulatedCall):
    """One stage's part of a call. Its forward is run action by action."""

    def __init__(self, *rest: Any, cut: Mapping[str, Callable[[int], Tensor]], scale: LossScale, vanishes: bool) -> None:
        super().__init__(*rest, cut=cut, scale=scale)
        self.leaving, self.tangents, self.names, self.loss = ((LOSS, LOSS.name),), {}, [LOSS.name], LOSS.name
        self.vanishes = vanishes

    def start(self, running: Running, stage: int, *, keep: bool) -> StageRun:
        """The stage's run."""
        executable = self.step.executable
        assert isinstance(executable, Executable)
        return StageRun(
            running.stages, stage, executable, self.enter, running.mail,
            scaled=starts_scaled(running.stages), draw=self.number, observed=self.observed, trains=keep,
        )  # fmt: skip

    def _is_reached(self, tensor: str, asked: Any) -> bool:
        return True


class PipelineCall(AccumulatedCall):
    """A call of a pipeline: all of the step runs in its forward.

    Args:
        calls: of each stage of this rank.
    """

    def __init__(self, calls: Mapping[int, StageCall], running: Running) -> None:
        self.__dict__.update(vars(next(iter(calls.values()))))
        self.calls, self.running = calls, running

    @property
    def team(self) -> Team:
        return self.running.ranks.team

    def forward(self, *, keep: bool) -> tuple[Tensor, ...]:
        """The loss; with gradients, all of the step but the optimizer's part is done then. Without, forward alone runs."""
        with self.begin():
            found = self._run_stages(keep)
        if keep:
            self._sum_tied(found)
            for stage, call in self.calls.items():
                call.save(found[stage])
        return (self._loss(found.get(self.running.last)),)

    def _run_stages(self, keep: bool) -> dict[int, Values]:
        """What is there at the end of the step, of each stage of this rank."""
        running = self.running
        runs = {stage: call.start(running, stage, keep=keep) for stage, call in self.calls.items()}
        for run in runs.values():
            run.begin()
        mine = [(place, action) for place, action in running.mine if keep or action.part == "forward"]
        for index, (place, action) in enumerate(mine):
            for _, ahead in mine[index : index + 2]:
                running.mail.post(ahead)
            running.mail.settle(place)
            runs[action.stage].run(action.part, action.microbatch)
        running.mail.settle(len(running.order))
        return {stage: next(iter(run.finish())) for stage, run in runs.items()}

    def _sum_tied(self, found: Mapping[int, Values]) -> None:
        """Sums gradients of tied weights over the stages that hold them, into those of this rank's first. Collective over these."""
        for tensor in self.running.stages.tied:
            held = [(found[stage], call.step.gradients[tensor]) for stage, call in self.calls.items() if tensor in call.step.gradients]
            if held:
                total = sum((values[value] for values, value in held[1:]), start=held[0][0][held[0][1]]).contiguous()
                if tensor in self.running.groups.tied:
                    dist.all_reduce(total, group=self.running.groups.tied[tensor])
                for values, value in held:
                    values[value] = total

    def _loss(self, values: Values | None) -> Tensor:
        """The loss, of the values of the last stage where it is this rank's. Collective over the positions."""
        running, last = self.running, self.running.stages.position(self.running.last)
        tensor = running.whole.tensors[running.whole.outputs[running.whole.loss or 0].tensor]
        if values is not None:
            step = running.steps[running.last]
            found = next(values[value] for output, value in step.leaving if output.name == LOSS.name)
            loss = found.detach().clone().contiguous()
        else:
            loss = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device=self.step.place.device)
        dist.broadcast(loss, running.ranks.at(last), group=running.groups.across)
        return loss

    def backward(self, gradients: Sequence[Tensor | None], *, keep: bool) -> list[Tensor | None]:
        """The gradients. Where the loss was scaled and a stage's gradients overflow, those of all stages do: each would decide for itself
        whether to skip the step."""
        calls = list(self.calls.values())
        self.begin_again(calls, gradients)
        found = [gradient for call in calls for gradient in Call.backward(call, gradients, keep=keep)]
        scale = next((one for one in gradients if one is not None), None)
        if scale is not None and bool((scale != 1).any()):
            overflow = torch.zeros((), device=self.step.place.device)
            for gradient in found:
                if gradient is not None:
                    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                    overflow = overflow.maximum((~local.isfinite().all()).to(overflow))
            dist.all_reduce(overflow, dist.ReduceOp.MAX, group=self.running.groups.across)
            if overflow.item():
                for gradient in found:
                    if gradient is not None:
                        gradient.fill_(float("inf"))
        return found


class PipelineModule(ShardedModule):
    """A compiled pipeline on this rank. Parameters of other stages are absent: ``None`` in their modules.

    ``torch.nn.utils.clip_grad_norm_`` clips by the norm over all stages; a tied weight counts once.
    """

    running: Running

    def __init__(self, tree: nn.Module, programs: Programs, plan: PipelinePlan, empty: set[str], running: Running) -> None:
        self.__dict__["running"] = running
        super().__init__(tree, programs, plan, empty)
        join_total_norms(self, weakref.WeakMethod(self.join_norms))

    @property
    def team(self) -> Team:
        return self.running.ranks.team

    def _trains(self, trained: Sequence[Tensor]) -> bool:
        """Ranks wait for one another's backward, so those with frozen parameters alone train too, unless no stage has a gradient."""
        return any(graph.gradients for graph in self.running.stages.graphs)

    def _draws(self, step: Step) -> bool:
        return self._pipelines.running_of(step).draws

    def _make_call(self, step: Step, tensors: Mapping[str, Tensor], *, differentiates: bool) -> tuple[Call, list[Tensor]]:
        running = self._pipelines.running_of(step)
        entered = {stage: self._enter_call(one, tensors, differentiates=differentiates) for stage, one in running.steps.items()}
        taken, wanted = set[int](), list[Tensor]()
        for given in entered.values():  # a weight that several stages read has its gradient with the first
            given.trained[:] = [(name, tensor) for name, tensor in given.trained if id(tensor) not in taken]
            taken.update(id(tensor) for _, tensor in given.trained)
            wanted += [tensor for _, tensor in given.trained]
        number = self._draw(step, differentiates and self._trains(wanted))
        vanishes = starts_scaled(running.stages) and any(map(is_narrow, running.stages.graphs))
        calls = {
            stage: StageCall(
                *given.arguments, number, self._observed, cut=given.step.enter_cut(given.cut), scale=self._scale, vanishes=vanishes
            )
            for stage, given in entered.items()
        }  # fmt: skip
        return PipelineCall(calls, running), wanted

    @property
    def _pipelines(self) -> PipelinePrograms:
        assert isinstance(self._programs, PipelinePrograms)
        return self._programs

    def given_to(self, step: Step, tensors: Mapping[str, Tensor]) -> Iterator[tuple[GraphInput, Tensor]]:
        """Every input of the call, so that all stages compare the same."""
        return ((item, tensors[item.name]) for item in self._pipelines.running_of(step).whole.of_kind("input"))

    def copied(self, tree: nn.Module) -> PipelineModule:
        """The stage with other weights: it runs in the same pipeline, in turn with this one."""
        return PipelineModule(tree, self._pipelines, self.plan, set(self._empty), self.running)

    @staticmethod
    def _whole_batch() -> UsageError:
        hint = "pass the whole batch on every rank; each reads what its stage reads"
        return UsageError("a pipeline's stages read the inputs in layouts of their own, so ranks load no parts of them so far", hint)

    def local_batch(self, source: Any, **options: Any) -> Any:
        """Raises UsageError: ranks are given the whole batch."""
        raise self._whole_batch()

    def place_batch(self, tree: Any, size: int) -> Any:
        """Raises UsageError: ranks are given the whole batch."""
        raise self._whole_batch()

    @property
    def replica(self) -> dict[str, int]:
        """Raises UsageError: ranks are given the whole batch."""
        raise self._whole_batch()

    def save_pretrained(self, *_: Any, **__: Any) -> None:
        """Raises UsageError: no rank can gather what other stages hold."""
        hint = "save with torch.distributed.checkpoint, which goes by name, and load that into the plain model"
        raise UsageError("a rank of a pipeline has the weights of its stages alone", hint)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Takes a state dict of this rank, or of the whole model: names of other stages are passed over."""
        own = set(self.tree.state_dict())
        others = {name for name in self.plan.model_names() if name not in own}
        return super().load_state_dict({name: value for name, value in state_dict.items() if name not in others}, *args, **kwargs)

    def join_norms(self, tensors: Sequence[Tensor], norm_of: Callable[[Sequence[Tensor]], Tensor], norm_type: float) -> Tensor | None:
        """The norm of all stages' gradients; None where the tensors are none of this module's gradients. Collective over the stages.

        No tensors are all gradients of a rank whose parameters are frozen.

        Args:
            norm_of: the norm of this rank's.
        """
        held = {id(parameter.grad): name for name, parameter in self.named_parameters() if parameter.grad is not None}
        if held.keys().isdisjoint(map(id, tensors)) and (held or tensors):
            return None
        stages, position = self.running.stages, self.running.ranks.position
        inputs = [item for step in self.running.steps.values() for item in step.graph.inputs if item.tensor in stages.tied]
        later = {item.name for item in inputs if stages.position(stages.tied[item.tensor][0]) != position}
        counted = [tensor for tensor in tensors if held.get(id(tensor)) not in later]
        dtype = next((parameter.dtype for parameter in self.parameters()), torch.float32)
        own = norm_of(counted) if counted else torch.zeros((), dtype=dtype, device=self.place.device)
        local = own.full_tensor() if hasattr(own, "full_tensor") else own
        local = local.detach().to(torch.float64)
        if norm_type == float("inf"):
            dist.all_reduce(local, dist.ReduceOp.MAX, group=self.running.groups.across)
            return local.to(own.dtype)
        total = local**norm_type
        dist.all_reduce(total, group=self.running.groups.across)
        return (total ** (1.0 / norm_type)).to(own.dtype)

    def extra_repr(self) -> str:
        return f"stage={' and '.join(map(str, self.running.steps))} of {len(self.running.stages.graphs)}, {super().extra_repr()}"


def compile_pipeline(
    model: nn.Module, plan: PipelinePlan, *, loss: Callable[..., Any] | None = None, device: str | torch.device | None = None,
    init: Initialise | None = None, seed: int = 0, dropout: bool = True,
) -> PipelineModule:  # fmt: skip
    """The model as a pipeline's plan cuts and splits it, on this rank. Every rank calls it.

    Args:
        model: the whole model that was planned; loaded weights are kept. Weights on meta are drawn as without a pipeline.
        loss: the loss it was planned with.
        device, init, seed: as for ``compile_plan``.
        dropout: see ``compile_schedule``.

    Raises:
        MismatchError: the plan was made for another model, mesh or torch.
    """
    check_seed(seed)
    check_torch(plan)
    mesh = whole_mesh(plan)
    join_launched()
    start_process_group(mesh)
    where, team = find_device(device, model), team_of(None)
    loss = loss or plan.loss
    if len(set(everyones(hashlib.sha256(plan.to_json().encode()).hexdigest(), team))) > 1:
        raise MismatchError("ranks hold different plans", "give every rank the same plan file")

    captured, replayed = together(lambda: capture_pipeline(model, plan, loss), team)
    ranks, groups, place = place_ranks(replayed, mesh, where)

    def bind_stage(captured: Capture, schedule: Schedule, *, split: bool = False) -> Step:
        constants, call = own_constants(schedule, captured.constants, place), CallTree(captured.graph.arguments, forward_of(model), loss)
        made = bind_step(schedule, constants, call, place, "global", dropout, "eager", split=split)
        return replace(made, read=captured.read)

    split = stages_split(replayed.order)
    steps = {stage: bind_stage(captured, replayed.schedules[stage], split=stage in split) for stage in replayed.stages.at(ranks.position)}
    running = run_stages(replayed, steps, ranks, groups)
    mine = [replayed.schedules[stage] for stage in steps]
    tree, still, absent = _place_weights(model, mine, plan.model_names(), place, team, init, seed)
    programs = PipelinePrograms(
        running.main, tuple(part.training for part in tree.modules()), loss, optimizer=plan.model.optimizer,
        memory_limit=_left_for_programs(plan, tuple(steps)), plan=plan, running=running, absent=absent, bind_stage=bind_stage,
    )  # fmt: skip
    module = PipelineModule(tree, programs, plan, still, running)
    programs.settings = Settings(module.parts, held_by(loss, model))
    return module


def whole_mesh(plan: PipelinePlan) -> Mesh:
    """The mesh of all ranks, with an axis for those of a stage."""
    return Mesh(tuple(plan.mesh.items()) if len(plan.mesh) > 1 else (*plan.mesh.items(), ("dp", 1)))


def place_ranks(replayed: ReplayedPipeline, mesh: Mesh, device: torch.device) -> tuple[Ranks, Groups, Place]:
    """The processes of a pipeline, this one's groups beyond its position, and its place among the ranks of a stage. Collective.

    Args:
        mesh: see ``whole_mesh``.
    """
    ranks = Ranks(team_of(None), mesh.sizes[0])
    groups = create_groups(replayed.stages, ranks)
    part = share_device_mesh(mesh, device)[mesh.names[1:]]
    flatten_axes(part)
    return ranks, groups, Place(stage_mesh(mesh), part, team_of(part), device)


def run_stages(replayed: ReplayedPipeline, steps: Mapping[int, Step], ranks: Ranks, groups: Groups) -> Running:
    """What runs the planned step on this rank, of its stages' programs."""
    mine, device = {stage: replayed.schedules[stage] for stage in steps}, next(iter(steps.values())).place.device
    mail = ProcessMail(replayed.stages, mine, replayed.order, ranks, groups.pairs, device)
    return Running(replayed.graph, replayed.stages, steps, replayed.order, ranks, mail, groups)


def _left_for_programs(plan: PipelinePlan, mine: Sequence[int]) -> int:
    """Bytes of a rank for a stage's program beside the planned ones: what microbatches in flight and the rank's other stages leave."""
    rows = [plan.stages[stage] for stage in mine]
    held = sum(max(row.in_flight - 1, 0) * row.held_bytes_per_rank for row in rows)
    rests = [row.rest_bytes_per_rank or 0 for row in rows]
    return max(plan.memory_limit_bytes_per_rank - held - (sum(rests) - min(rests)), 0)


def capture_pipeline(model: nn.Module, plan: PipelinePlan, loss: Callable[..., Any] | None) -> tuple[Capture, ReplayedPipeline]:
    """The model's graph of one microbatch, and the plan's stages of it.

    Raises:
        MismatchError: a loss is lacking, or the plan is not for this model.
    """
    args, kwargs, loss_args = example_of(plan.model.arguments, plan.inputs)
    if loss is None and loss_args:
        message = f"the plan was made with a loss that takes {len(loss_args)} arguments, none is given"
        raise MismatchError(message, "pass the loss that the model was planned with: compile_pipeline(model, plan, loss=...)")
    rows = [row for stage in plan.stages for row in stage.plan.parameters.items()]
    plain = {name: frozenset(range(len(row.shape))) for name, row in rows if row.blocks is None}
    captured = capture(
        model, args, kwargs, mode="train", loss=loss, loss_args=loss_args,
        compute_dtype=plan.model.arguments.get("compute_dtype"), plain=plain,
    )  # fmt: skip
    return captured, replay_pipeline(plan, captured.graph)


def _place_weights(
    model: nn.Module, schedules: Sequence[Schedule], read: Set[str], place: Place, team: Team, init: Initialise | None, seed: int
) -> tuple[nn.Module, set[str], Absent]:  # fmt: skip
    """The model's tree with the weights of these stages, the names of those without values; the parameters of others, None in it.

    Args:
        read: the names of all weights that some stage reads. Every rank has the others whole.
    """
    specs = own_specs(schedules)
    named = {name: tensor for name, _, _, tensor in own_tensors(model)}
    mine = {id(named[name]) for name in specs}
    others = {id(tensor) for name, tensor in named.items() if isinstance(tensor, nn.Parameter) and name in read} - mine
    sharded, empty = shard_weights(model, specs, place, team, others)
    initialise(model, sharded, empty, init, seed, place)
    still = {name for name, tensor in named.items() if id(tensor) in empty and id(tensor) not in others}
    away = {id(tensor): nn.Parameter(torch.empty_like(tensor, device="meta"), tensor.requires_grad)
            for tensor in named.values() if id(tensor) in others}  # fmt: skip
    tree, absent = copy_tree(model, {**sharded, **away}), dict[tuple[str, str], nn.Parameter]()
    placeholders = {id(tensor): tensor for tensor in away.values()}
    for path, part in tree.named_modules():
        for name, tensor in part._parameters.items():
            if id(tensor) in placeholders:
                absent[path, name] = placeholders[id(tensor)]
                part._parameters[name] = None
    return tree, still, absent
