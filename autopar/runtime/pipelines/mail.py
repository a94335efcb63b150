"""What crosses between stages on real ranks: two-rank groups for each pair of stages and direction, in one order on all ranks.

What crosses between two stages of one rank stays where it is. A send is waited for when the receiving action has begun, by the total order;
until then nobody writes to what is sent, since values that leave a stage's schedule are never written over. A receive is posted one action
ahead.
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
from autopar.runtime.ranks.groups import Team, create_in_turn
from autopar.schedule import Schedule


@dataclass(frozen=True)
class Ranks:
    """The processes of a pipeline: those of each position in the order of a stage's mesh, one position after another.

    Args:
        positions: ranks along the axis of stages.
    """

    team: Team
    positions: int

    @property
    def each(self) -> int:
        """Ranks of a stage."""
        return len(self.team.members) // self.positions

    @property
    def position(self) -> int:
        """Where this process is along the axis of stages."""
        return self.team.rank // self.each

    def at(self, position: int) -> int:
        """The process, by its rank in the world, that has this one's place at another position."""
        return self.members([position], self.team.rank % self.each)[0]

    def members(self, positions: Sequence[int], place: int) -> tuple[int, ...]:
        """The processes that have a place at these positions."""
        return tuple(self.team.members[position * self.each + place] for position in positions)


@dataclass(frozen=True)
class Groups:
    """This process's groups beyond its position.

    Args:
        pairs: by sending and receiving stage. The way back has a group of its own.
        across: the ranks with this one's place at every position.
        tied: by tensor name of a tied parameter that stages of several positions hold, of them this one, the ranks that do.
    """

    pairs: Mapping[tuple[int, int], dist.ProcessGroup]
    across: dist.ProcessGroup
    tied: Mapping[str, dist.ProcessGroup]


def create_groups(stages: Stages, ranks: Ranks) -> Groups:
    """The groups of a pipeline. Collective over all its processes, before they make groups of their stages."""
    pairs = sorted({(one.source, one.target) for one in stages.boundaries})
    ends = {pair: [stages.position(stage) for stage in pair] for pair in pairs}
    crossing = {pair: both for pair, both in ends.items() if both[0] != both[1]}
    holders = {name: sorted({stages.position(stage) for stage in holding}) for name, holding in stages.tied.items()}
    holders = {name: positions for name, positions in holders.items() if len(positions) > 1}
    places, everywhere = range(ranks.each), range(ranks.positions)
    wanted = [("across", ranks.members(everywhere, place)) for place in places]
    wanted += [(f"{pair}", ranks.members(both, place)) for pair, both in crossing.items() for place in places]
    wanted += [("tied", ranks.members(positions, place)) for positions in sorted(holders.values()) for place in places]
    made, place = create_in_turn(wanted), ranks.team.rank % ranks.each
    return Groups(
        {pair: made[f"{pair}", ranks.members(both, place)] for pair, both in crossing.items() if ranks.position in both},
        made["across", ranks.members(everywhere, place)],
        {name: made["tied", ranks.members(positions, place)] for name, positions in holders.items() if ranks.position in positions},
    )


@dataclass
class ProcessMail:
    """Sends to and receives from the ranks of other positions that have this rank's place at theirs.

    Args:
        schedules: of each stage of this rank.
        order: the timetable.
    """

    stages: Stages
    schedules: Mapping[int, Schedule]
    order: Sequence[Action]
    ranks: Ranks
    pairs: Mapping[tuple[int, int], dist.ProcessGroup]
    device: torch.device
    flying: list[tuple[int, Any, Tensor]] = field(default_factory=list)
    """Sends under way: the place of the receiving action in the total order, what to wait for, what is sent."""
    posted: dict[tuple[Boundary, int], tuple[Any, Tensor]] = field(default_factory=dict)
    handed: dict[tuple[Boundary, int], Tensor] = field(default_factory=dict)
    """What one stage of this rank has for another."""

    def __post_init__(self) -> None:
        self.place = {action: index for index, action in enumerate(self.order)}
        self.number = {boundary: index for index, boundary in enumerate(self.stages.boundaries)}

    def post(self, action: Action) -> None:
        """Posts the receives of one of this rank's actions."""
        schedule = self.schedules[action.stage]
        for boundary in self.stages.received(action.stage, action.part):
            source = self.stages.position(boundary.source)
            if source != self.ranks.position and (boundary, action.microbatch) not in self.posted:
                tensor, mesh = schedule.graph.tensors[boundary.tensor], schedule.machine.mesh
                coordinates = mesh.coordinates(self.ranks.team.rank % self.ranks.each)
                shape = schedule.specs[boundary.tensor].own_shape(tensor.shape, mesh.sizes, coordinates)
                room = torch.empty(shape, dtype=getattr(torch, tensor.dtype), device=self.device)
                pair = self.pairs[boundary.source, boundary.target]
                work = dist.irecv(room, self.ranks.at(source), group=pair, tag=self._tag(boundary, action.microbatch))
                self.posted[boundary, action.microbatch] = work, room

    def receive(self, boundary: Boundary, microbatch: int) -> Sequence[Tensor]:
        if (boundary, microbatch) in self.handed:
            return [self.handed.pop((boundary, microbatch))]
        work, room = self.posted.pop((boundary, microbatch))
        doing = f"stage {boundary.target} receives {boundary.tensor} of microbatch {microbatch} from stage {boundary.source}"
        self._wait(work, doing)
        return [room]

    def send(self, boundary: Boundary, microbatch: int, parts: Sequence[Tensor]) -> None:
        (part,) = parts
        target = self.stages.position(boundary.target)
        if target == self.ranks.position:
            self.handed[boundary, microbatch] = part
            return
        sent = part.contiguous()
        pair = self.pairs[boundary.source, boundary.target]
        work = dist.isend(sent, self.ranks.at(target), group=pair, tag=self._tag(boundary, microbatch))
        self.flying.append((self.place[Action(boundary.target, boundary.half, microbatch)], work, sent))

    def settle(self, place: int) -> None:
        """Waits for sends whose receiving action stands before a place in the total order."""
        for target, work, _ in self.flying:
            if target < place:
                mine = " and ".join(map(str, self.schedules))
                self._wait(work, f"stage {mine} waits for stage {self.order[target].stage}, which begins {self.order[target]}")
        self.flying = [one for one in self.flying if one[0] >= place]

    def _tag(self, boundary: Boundary, microbatch: int) -> int:
        return self.number[boundary] * (1 + self.order[-1].microbatch) + microbatch

    def _wait(self, work: Any, doing: str) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            message = f"{doing}, and nothing comes: {str(error).splitlines()[0]}"
            raise MismatchError(message, "look at what the other ranks print; one of them may be gone") from error
