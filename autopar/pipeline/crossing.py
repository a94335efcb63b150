"""What crosses from stage to stage: in which layout, at which price, and the pins that make both sides agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.cost_models import Machine, Mesh
from autopar.graph import DTYPE_BYTES, Graph
from autopar.pipeline.cutting import Stages
from autopar.search.choices.pins import resolve_pins
from autopar.sharding import ShardingSpec, Strategy


def crossing_specs(stages: Stages, graph: Graph, sizes: Sequence[int], strategies: Mapping[str, Strategy]) -> dict[str, ShardingSpec]:
    """The layout in which each value crosses: the smallest of those that a plan of the whole graph makes or reads it in.

    Partial sums are reduced before they cross, and each rank's part has the same size.

    Args:
        graph: whole, of one microbatch.
        sizes: of the axes of a stage's mesh.
        strategies: of the operators of the whole graph, by name.
    """
    found = dict[str, ShardingSpec]()
    for boundary in stages.boundaries:
        name, shape = boundary.tensor, graph.tensors[boundary.tensor].shape
        maker = graph.producer[name]
        offered = [strategies[maker.name].outputs[maker.outputs.index(name)]]
        offered += [strategies[graph.ops[index].name].inputs[place] for index, place in graph.consumers[name]]
        even = [spec for spec in offered if not spec.partial and not spec.blocks and spec.problem(shape, sizes) is None]
        even = [spec for spec in even if spec.is_even(shape, sizes)]
        found[name] = min(even, key=lambda spec: _elements(spec, shape, sizes), default=ShardingSpec.replicated(len(shape)))
    return found


def crossing_pins(graph: Graph, specs: Mapping[str, ShardingSpec]) -> dict[str, str]:
    """The layouts of what a stage's graph receives and sends."""
    found = {f"{item.kind}:{item.name}": str(specs[item.tensor]) for item in graph.inputs if item.is_received}
    return found | {f"output:{output.name}": str(specs[output.tensor]) for output in graph.outputs if output.is_sent}


def stage_pins(graph: Graph, whole: Graph, mesh: Mesh, pins: Mapping[str, str]) -> dict[str, str]:
    """The user's pins on what a stage holds, by the exact names of its inputs and operators.

    Args:
        graph, whole: of the stage, and that which was cut.
        pins: as for ``resolve_pins``, on the whole graph.
    """
    found, mine = dict[str, str](), {op.name for op in graph.ops}
    for name, text in pins.items():
        resolved = resolve_pins(whole, mesh, {name: text})
        for item in graph.inputs:
            if item.tensor in resolved.inputs:
                found[item.name if item.kind in ("parameter", "buffer") else f"{item.kind}:{item.name}"] = text
        makers = [whole.producer[tensor].name for tensor in resolved.tensors]
        found.update((f"op:{maker}", text) for maker in makers if maker in mine)
    return found


def tied_pins(graph: Graph, stages: Stages, before: Sequence[Mapping[str, ShardingSpec]], sizes: Sequence[int]) -> dict[str, str]:
    """Tied parameters lie as in the first stage that holds them, whose gradients theirs are added to.

    What several stages of a rank read is held once, so frozen parameters and buffers lie alike in these.

    Args:
        graph: of a stage.
        before: for each stage before it the specs of its inputs, by tensor.
    """
    pins, position = {}, stages.position(len(before))
    for item in graph.inputs:
        if item.kind in ("parameter", "buffer"):
            tied = stages.tied.get(item.tensor, ())
            earlier = (specs[item.tensor] for stage, specs in enumerate(before)
                       if item.tensor in specs and (stage in tied or stages.position(stage) == position))  # fmt: skip
            spec = next(earlier, None)
            if spec is not None:
                pins[item.name] = str(item.own_spec(spec, sizes))
    return pins


def join_pins(
    graph: Graph, whole: Graph, mesh: Mesh, pins: Mapping[str, str], specs: Mapping[str, ShardingSpec], stages: Stages,
    before: Sequence[Mapping[str, ShardingSpec]],
) -> dict[str, str]:  # fmt: skip
    """All pins of a stage's graph. Arguments are those of ``stage_pins``, ``crossing_pins`` and ``tied_pins``. Later ones win."""
    return stage_pins(graph, whole, mesh, pins) | crossing_pins(graph, specs) | tied_pins(graph, stages, before, mesh.sizes)


def transfer_seconds(machine: Machine, stages: Stages, graph: Graph, specs: Mapping[str, ShardingSpec]) -> float:
    """Seconds of the largest value that crosses, on one rank.

    Args:
        machine: of all ranks.
        graph: whole, of one microbatch.
    """
    sizes, largest = machine.mesh.sizes[1:] or (1,), 0
    for boundary in stages.boundaries:
        tensor = graph.tensors[boundary.tensor]
        largest = max(largest, _elements(specs[tensor.name], tensor.shape, sizes) * DTYPE_BYTES[tensor.dtype])
    return machine.collective_seconds("permute", largest * machine.mesh.sizes[0], (machine.mesh.whole(0),)) if largest else 0.0


def _elements(spec: ShardingSpec, shape: tuple[int, ...], sizes: Sequence[int]) -> int:
    size = 1
    for length in spec.local_shape(shape, sizes):
        size *= length
    return size
