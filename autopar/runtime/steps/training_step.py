"""One step as one autograd function.

Its forward runs the forward instructions and keeps what the backward instructions read; its backward runs those and returns each gradient
in its parameter's spec. Autograd never sees a collective: through collectives injected into a forward graph it gives wrong gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import torch
from torch.autograd.function import FunctionCtx
from torch.distributed.tensor import DTensor

from autopar.dialect import random_step
from autopar.errors import UsageError
from autopar.graph import GraphInput
from autopar.runtime.execution.executable import Executable, Land
from autopar.runtime.execution.loss_gradient import loss_gradient
from autopar.runtime.ranks.collectives import Observed, Values
from autopar.runtime.ranks.placement import local_part
from autopar.runtime.steps.deferred_loss import Arrival, LateTensor
from autopar.runtime.steps.saved_values import Saved, Unchanged
from autopar.runtime.steps.step import Step
from autopar.torch_compat import copy_each, dtensor_like, dtensors_like, keeps_autograd_graph, store_gradients


class TrainingStep(torch.autograd.Function):
    """Forward and backward instructions as one differentiable function of the trained parameters and inputs."""

    @staticmethod
    def forward(ctx: FunctionCtx, call: Call, nobodys: torch.Tensor, *trained: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.trained = call, [tensor if isinstance(tensor, DTensor) else None for tensor in trained]
        outputs = call.forward(keep=True)
        others = [tensor for tensor, name in zip(outputs, call.names, strict=True) if not call.differentiable(name, tensor)]
        if others:
            ctx.mark_non_differentiable(*others)
        return outputs

    @staticmethod
    @torch.compiler.disable(reason="the planned program is one already")
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            hint = "leave create_graph out; what needs gradients of gradients (a penalty on them) runs on the plain model"
            raise UsageError("create_graph=True asks for gradients that can be differentiated; the planned backward is no graph", hint)
        found = ctx.call.backward(gradients, keep=keeps_autograd_graph())
        return (None, None, *store_gradients(ctx.trained, found))


class Call:
    """One forward pass, and its backward pass if there is one.

    Args:
        locals_: this rank's part of every graph input but tangents, by tensor name.
        owners: the user's tensors that some of these are memory of (a DTensor's version counts changes that its local tensor's does not).
        trained: tensor names of the graph inputs whose gradients autograd wants, in the order they are given to ``TrainingStep``.
        global_inputs, local_inputs: of those, inputs that came as plain tensors, whole or this rank's part: their gradient leaves likewise.
    """

    def __init__(
        self, step: Step, locals_: Mapping[str, torch.Tensor], owners: Mapping[str, torch.Tensor], trained: Sequence[str],
        global_inputs: Set[str], local_inputs: Set[str], number: int, observed: list[Observed] | None,
    ) -> None:  # fmt: skip
        self.step, self.locals, self.owners, self.trained = step, locals_, owners, trained
        self.global_inputs, self.local_inputs = global_inputs, local_inputs
        self.number, self.observed = number, observed
        self.leaving, self.tangents = step.leaving, step.tangents
        self.names = [output.name for output, _ in self.leaving]
        self.loss: str | None = "loss" if "loss" in self.names and not self.tangents else None
        """The output whose gradient the graph takes as 1, when there are no tangents."""
        self.saved: Saved | None = None
        self.arrival: Arrival | None = None

    def differentiable(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether gradients of this output may be asked for: it has a tangent, or it is the loss or one that comes of what trains, whose
        gradient the plan does not take (see ``backward``): without a word it would be missing."""
        if name == self.loss:
            return True
        if self.tangents:
            return name in self.tangents
        output = next(output for output, _ in self.leaving if output.name == name)
        return tensor.is_floating_point() and output.tensor in self.step.trained_into

    def forward(self, *, keep: bool) -> tuple[torch.Tensor, ...]:
        """The outputs in order; what the backward pass needs is kept when asked."""
        executable = self.step.executable
        values: Values = dict(self.locals)
        with random_step(self.number):
            if keep and isinstance(executable, Executable):
                land = executable.forward_but_late([values], self.observed)
            else:
                executable.forward([values], self.observed)
                land = None
        outputs = tuple(self.step.leave(value, values[value]) if value in values else self._late(value, land) for _, value in self.leaving)
        kept = {name: values[name] for name in executable.kept if name in values} if keep else {}
        if self.step.updates:
            self._update_buffers(values, kept)
        if keep:
            self.saved = Saved(kept, self._read_later(outputs))
        return outputs

    def _read_later(self, outputs: Sequence[torch.Tensor]) -> Unchanged:
        """What backward reads of the user's tensors, and of the memory that other programs write. Of buffers that this one changes it has
        copies; of outputs no more than what shares memory with them: they themselves lead back to here."""
        owned, shared = self.step.kept_inputs, []
        if self.step.kept_outputs:
            leaving = zip(self.leaving, outputs, strict=True)
            shared = [(f"output {output.name}", one.detach()) for (output, value), one in leaving if value in self.step.kept_outputs]
        tensors = [*map(self.owners.__getitem__, owned), *map(self.locals.__getitem__, owned), *(one for _, one in shared)]
        return Unchanged([*owned, *owned, *(name for name, _ in shared)], tensors)

    def _late(self, value: str, land: Land | None) -> torch.Tensor:
        """The loss, whose sum over the ranks is on its way."""
        assert land is not None

        def wait() -> torch.Tensor:
            found: Values = {}
            land([found])
            return self.step.leave(value, found[value])

        tensor = self.step.graph.tensors[self.step.executable.schedule.values[value].tensor]
        self.arrival = Arrival(wait)
        return LateTensor(self.arrival, torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device=self.step.place.device))

    @torch.no_grad()
    def _update_buffers(self, values: Mapping[str, torch.Tensor], kept: Values) -> None:
        """Gives the buffers their new values, each what it is before any of them changes: buffers may become one another."""
        overwritten = self.step.overwritten
        for name in self.step.kept_overwritten:
            if name in kept:
                kept[name] = kept[name].clone()
        updates = [(own, value) for buffer, value in self.step.updates if (own := self.locals[buffer]) is not values[value]]
        # the others were changed where they lie
        new = [values[value].clone() if value in overwritten else values[value] for _, value in updates]
        if updates:
            copy_each([own for own, _ in updates], new)

    @torch.no_grad()
    def backward(self, gradients: Sequence[torch.Tensor | None], *, keep: bool) -> list[torch.Tensor | None]:
        """The gradient of each entry of ``trained``: None, as torch has it, where it comes of no output that backward runs from (an
        optimizer passes such a parameter by, where zeros would decay it).

        Raises:
            UsageError: a gradient that the plan does not take, since the loss is among the outputs.
        """
        assert self.saved is not None
        for name, gradient in zip(self.names, gradients, strict=True):
            if gradient is not None and name not in self.tangents and name != self.loss:
                hint = "compute with it in forward, or detach() it; without a scalar called loss the gradients of all outputs are taken"
                raise UsageError(f"the output {name} is part of what backward runs from, the plan has gradients of the loss alone", hint)
        values, scale = self.saved.take(keep=keep), None
        asked: set[str] = set()
        for name, gradient in zip(self.names, gradients, strict=True):
            if name in self.tangents:
                asked.update([] if gradient is None else [self.tangents[name].tensor])
                values[self.tangents[name].tensor] = self._tangent(self.tangents[name], gradient)
            elif name == self.loss:
                scale = None if gradient is None else plain(gradient)  # a DTensor where parameters joined the loss
        early = self._run_backward(values, scale)
        if self.arrival is not None:
            self.arrival.get()  # long there; a rank that is gone is heard of within the step
        reached = {tensor for tensor in self.trained if self._is_reached(tensor, asked)} if self.tangents else self.step.gradients.keys()
        wanted = [self.step.gradients[tensor] if tensor in reached else None for tensor in self.trained]
        found = self._own({value: values.pop(value) for value in wanted if value is not None}, wanted, scale)
        if scale is not None and not early and (not scale.is_cpu or scale.item() != 1.0):
            for local in found:
                if local is not None:
                    local.mul_(scale)
        kept = [local for local in found if local is not None]
        if len(kept) == len(found) and self.step.laid_alike.issuperset(self.trained):
            return dtensors_like(kept, [self.owners[tensor] for tensor in self.trained])
        return [
            None if local is None or value is None else self._leave(tensor, value, local)
            for tensor, value, local in zip(self.trained, wanted, found, strict=True)
        ]

    def _is_reached(self, tensor: str, asked: Set[str]) -> bool:
        """Whether the gradient of a graph input comes of the tangents that backward is asked for."""
        led = self.step.tangents_of[tensor]
        return not led or not led.isdisjoint(asked)

    def _run_backward(self, values: Values, scale: torch.Tensor | None) -> bool:
        """Makes the gradients of ``values``; whether the gradient of the loss, ``scale``, is in them."""
        executable = self.step.executable
        takes = isinstance(executable, Executable) or executable.weighted
        early = scale is not None and takes and self.step.graph.loss_gradient is not None
        with random_step(self.number), loss_gradient(scale if early else None):
            executable.backward([values], self.observed)
        return early

    def _tangent(self, item: GraphInput, gradient: torch.Tensor | None) -> torch.Tensor:
        if gradient is None:
            planned = self.step.graph.tensors[item.tensor]
            shape = self.step.place.own_shape(planned.shape, self.step.spec(item.tensor))
            return torch.zeros(shape, dtype=getattr(torch, planned.dtype), device=self.step.place.device)
        spec = self.step.spec(item.tensor)
        if isinstance(gradient, DTensor):
            return self.step.place.own_part(gradient, spec)
        return local_part(gradient, spec, self.step.place.mesh, self.step.place.rank)

    def _own(self, made: Values, wanted: Sequence[str | None], given: torch.Tensor | None) -> list[torch.Tensor | None]:
        """The gradients, each dense in memory that nobody else has: optimizers and clipping write into them in place.

        What a bucket brought may stay where it lies in it: the parts of a bucket do not overlap.

        Args:
            given: the gradient of the loss.
        """
        assert self.saved is not None
        taken, fresh, apart, copied = self._taken(made, given), self.step.fresh, self.step.apart, self.saved.kept
        found: list[torch.Tensor | None] = []
        for value in wanted:
            if value is None:
                found.append(None)
                continue
            tensor = made[value]
            if value in apart:
                whole, place = True, tensor.data_ptr()
            else:
                storage = tensor.untyped_storage()
                whole, place = tensor.nbytes == storage.nbytes(), 0 if value in fresh else storage.data_ptr()
            if not whole or copied or place in taken or not tensor.is_contiguous():
                tensor = tensor.clone(memory_format=torch.contiguous_format)
                place = tensor.data_ptr()
            if place:
                taken.add(place)
            found.append(tensor)
        return found

    def _taken(self, made: Values, given: torch.Tensor | None) -> set[int]:
        """The memory that gradients which are not fresh may not be: the graph's inputs', that of the fresh ones and of what was given."""
        fresh = self.step.fresh
        if made.keys() <= fresh:
            return set()
        others = [tensor for name, tensor in made.items() if name in fresh] + ([] if given is None else [given])
        return {tensor.untyped_storage().data_ptr() for tensor in (*self.locals.values(), *others)}

    def _leave(self, tensor: str, value: str, local: torch.Tensor) -> torch.Tensor:
        """A gradient as its parameter or input is: a DTensor, a whole tensor, or a rank's part."""
        if tensor in self.local_inputs:
            return local
        if tensor in self.step.blocks:
            local = local.view(self.step.blocks[tensor].own_shape(local.shape))
        if tensor in self.step.parameters:
            return dtensor_like(local, self.owners[tensor])
        schedule = self.step.executable.schedule
        made = self.step.place.dtensor(local, schedule.specs[value], self.step.graph.tensors[schedule.values[value].tensor].shape)
        return made.full_tensor() if tensor in self.global_inputs else made


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whole. Collective for a DTensor that is not."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
