"""The joint graph of one microbatch, cut into stages: each is a graph that the planner takes as any other.

A cut names the first module of each stage but the first. Forward operators are placed by their order. A backward operator goes with the
module that it comes from. What crosses from one stage to another is a ``Boundary``. Three kinds of operators are copied instead of crossed:
those that read no parameter (positions, masks), those that read parameters alone (conversions of weights), and constants of backward.

What is drawn at random, and what depends on it, is never copied: stages would draw different numbers. The first that reads it makes it.

A parameter that several stages read is *tied*: each of them holds it and makes a gradient of its own, to be summed once a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.cost_models import Mesh
from autopar.errors import UsageError
from autopar.graph import CONVERSION, DIVISOR, RECEIVE, SEND, Accumulation, Graph, GraphInput, GraphOutput, Op, Phase, layer_of
from autopar.rules import find_dispatched, find_rule, seed_of

STAGE_AXIS = "pp"
"""The mesh axis that a pipeline's stages lie along, the outermost."""
ADDING = "aten.add.Tensor"
_LINEAR = frozenset({CONVERSION, "aten.view.default", "aten.transpose.int", "aten.t.default", "aten.permute.default"})
"""Operators of one input that give the same of a sum as the sum of what they give."""


def stage_mesh(mesh: Mesh) -> Mesh:
    """The mesh of one stage; one without stages as it is.

    >>> stage_mesh(Mesh((("pp", 2), ("dp", 4)))).axes
    (('dp', 4),)
    """
    return mesh if mesh.names[0] != STAGE_AXIS else Mesh(mesh.axes[1:] or (("dp", 1),))


@dataclass(frozen=True)
class Boundary:
    """A tensor of one microbatch that one stage makes and another reads.

    Args:
        tensor: its name, the same in both stages' graphs.
        source, target: the stages.
    """

    tensor: str
    source: int
    target: int

    @property
    def half(self) -> Phase:
        """Whether it is sent at the end of forward, to a later stage, or of backward, to an earlier one."""
        return "forward" if self.source < self.target else "backward"


@dataclass(frozen=True)
class Stages:
    """A graph cut into stages.

    Args:
        graphs: of each stage, with the names of the whole graph. What it receives in forward are inputs, in backward tangents.
        boundaries: what crosses, in order of the sending stage, then of making.
        positions: ranks along the axis of stages. Stage s is at position s mod ``positions``.
        tied: the parameters, by tensor name, that several stages hold, with these.
    """

    graphs: tuple[Graph, ...]
    boundaries: tuple[Boundary, ...]
    positions: int
    tied: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def position(self, stage: int) -> int:
        """Where along the axis of stages a stage runs."""
        return stage % self.positions

    def at(self, position: int) -> range:
        """The stages that run at a position."""
        return range(position, len(self.graphs), self.positions)

    def sent(self, stage: int, half: str) -> tuple[Boundary, ...]:
        """What a stage sends at the end of a half; nothing for another part."""
        return tuple(one for one in self.boundaries if one.source == stage and one.half == half)

    def received(self, stage: int, half: str) -> tuple[Boundary, ...]:
        """What a stage needs before a half; a value that several boundaries bring comes once."""
        return tuple(one for one in self.boundaries if one.target == stage and one.half == half)


def find_units(graph: Graph) -> dict[str, int]:
    """The modules that a stage may begin with, in order, and the index of the first operator of each.

    A unit is an equal layer (``layers.3``), or a module outside of them (``norm``, ``head``).
    """
    movable, found = _movable(graph), dict[str, int]()
    for index, op in enumerate(graph.ops):
        if op.phase == "forward" and op.module and op.name not in movable:
            found.setdefault(layer_of(op.module) or op.module, index)
    return found


def place_finely(graph: Graph) -> Mapping[str, int]:
    """The number of the unit of each operator that stages do not copy, by name, as if each unit were a stage."""
    return _Cutter(graph, list(find_units(graph).values())[1:]).stage


def cut_graph(graph: Graph, cut: Sequence[str], positions: int | None = None) -> Stages:
    """The stages of a training graph.

    Args:
        cut: the first module of each stage but the first, in order.
        positions: see ``Stages``; default: one for each stage.

    Raises:
        UsageError: a module that the graph has not, or that stands before the one ahead of it; a graph that cannot be cut: without a scalar
            loss, with gradients of inputs, with buffers that change; a tied weight whose gradients cannot be taken apart.
    """
    _check(graph)
    return _Cutter(graph, _starts(graph, cut)).stages(positions or len(cut) + 1)


