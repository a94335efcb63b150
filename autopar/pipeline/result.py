"""A planned pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.pipeline.baselines import PipelineBaseline
from autopar.pipeline.clock import PipelineTimes, StageCosts
from autopar.pipeline.cutting import Stages
from autopar.pipeline.timetable import Action, stages_split
from autopar.schedule import Schedule
from autopar.search import SearchResult


@dataclass(frozen=True)
class PipelineResult:
    """A planned pipeline.

    Args:
        stages: the cut graph.
        found: the search of each stage.
        costs: its figures.
        order: the timetable.
        times: the step over time.
        transfer_seconds: of the largest value that crosses.
        bound_seconds: no cut at the units, no plans of the stages on this mesh and no order of their actions takes less: of actions
            forward and backward, or with gradients of weights apart where these are.
        baselines: pipelines by hand, by name.
        interrupted: whether Ctrl-C ended the searches.
    """

    stages: Stages
    cut: tuple[str, ...]
    found: tuple[SearchResult, ...]
    costs: tuple[StageCosts, ...]
    order: tuple[Action, ...]
    times: PipelineTimes
    transfer_seconds: float
    bound_seconds: float
    baselines: Mapping[str, PipelineBaseline] = field(default_factory=dict)
    interrupted: bool = False

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """What the ranks of each stage run."""
        return tuple(one.schedule for one in self.found)

    @property
    def split(self) -> bool:
        """Whether gradients of weights are made in actions of their own."""
        return bool(stages_split(self.order))

    @property
    def gap(self) -> float:
        """(step - bound) / step."""
        return (self.times.step - self.bound_seconds) / self.times.step if self.times.step else 0.0

    @property
    def peaks(self) -> tuple[int, ...]:
        """Bytes at the peak of a rank of each stage."""
        return self.times.peaks
