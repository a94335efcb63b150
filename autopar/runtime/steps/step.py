"""A program's step on this rank: how tensors of a call enter it and leave it, the same for every call."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from autopar.dialect.library import STILL
from autopar.errors import MismatchError, UsageError
from autopar.graph import Graph, GraphInput, GraphOutput
from autopar.rows import Inputs, Outputs
from autopar.runtime.execution.emission import Graphs
from autopar.runtime.execution.executable import Executable
from autopar.runtime.execution.loss_gradient import is_narrow
from autopar.runtime.instructions.fusion import makes_memory
from autopar.runtime.ranks.placement import local_part, to_placements
from autopar.runtime.steps.calls import CallTree
from autopar.runtime.weights.sharding import Place
from autopar.sharding import Blocks, ShardingSpec
from autopar.torch_compat import split_factor_of


@dataclass(frozen=True)
class Step:
    """What one call needs, the same for every call.

    Args:
        executable: the schedule on this rank: as straight-line code, or as graphs.
        place: mesh, rank and device.
        inputs: ``global``: plain tensors are whole and equal on all ranks; ``local``: they are this rank's part.
        call: how the tensors of a call and of its result are nested.
        constants: this rank's parts of the tensors baked into the model, by the graph's names.
        left: the attributes in which the model's own forward leaves tensors (see ``runtime.programs.forward_attributes``).
        read: the buffers whose values are constants of the program, by name.
        outputs: ``placed``: what is split leaves as a DTensor; ``full``: whole, as a plain tensor.
    """

    executable: Executable | Graphs
    place: Place
    inputs: Inputs
    call: CallTree
    constants: Mapping[str, torch.Tensor]
    left: tuple[str, ...] = ()
    read: Mapping[str, torch.Tensor] = field(default_factory=dict)
    outputs: Outputs = "placed"

    @property
    def graph(self) -> Graph:
        return self.executable.schedule.graph

    @cached_property
    def gradients(self) -> Mapping[str, str]:
        """The value of the gradient of each graph input that has one."""
        owners = self.graph.owners
        return {owners[output]: value for output, value in self.executable.schedule.outputs if output.kind == "gradient"}

    @cached_property
    def weights(self) -> tuple[tuple[GraphInput, bool], ...]:
        """The parameters and buffers, and whether each has a gradient."""
        return tuple((item, item.tensor in self.gradients) for item in self.graph.inputs if item.kind in ("parameter", "buffer"))

    @cached_property
    def weight_of(self) -> Mapping[str, GraphInput]:
        """The parameters and buffers by name."""
        return {item.name: item for item, _ in self.weights}

    @cached_property
    def given(self) -> tuple[GraphInput, ...]:
        """The inputs of a call."""
        return tuple(item for item in self.graph.of_kind("input") if not item.is_received)

    @cached_property
    def taken_whole(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype, torch.device]]:
        """Shape, dtype and device of the tensors of a call that are taken as they are, by tensor name."""
        planned = {item.tensor: self.graph.tensors[item.tensor] for item in self.given if self.spec(item.tensor).is_replicated}
        return {name: (tensor.shape, getattr(torch, tensor.dtype), self.place.device) for name, tensor in planned.items()}

    @cached_property
    def leaving(self) -> tuple[tuple[GraphOutput, str], ...]:
        """The outputs of a call, and the values that they are."""
        return tuple((output, value) for output, value in self.executable.schedule.outputs if output.kind == "output")

    @cached_property
    def updates(self) -> tuple[tuple[str, str], ...]:
        """The buffers that a call changes, by tensor name, and the values that they become."""
        buffers = {item.name: item.tensor for item in self.graph.of_kind("buffer")}
        return tuple((buffers[output.name], value) for output, value in self.executable.schedule.outputs if output.kind == "buffer")

    @cached_property
    def kept_overwritten(self) -> Sequence[str]:
        """Those of ``overwritten`` that backward reads."""
        return sorted(self.overwritten & {*self.executable.kept})

    @cached_property
    def overwritten(self) -> Set[str]:
        """The values that lie in the memory of buffers which a call changes: they are other ones after it."""
        storage = self.executable.schedule.storage
        changed = {storage[buffer] for buffer, _ in self.updates}
        return {name for name, root in storage.items() if root in changed}

    @cached_property
    def tangents(self) -> Mapping[str, GraphInput]:
        """The gradients that backward takes, by the name of their output."""
        return {item.name: item for item in self.graph.of_kind("tangent")}

    @cached_property
    def fresh(self) -> Set[str]:
        """The gradients, of one input each, that an operator makes in memory of their own, or of what nobody reads after it.

        The gradient of the loss is none of them: it may be the caller's."""
        schedule, count = self.executable.schedule, Counter(self.gradients.values())
        makers = {value: schedule.operations[item.of].op for item in schedule.instructions if item.kind == "run" for value in item.writes}
        made = {value for value, op in makers.items() if op.name != self.graph.loss_gradient and makes_memory(op)}
        return {value for value in count if count[value] == 1 and value in made}

    @cached_property
    def trained_into(self) -> Set[str]:
        """The values that parameters which train, or inputs with gradients, lead to."""
        found = {item.tensor for item in self.graph.inputs if item.trained or item.tensor in self.gradients}
        for op in self.graph.ops:
            if not found.isdisjoint(op.inputs):
                found.update(op.outputs)
        return found

    @cached_property
    def tangents_of(self) -> Mapping[str, Set[str]]:
        """For each graph input that has a gradient the tangents which that comes of."""
        found = {item.tensor: frozenset({item.tensor}) for item in self.graph.of_kind("tangent")}
        for op in self.graph.ops:
            led = frozenset[str]().union(*(found.get(name, ()) for name in op.inputs))
            found.update(dict.fromkeys(op.outputs, led) if led else {})
        return {owner: found.get(output.tensor, frozenset()) for output, owner in self.graph.owners.items() if output.kind == "gradient"}

    @cached_property
    def draws(self) -> bool:
        """Whether anything is drawn at random."""
        return any(op.target in STILL for op in self.graph.ops)

    @cached_property
    def vanishes(self) -> bool:
        """Whether gradients may vanish unless backward begins with the scale of the loss."""
        return self.graph.loss_gradient is not None and is_narrow(self.graph)

    @cached_property
    def apart(self) -> Set[str]:
        """The values that lie side by side in the buffer of a bucket."""
        buckets = [call for call in self.executable.schedule.calls if len(call.parts) > 1 and not call.unpacks]
        return {part.target for call in buckets for part in call.parts}

    @cached_property
    def kept_outputs(self) -> Set[str]:
        """The values that leave and lie in memory which backward reads."""
        schedule = self.executable.schedule
        read = {schedule.storage[name] for name in self.executable.kept}
        return {value for output, value in schedule.outputs if output.kind == "output" and schedule.storage[value] in read}

    @cached_property
    def kept_inputs(self) -> Sequence[str]:
        """The user's tensors whose memory backward reads, without the buffers that a call changes."""
        storage, changed = self.executable.schedule.storage, {buffer for buffer, _ in self.updates}
        owned = {item.tensor for item in (*self.weight_of.values(), *self.given)}
        return sorted({storage[name] for name in self.executable.kept} & owned - changed)

    @cached_property
    def left_as_made(self) -> Set[str]:
        """The values that leave whole, in memory that no later call changes."""
        return {value for _, value in self.leaving if self.spec(value).is_replicated} - self.overwritten

    @cached_property
    def parameters(self) -> Set[str]:
        """Graph inputs whose gradients lie as they do (``check_gradient_specs``)."""
        return {item.tensor for item in self.graph.of_kind("parameter")}

    @cached_property
    def laid_alike(self) -> frozenset[str]:
        """Those of them that have the dims of the module's parameters."""
        return frozenset(self.parameters - self.blocks.keys())

    @cached_property
    def blocks(self) -> Mapping[str, Blocks]:
        """The graph inputs that have two dims for one of the parameter's."""
        return {item.tensor: item.blocks for item in self.graph.inputs if item.blocks is not None}

    def held(self, item: GraphInput, local: torch.Tensor) -> torch.Tensor:
        """This rank's part of a parameter or buffer as the graph has it."""
        if item.blocks is None:
            return local
        return local.view(self.place.own_shape(self.graph.tensors[item.tensor].shape, self.spec(item.tensor)))

    def laid(self, item: GraphInput, computed: DTensor) -> DTensor:
        """What a user has computed in a parameter's place, as planned; its gradient goes back as it came."""
        spec, place = self._own_spec(item), self.place
        wanted = to_placements(spec, place.mesh.sizes)
        if computed.shape != item.own_shape(self.graph.tensors[item.tensor].shape) or computed.placements == wanted:
            return computed
        if not any((split_factor_of(one) or 1) > 1 for one in (*computed.placements, *wanted)):
            return computed.redistribute(placements=wanted)
        whole = computed.full_tensor(grad_placements=[one if isinstance(one, Replicate) else Partial() for one in wanted])
        part = local_part(whole, spec, place.mesh, place.rank)
        return DTensor.from_local(part, place.device_mesh, wanted, run_check=False, shape=whole.shape, stride=whole.stride())

    def _own_spec(self, item: GraphInput) -> ShardingSpec:
        """Of a weight as the module holds it."""
        return item.own_spec(self.spec(item.tensor), self.place.mesh.sizes)

    def check_laid(self, item: GraphInput, tensor: torch.Tensor | None) -> None:
        """Raises UsageError: a parameter or buffer that is not laid as planned: what a user has put in its place."""
        planned, place = self.graph.tensors[item.tensor], self.place
        wanted = to_placements(self._own_spec(item), place.mesh.sizes)
        hint = "write into the one there is (copy_, load_state_dict), or put a DTensor there that lies as it does"
        if not isinstance(tensor, DTensor):
            now = "None" if tensor is None else "a plain tensor"
            raise UsageError(f"{item.kind} {item.name} is now {now}, where the module has a DTensor", hint)
        shape, dtype = item.own_shape(planned.shape), str(tensor.dtype).removeprefix("torch.")
        if (dtype, tuple(tensor.shape)) != (planned.dtype, shape):
            message = f"{item.kind} {item.name} is now {dtype} {list(tensor.shape)}, planned was {planned.dtype} {list(shape)}"
            raise UsageError(message, "plan the model again as it is now; compute_dtype= of plan is mixed precision")
        pairs = zip(tensor.placements, wanted, place.mesh.sizes, strict=False)
        if tensor.device_mesh != place.device_mesh or any(one != other and size > 1 for one, other, size in pairs):
            where = "the plan's mesh" if tensor.device_mesh == place.device_mesh else "another mesh"
            message = f"{item.kind} {item.name} now lies as {list(tensor.placements)} on {where}, the module's lies as {list(wanted)}"
            raise UsageError(message, hint)

    def spec(self, value: str) -> ShardingSpec:
        """The spec of a value of the schedule."""
        return self.executable.schedule.specs[value]

    def check_dtype(self, item: GraphInput, tensor: torch.Tensor) -> None:
        """Raises UsageError: another dtype than planned."""
        planned, dtype = self.graph.tensors[item.tensor], str(tensor.dtype).removeprefix("torch.")
        if dtype != planned.dtype:
            message = f"{item.kind} {item.name} is {dtype} {list(tensor.shape)}, planned was {planned.dtype} {list(planned.shape)}"
            raise UsageError(message, "give it the planned dtype, or plan the model again for this one")

    def enter(self, item: GraphInput, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of an input (or of an output's gradient), on the device.

        Raises:
            UsageError: another shape or dtype than planned.
        """
        is_plain = not isinstance(tensor, DTensor)
        if tensor.is_conj() or tensor.is_neg():
            tensor = _written_out(tensor)
        if is_plain and self.taken_whole.get(item.tensor) == (tensor.shape, tensor.dtype, tensor.device):
            return tensor.detach()
        planned, spec, mesh = self.graph.tensors[item.tensor], self.spec(item.tensor), self.place.mesh
        local = self.inputs == "local" and is_plain
        shape = self.place.own_shape(planned.shape, spec) if local else planned.shape
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tuple(tensor.shape) != tuple(shape) or dtype != planned.dtype:
            whose = "each rank's part of " if local else ""
            message = f"{whose}{item.kind} {item.name} is {dtype} {list(tensor.shape)}, the plan was made for {planned.dtype} {list(shape)}"
            raise UsageError(message, "plan the model again for these shapes")
        if local:
            return tensor.detach().to(self.place.device)
        if not is_plain:
            return self.place.own_part(tensor, spec)
        part = local_part(tensor.detach(), spec, mesh, self.place.rank)
        return part.to(self.place.device) if spec.is_replicated else part.to(self.place.device, copy=True).contiguous()

    def enter_cut(self, items: Mapping[str, tuple[GraphInput, torch.Tensor]]) -> dict[str, Callable[[int], torch.Tensor]]:
        """For each input that is cut, by tensor name, this rank's part of a microbatch by number.

        Where ranks hold rows of their own (DTensors, or parts of inputs), each cuts those it holds, and what has rows of several ranks is
        cut in as many runs: which rows make up a microbatch is then another matter, and the step the same. Unequal parts of microbatches
        are no DTensor's, whose rows are those of the batch.

        Raises:
            UsageError: another shape or dtype than planned; parts of inputs whose rows cannot be cut so.
        """
        sizes, placed = self.place.mesh.sizes, {name for name, (_, tensor) in items.items() if isinstance(tensor, DTensor)}
        split = {name: self.spec(name).dims[0] for name in items if name in placed or self.inputs == "local"}
        parts = {name: math.prod(sizes[axis] for axis in axes) for name, axes in split.items()}
        most = math.lcm(*parts.values())  # what lies in fewer parts has several of these in each
        even = all(self.graph.tensors[name].shape[0] % most == 0 for name in split)
        kept = self.graph.accumulation.whole and (even or (not placed and len(set(split.values())) == 1))
        runs = {name: most // parts.get(name, 1) if kept else 1 for name in items}
        return {name: self._cut(item, tensor, runs[name], kept) for name, (item, tensor) in items.items()}

    def _cut(self, item: GraphInput, tensor: torch.Tensor, runs: int, kept: bool) -> Callable[[int], torch.Tensor]:
        """Args: ``runs``: in so many runs of rows, each cut alike. ``kept``: this rank cuts the rows that it holds."""
        planned, spec, tensor = self.graph.tensors[item.tensor], self.spec(item.tensor), _written_out(tensor)
        placed = isinstance(tensor, DTensor)
        local = self.inputs == "local" and not placed
        shape = self.place.own_shape(planned.shape, spec) if local else planned.shape
        self.check_dtype(item, tensor)
        count, size = self.graph.microbatches, shape[0]
        if tuple(tensor.shape) != (count * size, *shape[1:]):
            whose = "each rank's part of " if local else ""
            message = f"{whose}{item.kind} {item.name} is {list(tensor.shape)}, the plan was made for {count} microbatches of {list(shape)}"
            raise UsageError(message, "plan the model again for these shapes")
        if local and not kept:
            message = f"the rows of {item.name} and of other inputs are not split alike, or a microbatch is more than its rows"
            raise UsageError(message, "pass whole inputs (inputs='global'), or pin the inputs to one split of dim 0")
        own = local or (placed and kept)
        rows = self.place.own_part(tensor, spec) if placed and kept else tensor.full_tensor() if placed else tensor.detach()
        rows = rows.to(self.place.device) if local else rows
        pieces = rows.unflatten(0, (runs, count, rows.shape[0] // (runs * count)))
        return lambda number: pieces[:, number].flatten(0, 1) if own else self.enter(item, pieces[:, number].flatten(0, 1))

    def leave(self, value: str, tensor: torch.Tensor) -> torch.Tensor:
        """A value for the user: plain when it is whole on every rank, else as ``outputs`` says. Collective where it is made whole."""
        if value in self.left_as_made:
            return tensor.detach()
        spec = self.spec(value)
        tensor = tensor.clone() if value in self.overwritten else tensor
        if spec.is_replicated:
            return tensor.detach()
        shape = self.graph.tensors[self.executable.schedule.values[value].tensor].shape
        made = self.place.dtensor(tensor, spec, shape)
        return made.full_tensor() if self.outputs == "full" else made


def _written_out(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose memory holds its values. A conjugate, and the imaginary part of one, are views, which not all operators can read."""
    return tensor.resolve_conj().resolve_neg()


def check_gradient_specs(step: Step) -> None:
    """Every gradient must come out in its parameter's spec, so that optimizers work on local parts.

    Raises:
        MismatchError: naming the first parameter whose gradient does not.
    """
    for output, value in step.executable.schedule.outputs:
        if output.kind in ("gradient", "buffer"):
            wanted, found = step.spec(step.graph.owners[output]), step.spec(value)
            if wanted != found:
                message = f"the plan's {output.kind} of {output.name} has the spec {found}, {output.name} itself {wanted}"
                raise MismatchError(message, "write the plan again with autopar plan")