def _check(graph: Graph) -> None:
    maker = graph.producer.get(graph.accumulation.divisor)
    if maker is not None and maker.name not in _movable(graph):
        where = f" (at {maker.location})" if maker.location else ""
        message = f"the loss is a mean over a number that the model computes with its parameters, in one stage alone{where}"
        raise UsageError(message, "count it from the inputs alone, or plan without pp")
    if graph.mode != "train" or graph.loss is None:
        raise UsageError("a pipeline needs a training graph with a scalar loss", "let forward return the loss, or pass loss=")
    for output in graph.outputs:
        if output.kind == "output" and output.name not in ("loss", DIVISOR):
            message = f"the output {output.name} stands beside the loss, which is all that a pipeline hands out"
            raise UsageError(message, "let forward return the loss alone, or plan without pp")
        if output.kind == "buffer":
            raise UsageError(f"the buffer {output.name} changes in forward, and a pipeline runs it out of order", "plan without pp")
        if output.kind == "gradient" and graph.owners[output] in {item.tensor for item in graph.of_kind("input")}:
            raise UsageError(f"input {output.name} requires grad, which a pipeline does not hand out", "detach it, or plan without pp")


def _starts(graph: Graph, cut: Sequence[str]) -> list[int]:
    """The index of the first operator of each stage but the first."""
    movable, found = _movable(graph), list[int]()
    forward = [(index, op) for index, op in enumerate(graph.ops) if op.phase == "forward" and op.name not in movable]
    for name in cut:
        inside = (index for index, op in forward if op.module == name or op.module.startswith(f"{name}."))
        index = next(inside, None)
        if index is None:
            near = ", ".join(list(find_units(graph))[:4])
            raise UsageError(f"a stage cannot begin with {name}: no operator of forward is in it", f"name modules such as {near}")
        if index <= (found[-1] if found else forward[0][0]):
            before = f"after {cut[len(found) - 1]}" if found else "after the model's first operator"
            raise UsageError(f"a stage cannot begin with {name}, which does not run {before}", "name the modules in the order they run")
        found.append(index)
    return found


def _movable(graph: Graph) -> dict[str, bool]:
    """The operators that no cut places by their order, and whether each depends on a draw.

    They are operators of forward that read no parameter, or parameters alone, and constants of backward.
    """
    known = {"parameter": frozenset({"weight"}), "input": frozenset({"call"})}
    fed = {item.tensor: known.get(item.kind, frozenset[str]()) for item in graph.inputs}
    found = dict[str, bool]()
    for op in graph.ops:
        if op.phase == "backward":
            if not op.inputs and op.name != graph.loss_gradient:
                found[op.name] = False
            continue
        of = frozenset[str]().union(*(fed[name] for name in op.inputs), {"draw"} if seed_of(op) is not None else ())
        if not of >= {"weight", "call"}:
            found[op.name] = "draw" in of
        fed.update(dict.fromkeys(op.outputs, of))
    return found


