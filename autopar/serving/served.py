"""A model that generates, on this rank: programs of several shapes on one set of weights and one cache, which stay where they lie.

The cache is in the module's buffers. A longer one takes its place where it is full: each rank copies its own part, and nothing is sent.
Tokens are the only thing that all ranks have whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.cost_models import Execution
from autopar.errors import UsageError
from autopar.importer import Capture
from autopar.options import user_errors
from autopar.recording import machine_of
from autopar.runtime import ShardedModule
from autopar.runtime.module.compiling import (
    check_mesh,
    check_parameters,
    check_torch,
    compile_schedule,
    rebuild,
    shared_plans,
    start_process_group,
)
from autopar.runtime.ranks.agreement import together
from autopar.runtime.ranks.groups import team_of
from autopar.runtime.weights.sharding import Initialise
from autopar.schedule import Schedule
from autopar.serving.cached import NAME, MakeCache, cached
from autopar.serving.planning import Call, Serving
from autopar.torch_compat import local_of


def serve(
    model: nn.Module,
    serving: Serving | None,
    *,
    cache: MakeCache | None = None,
    mesh: DeviceMesh | None = None,
    device: str | torch.device | None = None,
    init: Initialise | None = None,
    seed: int = 0,
    execute: Execution = "eager",
) -> Served:
    """The model ready to generate as planned, on this rank. Every rank of the mesh calls it.

    Args:
        model, cache: as given to ``plan_serving``, the model with real or meta weights.
        serving: the plans, the same on all ranks; None where another rank's are to be received.
        mesh, device, init, seed, execute: as of ``compile``.

    Raises:
        MismatchError: the plans were made for another model, mesh or torch, or ranks differ.
    """
    with user_errors():
        serving = Serving(shared_plans(serving.plans if serving is not None else None, mesh, device))
        machine = machine_of(next(iter(serving.plans.values())))
        if mesh is None:
            start_process_group(machine.mesh)
        else:
            check_mesh(mesh, machine.mesh)
        made = together(lambda: _rebuilt(model, serving, cache), team_of(mesh))
        main, *others = made
        whole, captured, schedule = made[main]
        module = compile_schedule(
            whole, schedule, captured.constants, plan=serving.plans[main], mesh=mesh, device=device, init=init, seed=seed, execute=execute,
            read=captured.read, also=[made[call][1:] for call in others],
        )  # fmt: skip
    return Served(module, serving, {call: schedule for call, (_, _, schedule) in made.items()})


def _rebuilt(model: nn.Module, serving: Serving, cache: MakeCache | None) -> dict[Call, tuple[nn.Module, Capture, Schedule]]:
    """For each call the model with a cache of its length, its capture and its schedule; the call that comes first begins."""
    found: dict[Call, tuple[nn.Module, Capture, Schedule]] = {}
    for length in serving.lengths:
        whole = cached(model, serving.batch, length, cache, device="meta")
        for call, plan in serving.plans.items():
            if call[0] == length:
                check_torch(plan)
                check_parameters(whole, plan)
                found[call] = whole, *rebuild(whole, plan)
    return found


class Served:
    """A model that generates, on this rank.

    Attributes:
        module: what runs the calls, parameters and cache as DTensors under the model's own names; to load weights into, for example.
        serving: the plans.
    """

    def __init__(self, module: ShardedModule, serving: Serving, schedules: Mapping[Call, Schedule]) -> None:
        self.module, self.serving = module, serving
        self._schedules = {length: next(made for call, made in schedules.items() if call[0] == length) for length in serving.lengths}
        self._settings = getattr(module, "generation_config", None)
        self._length = 0
        self._lengthen(serving.lengths[0])

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int,
        eos_token_id: int | Collection[int] | None = None,
        pad_token_id: int | None = None,
    ) -> Tensor:
        """The prompts with the most likely tokens after them, one after another: greedy.

        Args:
            input_ids: ``[batch, columns]``, int64, whole and the same on all ranks; shorter rows are padded on the left.
            attention_mask: like it, zeros where it is padding; all ones when not given.
            max_new_tokens: at most so many; fewer once each row has one of ``eos_token_id``.
            eos_token_id, pad_token_id: what ends a row, and what follows that in it; of the model's ``generation_config`` when not given.

        Returns: ``[batch, columns + new]``, whole on every rank.

        Raises:
            UsageError: another batch than planned, a prompt longer than planned or padded on the right, more tokens than the cache holds.
        """
        batch, columns = self._check(input_ids, attention_mask, max_new_tokens)
        prompt = self.serving.prompt_of(columns)
        self.serving.room(prompt + max_new_tokens - 1)
        ends, pad = self._ends(eos_token_id, pad_token_id)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(torch.int64)
        padding = (prompt - columns, 0)
        tokens, mask = nn.functional.pad(input_ids, padding, value=pad), nn.functional.pad(mask, padding)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        self._empty(self.serving.room(prompt))
        placed = self._mask(mask)
        found, alive = [input_ids], torch.ones(batch, 1, dtype=torch.bool)
        for number in range(max_new_tokens):
            new = self.module(tokens, placed, positions).cpu()
            tokens = torch.where(alive, new, pad)
            found.append(tokens)
            alive = alive & ~torch.isin(tokens, ends)
            if number + 1 == max_new_tokens or not bool(alive.any()):
                break
            positions = positions[:, -1:] + 1
            if prompt + number + 1 > self._length:
                self._lengthen(self.serving.room(prompt + number + 1))
                placed = self._mask(mask)
        return torch.cat([part.to(input_ids.device) for part in found], 1)

    def _check(self, input_ids: Tensor, mask: Tensor | None, new: int) -> tuple[int, int]:
        if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or input_ids.dtype != torch.int64 or input_ids.shape[1] == 0:
            raise UsageError(f"the prompts are {_words(input_ids)}", "give token ids as an int64 tensor [batch, columns]")
        batch, columns = input_ids.shape
        if batch != self.serving.batch:
            message = f"{batch} prompts, planned was a batch of {self.serving.batch}"
            raise UsageError(message, f"fill up with any rows to {self.serving.batch}, or plan with batch={batch}")
        if not isinstance(new, int) or new < 1:
            raise UsageError(f"max_new_tokens is {new!r}", "give a whole number from 1 on")
        if mask is not None and mask.shape != input_ids.shape:
            raise UsageError(f"the attention mask is {_words(mask)}, the prompts are {_words(input_ids)}", "give a 0 or 1 for each token")
        if mask is not None and not bool((mask[:, 1:] >= mask[:, :-1]).all() and mask[:, -1].all()):
            raise UsageError("the attention mask has zeros after ones", "pad prompts on the left: tokenizer.padding_side = 'left'")
        return batch, columns

    def _ends(self, eos: int | Collection[int] | None, pad: int | None) -> tuple[Tensor, int]:
        """The tokens that end a row, and the one that follows."""
        eos = eos if eos is not None else getattr(self._settings, "eos_token_id", None)
        ends = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        pad = pad if pad is not None else getattr(self._settings, "pad_token_id", None)
        return torch.tensor(ends, dtype=torch.int64), pad if pad is not None else ends[0] if ends else 0

    def _mask(self, mask: Tensor) -> Tensor:
        """The padding of the whole cache, placed as its calls want it; masks of causality hide what is not filled yet."""
        whole = nn.functional.pad(mask, (0, self._length - mask.shape[1]), value=1)
        schedule, place = self._schedules[self._length], self.module.place
        item = next(item for item in schedule.graph.of_kind("input") if item.name == "attention_mask")
        spec = schedule.specs[item.tensor]
        return place.dtensor(place.own_part(whole, spec), spec, whole.shape)

    def _empty(self, length: int) -> None:
        """Begins with a cache of this length."""
        if length == self._length:
            for local in map(local_of, self._buffers().values()):
                local.zero_()
        else:
            self._put(length, lambda old, new: None)

    def _lengthen(self, length: int) -> None:
        """Goes on with a longer cache: each rank copies what it has, one tensor after another."""
        self._put(length, _copy_corner if self._length else lambda old, new: None)

    def _put(self, length: int, fill: Callable[[Tensor, Tensor], None]) -> None:
        schedule, place = self._schedules[length], self.module.place
        for item in schedule.graph.of_kind("buffer"):
            if item.name.startswith(f"{NAME}."):
                path, _, last = item.name.rpartition(".")
                holder, spec = self.module.get_submodule(path), schedule.specs[item.tensor]
                shape = schedule.graph.tensors[item.tensor].shape
                old = local_of(holder._buffers[last])
                new = torch.zeros(place.own_shape(shape, spec), dtype=old.dtype, device=place.device)
                fill(old, new)
                holder._buffers[last] = place.dtensor(new, spec, shape)
        self._length = length

    def _buffers(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.module.named_buffers() if name.startswith(f"{NAME}.")}


def _copy_corner(old: Tensor, new: Tensor) -> None:
    new[tuple(slice(extent) for extent in old.shape)] = old


def _words(value: Any) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}" if isinstance(value, Tensor) else repr(value)[:80]
