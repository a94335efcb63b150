"""The module that trains: the model's own parameter names with DTensors, and a forward that runs the planned schedule."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import UsageError
from autopar.graph import GraphInput
from autopar.runtime.execution.loss_gradient import LossScale
from autopar.runtime.module.data import LocalBatches, LocalIndices, rows_of
from autopar.runtime.module.held_weights import HeldWeights
from autopar.runtime.module.states import IN_PLACE_OF, OwnStates
from autopar.runtime.optimizers.host_optimizer import mark_hosted
from autopar.runtime.programs.forward_attributes import leave, put_back
from autopar.runtime.programs.padding import HandOut, Padding
from autopar.runtime.programs.parts import calls_super, keep_within, told_of_weights
from autopar.runtime.programs.programs import Key, Programs, called_otherwise, input_of
from autopar.runtime.programs.rows import block_of
from autopar.runtime.ranks.agreement import everyones, hash_of
from autopar.runtime.ranks.collectives import Observed
from autopar.runtime.ranks.groups import Team
from autopar.runtime.steps.accumulation import AccumulatedCall
from autopar.runtime.steps.step import Step
from autopar.runtime.steps.training_step import Call, TrainingStep
from autopar.runtime.weights.sharding import Place, copy_tree, own_names, own_tensors
from autopar.schedule import Schedule
from autopar.sharding import ShardingSpec
from autopar.torch_compat import CALL_HOOKS, NOBODYS, WithinReplicas, apply_alone, computes_again, transforms_run

OTHER_CALLS = 0x9E3779B9
"""How far calls without gradients are apart in what they draw, beyond any number of training steps; odd, since CPUs' generators take the
last 32 bits alone."""
SEEDS = 0xC2B2AE3D
"""Distance between the draws of two seeds, chosen in the same way."""


_MISSING = object()


class LaterSeedWarning(UserWarning):
    """A seed came too late for what a compiled module draws."""


class EmptyBufferWarning(UserWarning):
    """Buffers of a model on meta have no values after a state dict was loaded, and none has them."""


class EnteredCall(NamedTuple):
    """What a program takes of a call: see ``Call``; and the inputs that are cut into microbatches, by tensor name."""

    step: Step
    locals: dict[str, torch.Tensor]
    owners: dict[str, torch.Tensor]
    trained: list[tuple[str, torch.Tensor]]
    global_inputs: set[str]
    local_inputs: set[str]
    cut: dict[str, tuple[GraphInput, torch.Tensor]]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The first of those of ``Call``."""
        return self.step, self.locals, self.owners, [name for name, _ in self.trained], self.global_inputs, self.local_inputs


