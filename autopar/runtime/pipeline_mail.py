"""What crosses between stages on real ranks: two-rank groups for each pair of stages and direction, in one order on all ranks.

A send is waited for when the receiving action has begun, by the total order; until then nobody writes to what is sent, since values that
leave a stage's schedule are never written over. A receive is posted one action ahead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import MismatchError
from autopar.pipeline import Action, Boundary, Stages
from autopar.runtime.groups import Team, create_in_turn
from autopar.schedule import Schedule


@dataclass(frozen=True)
class Ranks:
    """The processes of a pipeline: those of each stage in the order of its mesh, one stage after another."""

    team: Team
    stages: int

    @property
    def each(self) -> int:
        """Ranks of a stage."""
        return len(self.team.members) // self.stages

    @property
    def stage(self) -> int:
        """This process's stage."""
        return self.team.rank // self.each

    def at(self, stage: int) -> int:
        """The process, by its rank in the world, that has this one's place in another stage."""
        return self.members([stage], self.team.rank % self.each)[0]

    def members(self, stages: Sequence[int], place: int) -> tuple[int, ...]:
        """The processes that have a place in these stages."""
        return tuple(self.team.members[stage * self.each + place] for stage in stages)


@dataclass(frozen=True)
class Groups:
    """This process's groups beyond its stage.

    Args:
        pairs: by sending and receiving stage. The way back has a group of its own.
        across: the ranks with this one's place in every stage.
        tied: by tensor name of a tied parameter of this stage, the ranks that hold it.
    """

    pairs: Mapping[tuple[int, int], dist.ProcessGroup]
    across: dist.ProcessGroup
    tied: Mapping[str, dist.ProcessGroup]


def create_groups(stages: Stages, ranks: Ranks) -> Groups:
    """The groups of a pipeline. Collective over all its processes, before they make groups of their stages."""
    crossing = sorted({(one.source, one.target) for one in stages.boundaries})
    places, everywhere = range(ranks.each), range(ranks.stages)
    wanted = [("across", ranks.members(everywhere, place)) for place in places]
    wanted += [(f"{pair}", ranks.members(pair, place)) for pair in crossing for place in places]
    wanted += [("tied", ranks.members(holders, place)) for holders in sorted(set(stages.tied.values())) for place in places]
    made, place = create_in_turn(wanted), ranks.team.rank % ranks.each
    return Groups(
        {pair: made[f"{pair}", ranks.members(pair, place)] for pair in crossing if ranks.stage in pair},
        made["across", ranks.members(everywhere, place)],
        {name: made["tied", ranks.members(holders, place)] for name, holders in stages.tied.items() if ranks.stage in holders},
    )


@dataclass
class ProcessMail:
    """Sends to and receives from the ranks of other stages that have this rank's place in theirs.

    Args:
        schedule: this stage's.
        order: the timetable.
    """

    stages: Stages
    schedule: Schedule
    order: Sequence[Action]
    ranks: Ranks
    pairs: Mapping[tuple[int, int], dist.ProcessGroup]
    device: torch.device
    flying: list[tuple[int, Any, Tensor]] = field(default_factory=list)
    """Sends under way: the place of the receiving action in the total order, what to wait for, what is sent."""
    posted: dict[tuple[Boundary, int], tuple[Any, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.place = {action: index for index, action in enumerate(self.order)}
        self.number = {boundary: index for index, boundary in enumerate(self.stages.boundaries)}

    def post(self, action: Action) -> None:
        """Posts the receives of one of this stage's actions."""
        for boundary in self.stages.received(action.stage, action.part):
            if (boundary, action.microbatch) not in self.posted:
                tensor, mesh = self.schedule.graph.tensors[boundary.tensor], self.schedule.machine.mesh
                coordinates = mesh.coordinates(self.ranks.team.rank % self.ranks.each)
                shape = self.schedule.specs[boundary.tensor].own_shape(tensor.shape, mesh.sizes, coordinates)
                room = torch.empty(shape, dtype=getattr(torch, tensor.dtype), device=self.device)
                pair = self.pairs[boundary.source, boundary.target]
                work = dist.irecv(room, self.ranks.at(boundary.source), group=pair, tag=self._tag(boundary, action.microbatch))
                self.posted[boundary, action.microbatch] = work, room

    def receive(self, boundary: Boundary, microbatch: int) -> Sequence[Tensor]:
        work, room = self.posted.pop((boundary, microbatch))
        self._wait(work, f"receives {boundary.tensor} of microbatch {microbatch} from stage {boundary.source}")
        return [room]

    def send(self, boundary: Boundary, microbatch: int, parts: Sequence[Tensor]) -> None:
        (part,) = parts
        sent = part.contiguous()
        pair = self.pairs[boundary.source, boundary.target]
        work = dist.isend(sent, self.ranks.at(boundary.target), group=pair, tag=self._tag(boundary, microbatch))
        self.flying.append((self.place[Action(boundary.target, boundary.half, microbatch)], work, sent))

    def settle(self, place: int) -> None:
        """Waits for sends whose receiving action stands before a place in the total order."""
        for target, work, _ in self.flying:
            if target < place:
                self._wait(work, f"waits for stage {self.order[target].stage}, which begins {self.order[target]}")
        self.flying = [one for one in self.flying if one[0] >= place]

    def _tag(self, boundary: Boundary, microbatch: int) -> int:
        return self.number[boundary] * (1 + self.order[-1].microbatch) + microbatch

    def _wait(self, work: Any, doing: str) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            message = f"stage {self.ranks.stage} {doing}, and nothing comes: {str(error).splitlines()[0]}"
            raise MismatchError(message, "look at what the other ranks print; one of them may be gone") from error