class _Cutter:
    """One graph, while it is cut."""

    def __init__(self, graph: Graph, starts: Sequence[int]) -> None:
        self.graph, self.starts, self.count = graph, starts, len(starts) + 1
        movable = _movable(graph)
        self.copied = frozenset(name for name, drawn in movable.items() if not drawn)
        """The operators that each stage runs for itself."""
        self.drawn = movable.keys() - self.copied
        """The operators that depend on draws, each run by the first stage that reads what it makes."""
        self.entering = {item.tensor: item for item in graph.inputs}
        self.stage: dict[str, int] = {}
        """Of each operator that is not copied."""
        self._place_forward()
        self._place_backward()

    def stages(self, positions: int) -> Stages:
        rows = [self._ops_of(stage) for stage in range(self.count)]
        crossing = {stage: self._crossing(stage, ops) for stage, ops in enumerate(rows)}
        boundaries = tuple(
            Boundary(tensor, source, target)
            for source in range(self.count)
            for target in range(self.count)
            for tensor, maker in crossing[target].items()
            if maker == source
        )
        dispatched = find_dispatched(self.graph)
        between = next((boundary.tensor for boundary in boundaries if boundary.tensor in dispatched), None)
        if between is not None:
            message = f"a stage begins between the products of a mixture of experts (at {self.graph.producer[between].location})"
            raise UsageError(message, "let stages begin with whole layers")
        graphs = tuple(self._graph(stage, ops, boundaries) for stage, ops in enumerate(rows))
        return Stages(graphs, boundaries, positions, self.tied)

    def _place_forward(self) -> None:
        for index, op in enumerate(self.graph.ops):
            if op.phase == "forward" and op.name not in self.copied:
                self.stage[op.name] = sum(start <= index for start in self.starts)
        for op in reversed(self.graph.ops):
            if op.name in self.drawn:
                readers = [self.stage[name] for name in self.graph.readers(op) if name in self.stage]
                counted = self.graph.accumulation.divisor in op.outputs  # each stage reads it after its forward
                self.stage[op.name] = 0 if counted else min(readers, default=self.stage[op.name])

    def _place_backward(self) -> None:
        homes: dict[str, set[int]] = {}
        for op in self.graph.ops:
            if op.name in self.stage:
                homes.setdefault(op.module, set()).add(self.stage[op.name])
        for op in self.graph.ops:
            if op.phase == "backward" and op.name not in self.copied:
                self.stage[op.name] = self._backward_stage(op, homes.get(op.module, set()))

    def _backward_stage(self, op: Op, homes: set[int]) -> int:
        """That of its module, if gradients that it reads come from there or later; else the latest that has what it reads of forward."""
        makers = [self.graph.producer[name] for name in op.inputs if name in self.graph.producer]
        latest = min((self.stage[one.name] for one in makers if one.phase == "backward" and one.name in self.stage), default=self.count - 1)
        read = [self.readers[name] for name in op.inputs if name in self.readers]
        able = [stage for stage in range(latest + 1) if all(stage in stages for stages in read)]
        if len(homes) == 1 and (not able or homes <= set(able)):
            return min(*homes, latest)
        return max(able, default=latest)

    @cached_property
    def readers(self) -> dict[str, set[int]]:
        """The stages that have a parameter, or a result of forward that is not copied, since they make or read it in forward."""
        found = {item.tensor: set[int]() for item in self.graph.of_kind("parameter")}
        through: dict[str, set[str]] = {name: {name} for name in found}
        for op in self.graph.ops:
            if op.phase == "backward":
                continue
            weights = set[str]().union(*(through.get(name, set()) for name in op.inputs))
            if op.name in self.copied:
                through.update(dict.fromkeys(op.outputs, weights))
                continue
            for name in (*op.outputs, *(one for one in op.inputs if self._crosses(one)), *weights):
                found.setdefault(name, set()).add(self.stage[op.name])
        return found

    def _crosses(self, tensor: str) -> bool:
        """Whether a tensor is made by an operator that one stage alone runs."""
        maker = self.graph.producer.get(tensor)
        return maker is not None and maker.name not in self.copied

    @cached_property
    def tied(self) -> dict[str, tuple[int, ...]]:
        """The trained parameters that several stages read in forward."""
        return {name: tuple(sorted(self.readers[name])) for name in self.graph.gradients if len(self.readers.get(name, ())) > 1}

    @cached_property
    def apart(self) -> tuple[dict[str, dict[int, Op]], dict[GraphOutput, dict[int, str]]]:
        """The operators that sum or convert gradients of tied parameters, as each stage runs them; and each stage's own gradient."""
        rewritten: dict[str, dict[int, Op]] = {}
        own: dict[GraphOutput, dict[int, str]] = {}
        for output, owner in self.graph.owners.items():
            if output.kind != "gradient" or owner not in self.tied:
                continue
            tied = self.tied[owner]
            for far in (False, True):
                parts, ops = self._take_apart(output.tensor, tied, top=True, far=far)
                if set(parts) == set(tied):
                    break
            else:
                where = self.graph.producer[output.tensor]
                line = f" (at {where.location})" if where.location else ""
                message = f"{output.name} is read in stages {list(tied)}, and {where.target} joins their gradients{line}"
                raise UsageError(message, "cut the model so that one stage reads the weight, or plan without pp")
            own[output] = parts
            rewritten |= ops
        return rewritten, own

    def _take_apart(
        self, tensor: str, stages: Sequence[int], *, top: bool = False, far: bool
    ) -> tuple[dict[int, str], dict[str, dict[int, Op]]]:
        """The parts of a gradient by the stage that makes them, and the operators on the way as each stage runs them.

        Args:
            stages: that read the parameter.
            top: whether it is the gradient that leaves.
            far: see ``_summed``.
        """
        op = self.graph.producer[tensor]
        whole = {self.stage[op.name]: tensor}
        leaves = sum(output.tensor == tensor for output in self.graph.outputs)
        alone = leaves == top and len(self.graph.consumers[tensor]) == (not top)
        summed = self._summed(op, stages, far) if alone else ()
        if not summed:
            return whole, {}
        made, mine, ops = dict[int, str](), dict[int, Op](), dict[str, dict[int, Op]]()
        parts = dict[int, dict[int, str]]()
        for place in summed:
            parts[place], below = self._take_apart(op.inputs[place], stages, far=far)
            ops |= below
        found = set().union(*parts.values())
        if far and not found.issubset(stages):
            return whole, {}
        for stage in sorted(found):
            given = {place: part[stage] for place, part in parts.items() if stage in part}
            if len(given) == len(summed):
                mine[stage] = replace(op, inputs=tuple(given.get(place, name) for place, name in enumerate(op.inputs)))
            made[stage] = op.outputs[0] if len(given) == len(summed) else next(iter(given.values()))
        return made, ops | {op.name: mine}

    def _summed(self, op: Op, stages: Sequence[int], far: bool) -> tuple[int, ...]:
        """The inputs of an operator of backward that may be parts of a sum, one in each stage; of all others each stage has the whole.

        Args:
            far: whether all operators count that give the same of a sum as the sum of what they give, not views and conversions alone.
        """
        adds = op.target == ADDING and len(op.inputs) == 2 and not op.kwargs
        if adds or (op.target in _LINEAR and len(op.inputs) == 1):
            return tuple(range(len(op.inputs))) if all(map(self._crosses, op.inputs)) else ()
        if not far:
            return ()
        makers = [self.graph.producer.get(name) for name in op.inputs]
        found = [place for place, maker in enumerate(makers) if maker and maker.phase == "backward" and maker.name not in self.copied]
        there = all(self._is_in(name, stages) for place, name in enumerate(op.inputs) if place not in found)
        linear = len(op.outputs) == 1 and tuple(found) in find_rule(op, self.graph.tensors).flows
        return tuple(found) if there and linear and len(found) == 1 else ()

    def _is_in(self, tensor: str, stages: Sequence[int]) -> bool:
        """Whether each of some stages has a tensor of forward without receiving it in backward."""
        return not self._crosses(tensor) or self.readers.get(tensor, set()).issuperset(stages)

    def _ops_of(self, stage: int) -> tuple[Op, ...]:
        """The operators that a stage runs, in order, with the copied ones that these read."""
        rewritten, _ = self.apart
        wanted = {self.graph.accumulation.divisor} | {output.tensor for output, _ in self._outputs(stage)}
        found = list[Op]()
        for op in reversed(self.graph.ops):
            if op.name in rewritten:
                mine = rewritten[op.name].get(stage)
            elif op.name in self.copied:
                mine = op if not wanted.isdisjoint(op.outputs) else None
            else:
                mine = op if self.stage[op.name] == stage else None
            if mine is not None:
                found.append(mine)
                wanted.update(mine.inputs)
        return tuple(reversed(found))

    def _outputs(self, stage: int) -> Iterable[tuple[GraphOutput, GraphOutput]]:
        """The outputs that a stage gives, each with that of the whole graph."""
        _, own = self.apart
        for output in self.graph.outputs:
            if output in own:
                if stage in own[output]:
                    yield replace(output, tensor=own[output][stage]), output
            elif self._home(output) == stage:
                yield output, output

    def _home(self, output: GraphOutput) -> int:
        """The stage that an output leaves: of a gradient the one that holds its parameter."""
        if output.kind == "gradient":
            return min(self.readers[self.graph.owners[output]])
        maker = self.graph.producer.get(output.tensor)
        return self.stage.get(maker.name, self.count - 1) if maker is not None else self.count - 1

    def _crossing(self, stage: int, ops: Sequence[Op]) -> dict[str, int]:
        """The tensors that a stage reads and another makes, with that one."""
        made = {name for op in ops for name in op.outputs}
        read = [name for op in ops for name in op.inputs] + [output.tensor for output, _ in self._outputs(stage)]
        read.append(self.graph.accumulation.divisor)
        found = dict.fromkeys(name for name in read if name not in made and self._crosses(name))
        return {name: self.stage[self.graph.producer[name].name] for name in found}

    def _graph(self, stage: int, ops: tuple[Op, ...], boundaries: Sequence[Boundary]) -> Graph:
        graph, made = self.graph, {name for op in ops for name in op.outputs}
        read = {name for op in ops for name in op.inputs}
        outputs = [output for output, _ in self._outputs(stage)]
        mine = {name for name in self.entering if name in read or stage in self.readers.get(name, ())}
        mine.update(output.tensor for output in outputs if output.tensor in self.entering)
        inputs = [item for item in graph.inputs if item.tensor in mine]
        received = {one.tensor: one for one in boundaries if one.target == stage}
        inputs += [
            GraphInput(name, "input" if one.half == "forward" else "tangent", RECEIVE + name) for name, one in received.items()
        ]  # fmt: skip
        sent = dict.fromkeys(one.tensor for one in boundaries if one.source == stage)
        outputs += [GraphOutput(name, "output", SEND + name) for name in sent]
        names = {op.name for op in ops}
        groups = (tuple(repeat for repeat in group if names.issuperset(repeat)) for group in graph.groups)
        tensors = {name: tensor for name, tensor in graph.tensors.items() if name in made or name in mine or name in received}
        accumulation = graph.accumulation
        cut = tuple(name for name in accumulation.cut if name in mine)
        divisor = accumulation.divisor if accumulation.divisor in tensors else ""
        whole = Graph(
            "train", tensors, tuple(inputs), ops, tuple(outputs), tuple(group for group in groups if len(group) > 1), graph.arguments
        )
        return whole.accumulated(replace(accumulation, cut=cut, divisor=divisor)) if accumulation != Accumulation() else whole