class ShardedModule(WithinReplicas, OwnStates):
    """A compiled model. Parameters and buffers are DTensors under the model's own names; calls run the planned schedule.

    A call that the plan was not made for (after ``eval()``, with a shorter last batch) runs a program of its own on the same weights,
    planned and kept when it is first needed (see ``programs``). ``deepcopy`` copies weights, hooks and attributes, and shares the programs.

    Attributes:
        plan: the plan it runs, None when compiled from a bare schedule.
        dropout_seed: chooses dropout's masks and all else that is drawn; None until the first call, which makes it what the first rank gave
            ``torch.manual_seed``, or was started with.
        dropout_step: number of the next training step, which chooses them too. Set both, alike on all ranks, when resuming.
        other_calls: how many calls without gradients that draw there were since the last step: the first draws what the next step will, as
            a forward within a reentrant ``torch.utils.checkpoint`` has to, each further one something else.
    """

    dropout_seed: int | None
    dropout_step: int
    other_calls: int
    _weights: HeldWeights
    _calls: int
    _compared: set[str]
    _drawn: int | None
    _left: tuple[str, ...]
    _scale: LossScale
    _seeded: int

    def __init__(self, tree: nn.Module, programs: Programs, plan: Any, empty: Iterable[str] = ()) -> None:
        super().__init__()
        for kind in ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"):
            self.__dict__[kind] = tree.__dict__[kind]
        self.__dict__.update(plan=plan, dropout_seed=None, dropout_step=0, other_calls=0, tree=tree, parts=tuple(tree.modules()))
        held = dict(own_names(tree))
        hosted = programs.main.executable.schedule.states_on_host
        mark_hosted(held[item.name] for item in programs.main.graph.inputs if item.tensor in hosted)
        self._programs, self._empty = programs, {name: _made(held[name]) for name in empty}
        for path, part in self.named_modules():
            if path:
                keep_within(path, part)
        self._observed: list[Observed] | None = None
        self.__dict__.update(_weights=HeldWeights(self), _calls=0, _compared=set(), _drawn=None, _left=(), _scale=LossScale())
        self.training = tree.training
        self.adopt_states(programs)

    def train(self, mode: bool = True) -> Self:
        """The model's own, which may keep parts as they are. Raises UsageError: the plan is for inference alone."""
        if mode and self.step.graph.mode == "inference":
            raise UsageError("the plan is for inference: it has no backward and no training mode", "plan the model with mode='train'")
        self.tree.train(mode)
        self.training = self.tree.training
        return self

    def eval(self) -> Self:
        """The model's own."""
        self.tree.eval()
        self.training = self.tree.training
        return self

    def parameters(self, *args: Any, **kwargs: Any) -> Iterator[nn.Parameter]:
        """The model's own, which may leave out what is not to be trained."""
        return self.tree.parameters(*args, **kwargs)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """The model's own, which may leave parts as they are."""
        self.tree.requires_grad_(requires_grad)
        return self

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """The model's own."""
        self.tree.zero_grad(*args, **kwargs)

    def __getitem__(self, place: Any) -> Any:
        """The model's own part, where it has parts by place or name: a ``Sequential``."""
        return self.tree[place]

    def __len__(self) -> int:
        """The model's own."""
        return len(self.tree)

    def __iter__(self) -> Iterator[Any]:
        """The model's own."""
        return iter(self.tree)

    def __contains__(self, item: Any) -> bool:
        """The model's own."""
        return item in self.tree

    def __bool__(self) -> bool:
        """The model's own: true where it has no length."""
        return bool(self.tree)

    @torch.compiler.disable(reason="the planned program is one already: autopar.compile(..., execute='compiled')")
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's arguments, then the loss's; the model's (or the loss's) result.

        Raises:
            UsageError: arguments that differ from the planned ones; weights that have no values yet.
        """
        padding = self._programs.padding
        return self.run(args, kwargs) if padding is None else padding.call(self, args, kwargs)

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], hand_out: HandOut | None = None) -> Any:
        """``forward`` of a call as it comes, or as it was padded; ``hand_out`` says what becomes of each output, by name."""
        self._check_values()
        self._check_context()
        put_back(self.tree, self._left)
        self.tree.__dict__["training"] = self.training
        step, tensors = self._programs.find(self.parts, args, kwargs)
        if not self._calls:
            self._agree_on_seed()
        self.__dict__["_calls"] += 1
        program = self._programs.name_of(step)  # equal on all ranks: they wait for one another in a comparison
        if program not in self._compared or self._calls.bit_count() == 1:
            self._compared.add(program)
            self._compare_inputs(step, tensors)
        differentiates = step.graph.mode == "train" and torch.is_grad_enabled()
        call, trained = self._make_call(step, tensors, differentiates=differentiates)
        trains = differentiates and self._trains(trained)
        outputs = apply_alone(TrainingStep)(call, NOBODYS, *trained) if trains else call.forward(keep=False)
        others = 0 if trains else self.other_calls + self._draws(step)
        self.__dict__.update(dropout_step=self.dropout_step + trains, other_calls=others, _left=step.left)
        leave(self.tree, step.left)
        if hand_out is None and len(outputs) == 1 and step.call.gives_one_tensor:
            return outputs[0]
        if hand_out is not None:
            outputs = tuple(hand_out(output.name, tensor) for (output, _), tensor in zip(call.leaving, outputs, strict=True))
        by_name = {output.tensor: tensor for (output, _), tensor in zip(call.leaving, outputs, strict=True)}
        by_name.update(zip(call.names, outputs, strict=True))  # an output may be named as the tensor of another one
        return step.call.result(by_name)

    def _trains(self, trained: Sequence[torch.Tensor]) -> bool:
        """Whether a call in grad mode is a training step; ``trained`` are the tensors whose gradients autograd wants."""
        return bool(trained)

    def _make_call(self, step: Step, tensors: Mapping[str, torch.Tensor], *, differentiates: bool) -> tuple[Call, list[torch.Tensor]]:
        """The call of a program, and the tensors whose gradients autograd wants of it, in the call's order.

        Args:
            tensors: of the call, by input name.

        Raises:
            UsageError: an input requires grad that the plan gives none.
        """
        given = self._enter_call(step, tensors, differentiates=differentiates)
        made = *given.arguments, self._draw(step, differentiates and self._trains(given.trained)), self._observed
        is_whole = not given.cut and step.graph.microbatches == 1
        call = Call(*made) if is_whole else AccumulatedCall(*made, cut=step.enter_cut(given.cut), scale=self._scale)
        return call, [tensor for _, tensor in given.trained]

    def _enter_call(self, step: Step, tensors: Mapping[str, torch.Tensor], *, differentiates: bool) -> EnteredCall:
        """This rank's parts of what a program takes; others as of ``_make_call``."""
        entered = self._weights.enter(step, differentiates=differentiates)
        locals_, owners, trained = entered.locals, entered.owners, entered.trained
        global_inputs: set[str] = set()
        local_inputs: set[str] = set()
        cut: dict[str, tuple[GraphInput, torch.Tensor]] = {}
        grad_mode = torch.is_grad_enabled()
        for item in step.given:
            tensor = input_of(tensors, item)
            asked = grad_mode and tensor.requires_grad
            if asked and item.tensor not in step.gradients:
                hint = "plan the model with an input that requires grad, without microbatches, or detach it"
                raise UsageError(f"input {item.name} requires grad, the plan gives it no gradient", hint)
            owners[item.tensor] = tensor
            if item.tensor in step.graph.accumulation.cut:
                cut[item.tensor] = item, tensor
                continue
            locals_[item.tensor] = step.enter(item, tensor)
            if asked:
                trained.append((item.tensor, tensor))
                if not isinstance(tensor, DTensor):
                    (global_inputs if step.inputs == "global" else local_inputs).add(item.tensor)
        locals_.update(step.constants)
        return EnteredCall(step, locals_, owners, trained, global_inputs, local_inputs, cut)

    def pad_calls(self, padding: Padding) -> None:
        """From now on calls, of copies too, are padded so."""
        self._programs.padding = padding

    def named_inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The tensors of a call by input name. Raises UsageError: a call that no program can be made for."""
        self.tree.__dict__["training"] = self.training
        return self._programs.named_inputs(self.parts[0], args, kwargs)[1]

    def program_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Step:
        """The program of a call; see ``Programs.find``."""
        return self._programs.find(self.parts, args, kwargs)[0]

    @property
    def team(self) -> Team:
        """The processes that call the module together."""
        return self.place.team

    def _agree_on_seed(self) -> None:
        """Takes the first rank's seed, unless one was set. Collective."""
        seed = torch.initial_seed()
        own = seed if self.dropout_seed is None else self.dropout_seed
        self.__dict__.update(_seeded=seed, dropout_seed=self._everyones(own)[0])

    def _everyones(self, value: Any) -> list[Any]:
        """The value that each rank gives in a call of a program that is there already, by rank. Collective.

        Raises:
            MismatchError: the call is a new one on another rank, which compares what it is with the others.
        """
        found = everyones(value, self.team)
        for rank, theirs in enumerate(found):
            if isinstance(theirs, Key):
                raise called_otherwise(rank, theirs, f"on rank {rank}")
        return found

    def _compare_inputs(self, step: Step, tensors: Mapping[str, torch.Tensor]) -> None:
        """Compares hashes of the plain inputs with those of the other ranks that pass the same part of them. Collective.

        A loader that gives each rank rows of its own differs in the first call, or in the first after an evaluation on equal rows. So the
        first call of each program is compared, and calls 2, 4, 8 and so on: hashing costs nothing to speak of then.

        Raises:
            UsageError: another rank was given something else.
            MismatchError: see ``_everyones``.
        """
        team = self.team
        if len(team.members) == 1:
            return
        given = ((item, tensor) for item, tensor in self.given_to(step, tensors) if not isinstance(tensor, DTensor))
        own = {item.name: (block_of(step, item, team.rank), hash_of(tensor)) for item, tensor in given}
        for rank, theirs in enumerate(self._everyones(own)):
            same = {name: found for name, found in own.items() if name not in theirs or theirs[name][0] == found[0]}
            if theirs.keys() == own.keys() and all(theirs[name] == found for name, found in same.items()):
                continue
            what = next((name for name, found in same.items() if theirs.get(name) != found), "call")
            where = f"rank {rank} is given another {what} than this rank in call {self._calls}"
            if step.inputs == "global":
                hint = "give all ranks the whole batch, or each its own rows: by module.local_batch, or plan with inputs='local'"
                raise UsageError(f"{where}; plain tensors are whole, the same on all ranks", hint)
            hint = "load rows by replica, not by rank: DistributedSampler(dataset, **module.replica)"
            raise UsageError(f"{where}; both hold the same part of it as planned", hint)

    def given_to(self, step: Step, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[GraphInput, torch.Tensor]]:
        """The inputs of a call with their tensors."""
        return ((item, input_of(tensors, item)) for item in step.given)

    def _check_values(self) -> None:
        """Raises UsageError: weights that nobody has given values, or written to, since they were made without any."""
        if empty := self._find_empty():
            some = ", ".join(sorted(empty)[:3])
            hint = _filling(self._not_persistent(empty)) or "pass init= to compile, or load a state dict"
            raise UsageError(f"{len(empty)} parameters or buffers were on meta and have no values yet: {some}", hint)

    def check_loaded(self) -> None:
        """Warns of buffers that have no values still and are in no state dict."""
        if left := self._not_persistent(self._find_empty()):
            message = f"what was loaded holds no values of {', '.join(left[:3])}: {len(left)} buffers that are not persistent"
            warnings.warn(f"{message}\nhint: {_filling(left)}", EmptyBufferWarning, stacklevel=3)

    def _find_empty(self) -> Mapping[str, Any]:
        """The parameters and buffers without values, by name."""
        if self._empty:
            held = self._weights.find_all(self._empty)
            self._empty = {name: made for name, made in self._empty.items() if made == _made(held[name]) or _no_number(held[name])}
        return self._empty

    def _not_persistent(self, names: Iterable[str]) -> list[str]:
        """Those of the names that no state dict has."""
        parts = ((name, *name.rpartition(".")[::2]) for name in names)
        return sorted(name for name, path, last in parts if last in self.get_submodule(path)._non_persistent_buffers_set)

    def _check_context(self) -> None:
        """Raises UsageError: autocast around the call asks for another dtype than the plan computes in, or a transform for more than one
        forward and one backward."""
        if transforms_run():
            hint = "transform the plain model, or call the compiled one outside of the transform"
            raise UsageError("the module is called within torch.func or forward-mode differentiation: the planned program is fixed", hint)
        step = self.step
        device = step.place.device_type
        if torch.is_autocast_enabled(device):
            asked, planned = str(torch.get_autocast_dtype(device)).removeprefix("torch."), step.graph.arguments.get("compute_dtype") or ""
            if asked != planned.removeprefix("autocast-"):
                message = f"the module is called under autocast to {asked}, the plan computes in {planned or 'its own dtypes'}"
                raise UsageError(message, f"plan it with compute_dtype='autocast-{asked}', or call it outside autocast")

    def __getattr__(self, name: str) -> Any:
        """Attributes and methods of the model's own class, where this one has none: ``config``, ``init_weights``."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            tree = self.__dict__.get("tree")
            if tree is None or name.startswith("__"):
                raise
        if name in tree.__dict__:
            return tree.__dict__[name]
        own = inspect.getattr_static(type(tree), name, _MISSING)
        if own is _MISSING:
            raise AttributeError(f"{type(tree).__name__!r} compiled by autopar has no attribute {name!r}")
        own = IN_PLACE_OF.get(name) or (told_of_weights(own) if isinstance(own, FunctionType) else own)
        holder = tree if calls_super(own) else self
        return own.__get__(holder, type(tree)) if hasattr(own, "__get__") else own

    def __setattr__(self, name: str, value: Any) -> None:
        """Attributes of the model's own are set there, where the next call looks for them."""
        tree = self.__dict__.get("tree")
        own = name in self.__dict__ or hasattr(type(self), name)
        if tree is not None and not own and (name in tree.__dict__ or hasattr(type(tree), name)):
            setattr(tree, name, value)
        else:
            super().__setattr__(name, value)

    def _draws(self, step: Step) -> bool:
        """Whether a program draws anything at random, on whichever rank."""
        return step.draws

    def _draw(self, step: Step, trains: bool) -> int:
        """What chooses the masks of this call: equal on all ranks of the mesh, another on each replica of it.

        Raises:
            UsageError: a forward is computed again, and would draw something else than it did.
        """
        draws = self._draws(step)
        if draws and torch.initial_seed() != self._seeded:
            self.__dict__["_seeded"] = torch.initial_seed()
            text = (
                "torch.manual_seed was called after the first call of a compiled module, which draws on of the seed agreed on there,"
                f" {self.dropout_seed}; set module.dropout_seed, and module.dropout_step, on all ranks alike for another"
            )
            warnings.warn(text, LaterSeedWarning, stacklevel=8)
        number = SEEDS * (self.dropout_seed or 0) + self.dropout_step + (0 if trains else OTHER_CALLS * self.other_calls)
        if draws and trains and number != self._drawn and computes_again():
            message = "the module is computed again within backward, as by torch.utils.checkpoint: it would draw other random numbers"
            raise UsageError(message, "leave the checkpoint out: a plan recomputes by itself where memory is short")
        if draws:
            self.__dict__["_drawn"] = number
        members, world = self.team.members, self.team.world
        return number if len(members) == world else number * world + min(members)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedModule:
        whole = {id(tensor): tensor for _, _, _, tensor in own_tensors(self.tree)}
        copies = {key: _copied(tensor, memo) for key, tensor in whole.items()}
        made = self.copied(copy_tree(self.tree, copies))
        for name in ("dropout_seed", "dropout_step", "other_calls", "training", "_left"):
            setattr(made, name, getattr(self, name))
        memo[id(self)] = made
        memo.update(zip(map(id, self.parts), made.parts, strict=True))
        state: Any = self.__getstate__()  # without a compiled call
        own = {name for name in state if name in CALL_HOOKS or name not in made.__dict__}
        made.__dict__.update({name: copy.deepcopy(self.__dict__[name], memo) for name in own})
        return made

    def copied(self, tree: nn.Module) -> ShardedModule:
        """The module with other weights, and the same programs."""
        return ShardedModule(tree, self._programs, self.plan, self._empty)

    def left_alone(self) -> list[str]:
        """The buffers, which DistributedDataParallel cannot send; the parameters it has made plain by then.

        Raises:
            UsageError: it has not, since it was not told of a mesh or a parameter has two names.
        """
        left = [name for name, parameter in self.named_parameters(remove_duplicate=False) if isinstance(parameter, DTensor)]
        if not left:
            return [name for name, _ in self.named_buffers(remove_duplicate=False)]
        if len(left) < len(list(self.named_parameters(remove_duplicate=False))):
            hint = "fully_shard(module, mesh=...) goes around tied weights too"
            raise UsageError(f"DistributedDataParallel does not know that {left[0]} is tied to another parameter", hint)
        message = f"DistributedDataParallel without device_mesh cannot send DTensors, of a module that is compiled for {self.place.mesh}"
        hint = "DistributedDataParallel(autopar.compile(model, plan, mesh=mesh['tp']), device_mesh=mesh['dp']) goes around a replica's plan"
        raise UsageError(message, f"train the compiled module as it is: gradients are those of the whole batch; {hint}")

    def no_sync(self) -> Any:
        """Raises UsageError: there is nothing to leave out."""
        hint = "call backward several times before the optimizer's step: gradients add up"
        raise UsageError("gradients are reduced within the planned backward; none of it can be put off", hint)

    def local_batch(
        self, source: Any, *, batch_size: int | None = None, shuffle: bool = False, seed: int = 0, drop_last: bool = False, **options: Any
    ) -> LocalBatches | LocalIndices:  # fmt: skip
        """What this rank must load, by the plan's specs, and no more.

        Args:
            source: a dataset: its batches, as DTensors that the module takes as they are; or a batch sampler: its batches with the
                indices of this rank's rows alone, for a DataLoader of one's own (with ``place_batch``).
            batch_size, shuffle, seed, drop_last, options: for a dataset; see ``data.LocalBatches``.
        """
        rows = rows_of(self.step)
        if hasattr(source, "__getitem__") and hasattr(source, "__len__") and not isinstance(source, list | tuple):
            return LocalBatches(source, rows, batch_size, shuffle, seed, drop_last, options)
        return LocalIndices(source, rows)

    def place_batch(self, tree: Any, size: int) -> Any:
        """The rows that this rank loaded of a batch of ``size``, in any nesting of tensors, as DTensors that the module takes."""
        return rows_of(self.step).placed(tree, size)

    @property
    def replica(self) -> dict[str, int]:
        """How the rows of a batch are dealt out: ``num_replicas``, the number of parts, and ``rank``, the number of this rank's. With
        ``inputs="local"``, ``DistributedSampler(dataset, **module.replica)`` gives this rank its rows."""
        rows, place = rows_of(self.step), self.place
        part = rows.of(rows.size)
        return {"num_replicas": ShardingSpec((rows.axes,)).parts(0, place.mesh.sizes), "rank": part.start // max(part.stop - part.start, 1)}

    @property
    def constants(self) -> Mapping[str, torch.Tensor]:
        """This rank's parts of the tensors baked into the model, by the graph's names."""
        return self.step.constants

    @property
    def step(self) -> Step:
        """What runs a call as planned."""
        return self._programs.main

    @property
    def schedule(self) -> Schedule:
        """The instructions that such a call runs."""
        return self.step.executable.schedule

    @property
    def place(self) -> Place:
        """The mesh, this rank and its device."""
        return self.step.place

    @contextmanager
    def observed_collectives(self) -> Iterator[list[Observed]]:
        """Records every collective that this rank executes within, forward and backward."""
        self._observed = []
        try:
            yield self._observed
        finally:
            self._observed = None

    def extra_repr(self) -> str:
        schedule = self.schedule
        return f"mesh={schedule.machine.mesh}, mode={self.step.graph.mode}, collectives={len(schedule.calls)}"


def _copied(tensor: torch.Tensor, memo: dict[int, Any]) -> Any:
    """A copy without the gradient, which a plain parameter's copy has not either; torch cannot copy one that lies in a bucket."""
    gradient, tensor.grad = tensor.grad, None
    try:
        return copy.deepcopy(tensor, memo)
    finally:
        tensor.grad = gradient


def _filling(buffers: Sequence[str]) -> str:
    """The way to give values to buffers that are not persistent; nothing for none."""
    given = ", ".join(f"{name!r}: ..." for name in buffers[:3])
    return f"give them by name, whole: module.load_state_dict({{{given}}}, strict=False)" if buffers else ""


def _made(tensor: torch.Tensor) -> tuple[int, int]:
    """A tensor and its version: another after it was replaced or written to."""
    return id(tensor), tensor._version


def _no_number(tensor: torch.Tensor) -> bool:
    """Whether this rank's part is as it was made: another wrapper may have taken the part over as it was."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.is_floating_point() and local.itemsize > 1 and local.numel() > 0 and bool(local.isnan().all())
