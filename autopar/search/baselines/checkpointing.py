"""Activation checkpointing: which forward operators a person would recompute in backward.

=========  ===============================================================================================================
full       Each layer keeps its inputs only. Backward recomputes everything else that it needs.
selective  Attention keeps products with its parameters (the projections) only. Products of activations, softmax, rotations
           and all operators between them are recomputed (Korthikanti et al. 2022).
=========  ===============================================================================================================

A layer is the outermost module whose name is a number (``layers.3``). Tensors that leave a layer are kept, as are tensors made of
parameters alone. An operator that may not run twice (``rules.why_once``) keeps its results.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from autopar import pricing
from autopar.cost_models import Machine
from autopar.graph import Graph, Op, layer_of
from autopar.rules import family, why_once
from autopar.schedule import AGAIN, OUTPUT, Assignment, Layout

SCORES = 4
"""Dims of the softmax input in an attention that is not one operator: batch, heads, queries, keys."""


def full_policy(graph: Graph) -> frozenset[str]:
    """Names of the operators that are recomputed when each layer keeps its inputs only."""
    weights = _made_of_weights(graph)
    inside = (op for op in graph.ops if not (op.inputs and weights.issuperset(op.inputs)))
    return _recomputable_inside(graph, {op.name: layer for op in inside if (layer := layer_of(op.module))})


def selective_policy(graph: Graph) -> frozenset[str]:
    """Names of the operators that are recomputed when each attention keeps only products with its parameters."""
    holding = {op.module for op in graph.ops if op.phase == "forward" and op.module and _is_attention(op, graph)}
    weights = _made_of_weights(graph)

    def home(op: Op) -> str:
        found = [path for path in holding if op.module == path or op.module.startswith(f"{path}.")]
        return min(found, key=len, default="")

    inside = {op.name: home(op) for op in graph.ops if not any(tensor in weights for tensor in op.inputs)}
    return _recomputable_inside(graph, {name: path for name, path in inside.items() if path})


def _is_attention(op: Op, graph: Graph) -> bool:
    scores = op.target.startswith("aten._softmax.") and len(graph.tensors[op.inputs[0]].shape) == SCORES
    return family(op) == "attention" or scores


POLICIES: Mapping[str, Callable[[Graph], frozenset[str]]] = {"selective": selective_policy, "full": full_policy}
"""Policies by name, the one that costs less time first. Each returns the names of the operators to recompute."""


def _made_of_weights(graph: Graph) -> set[str]:
    """Parameters, and the tensors made of parameters alone."""
    found = {item.tensor for item in graph.of_kind("parameter")}
    for op in graph.ops:
        if op.inputs and all(tensor in found for tensor in op.inputs):
            found.update(op.outputs)
    return found


def _recomputable_inside(graph: Graph, home: Mapping[str, str]) -> frozenset[str]:
    """Names of the forward operators with a home that may run twice and make nothing for forward operators elsewhere."""
    leaving = {output.tensor for output in graph.outputs}

    def stays(op: Op) -> bool:
        readers = [graph.ops[index] for tensor in op.outputs for index, _ in graph.consumers[tensor]]
        return not leaving & set(op.outputs) and all(
            home.get(reader.name) == home[op.name] for reader in readers if reader.phase == "forward"
        )  # fmt: skip

    return frozenset(
        op.name for op in graph.ops if op.phase == "forward" and op.name in home and not why_once(op) and stays(op)
    )  # fmt: skip


def apply_policies(graph: Graph, assignment: Assignment, machine: Machine) -> Iterator[tuple[str, Assignment]]:
    """Yields (policy name, assignment) for each of ``POLICIES`` that recomputes another operator."""
    for name, policy in POLICIES.items():
        names = policy(graph)
        if names - assignment.again:
            yield name, recompute(graph, assignment, names, machine)


def recompute(graph: Graph, assignment: Assignment, names: Collection[str], machine: Machine) -> Assignment:
    """The assignment that also recomputes the operators ``names`` in backward.

    Backward reads a recomputed tensor in the specs in which it read the kept one. A recomputed operator reads what its first run read,
    recomputed or kept. Of a kept tensor and its reshards the smallest is kept, and the later reshards run again. Parameters are gathered
    again, unless backward keeps them gathered anyway.

    Raises:
        ValueError: an operator may not run twice, or is not one of forward.
    """
    for name in names:
        reason = why_once(graph.op[name]) if graph.op[name].phase == "forward" else "it is of backward"
        if reason:
            raise ValueError(f"{name} may not run a second time: {reason}")
    return _RecomputeRewrite(graph, assignment, frozenset(names) | assignment.again, machine).run()


class _RecomputeRewrite:
    """One rewrite of an assignment: the stand-in of each forward value in backward."""

    def __init__(self, graph: Graph, assignment: Assignment, names: frozenset[str], machine: Machine) -> None:
        self.graph, self.assignment, self.names, self.machine = graph, assignment, names - assignment.once, machine
        self.reads = dict(assignment.reads or {})
        self.layouts = {layout.value: layout for layout in assignment.layouts}
        self.recomputed = {tensor for name in self.names for tensor in graph.op[name].outputs}
        self.kept = {value for value in self._read_in_backward() if self._tensor(value) not in self.recomputed}

    def run(self) -> Assignment:
        for layout in tuple(self.layouts.values()):
            if layout.half == "backward":
                source = self._stand_in(layout.source, layout.before)
                self.layouts[layout.value] = replace(self.layouts[layout.value], source=source)
        for reader, position, value in self._readers():
            if self._tensor(value) in self.recomputed:
                self._read(reader, position, self._stand_in(value, reader))
        for op in self.graph.ops:  # graph order: ``names`` is a set
            for position, tensor in enumerate(op.inputs) if op.name in self.names else ():
                if (op.name + AGAIN, position) not in self.reads:
                    value = self.reads.get((op.name, position), tensor)
                    self._read(op.name + AGAIN, position, self._stand_in(value, op.name + AGAIN))
        return replace(self.assignment, layouts=tuple(self.layouts.values()), reads=self.reads, again=self.names)

    def _readers(self) -> Iterable[tuple[str, int, str]]:
        """Yields every read in backward: reader, position, value."""
        for op in self.graph.ops:
            if op.phase == "backward":
                for position, tensor in enumerate(op.inputs):
                    yield op.name, position, self.reads.get((op.name, position), tensor)
        for index, output in enumerate(self.graph.outputs):
            producer = self.graph.producer.get(output.tensor)
            if output.kind == "gradient" and (producer is None or producer.phase == "backward"):
                yield f"{OUTPUT}{index}", 0, self.reads.get((f"{OUTPUT}{index}", 0), output.tensor)

    def _read_in_backward(self) -> Iterable[str]:
        """Yields the values that exist in backward: operators read them, or reshards start from them."""
        yield from (value for _, _, value in self._readers())
        yield from (layout.source for layout in self.layouts.values() if layout.half == "backward")

    def _tensor(self, value: str) -> str:
        return self.layouts[value].tensor if value in self.layouts else value

    def _read(self, reader: str, position: int, value: str) -> None:
        self.reads[reader, position] = value

    def _stand_in(self, value: str, reader: str) -> str:
        """The value that stands for ``value`` in backward."""
        if value not in self.layouts:
            return value + AGAIN if value in self.recomputed else value
        layout = self.layouts[value]
        if layout.half == "backward" or (layout.tensor not in self.recomputed and self._is_kept(value)):
            return value
        made = value + AGAIN
        if made not in self.layouts:
            source = self._stand_in(layout.source, reader)
            self.layouts[made] = Layout(made, layout.tensor, source, layout.spec, "backward", reader)
        return made

    def _is_kept(self, value: str) -> bool:
        """Whether a reshard of a kept tensor is kept itself: all microbatches or backward read it, or it is no larger than anything it is
        made from."""
        layout = self.layouts[value]
        if layout.once and self.graph.microbatches > 1:
            return True
        return value in self.kept or (layout.tensor in self.graph.producer and self._bytes(value) <= self._least_bytes(layout.source))

    def _least_bytes(self, value: str) -> int:
        """Bytes of the smallest value in the chain of reshards that ends at ``value``."""
        return min([self._bytes(value)] + ([self._least_bytes(self.layouts[value].source)] if value in self.layouts else []))

    def _bytes(self, value: str) -> int:
        tensor = self._tensor(value)
        if value in self.layouts:
            spec = self.layouts[value].spec
        elif tensor in self.graph.producer:
            op = self.graph.producer[tensor]
            spec = self.assignment.strategies[op.name].outputs[op.outputs.index(tensor)]
        else:
            spec = self.assignment.inputs[tensor]
        return pricing.local_bytes(self.graph.tensors[tensor], spec, self.machine)
