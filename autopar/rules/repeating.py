"""Views that repeat: several of their elements lie at one place of memory, as along an expanded dim or in windows that overlap.

Such a view takes less memory than its size. Here it is found on whole tensors, for who must know before it is chosen how operators are
cut; how a value of a list lies on a rank is said by ``memory_order``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autopar.graph import Graph, Op, Tensor
from autopar.rules.facts import is_alias, stores
from autopar.rules.lookup import find_rule

Repeated = Mapping[int, int]
"""The dims of a view along which elements are repeated, each with the number of entries that memory has for it. Empty: it is dense."""
DENSE: Repeated = {}
UNNAMED = "_"
"""A factor that no axis splits. A dim without factors is one too."""


def find_repeated(graph: Graph) -> Mapping[str, Repeated]:
    """The tensors that are views which repeat, as long as nothing is resharded in between."""
    found: dict[str, Repeated] = {}
    for op in graph.ops:
        if op.inputs and is_alias(op):
            made = zip(op.outputs, repeated_dims(op, graph.tensors, found.get(op.inputs[0], DENSE)), strict=True)
            found.update((tensor, dims) for tensor, dims in made if dims)
    return found


def find_expanded(graph: Graph) -> Mapping[str, Repeated]:
    """The results of expansions, each with what its own operator repeats: it does so however the source was resharded before."""
    found: dict[str, Repeated] = {}
    for op in graph.ops:
        if is_expansion(op, graph.tensors):
            made = zip(op.outputs, repeated_dims(op, graph.tensors, DENSE), strict=True)
            found.update((tensor, dims) for tensor, dims in made if dims)
    return found


def is_expansion(op: Op, tensors: Mapping[str, Tensor]) -> bool:
    """Whether an operator is a view that is larger than its source. A reshard costs less before it than after it."""
    return bool(op.inputs) and is_alias(op) and any(tensors[name].elements > tensors[op.inputs[0]].elements for name in op.outputs)


def repeated_dims(op: Op, tensors: Mapping[str, Tensor], given: Repeated) -> tuple[Repeated, ...]:
    """The repeated dims of each output of a view.

    Args:
        given: those of its input.
    """
    source = tensors[op.inputs[0]]
    shapes = [tensors[name].shape for name in op.outputs]
    if stores(op) or not (given or is_expansion(op, tensors)):
        return (given,) * len(shapes)
    rule, stored = find_rule(op, tensors), dict[str, int]()
    for dim, names in enumerate(rule.inputs[0]):
        named = [name for name in names if name != UNNAMED]
        stored.update((name, 1 if dim in given else rule.extent[name]) for name in named)
        stored.update((name, given[dim]) for name in named[:1] if dim in given)
    return tuple(_of_output(names, shape, source.shape, stored, given) for names, shape in zip(rule.outputs, shapes, strict=True))


def _of_output(
    factors: Sequence[Sequence[str]], shape: Sequence[int], source: Sequence[int], stored: Mapping[str, int], given: Repeated
) -> Repeated:  # fmt: skip
    """The repeated dims of one output.

    Args:
        factors: of each of its dims.
        stored: the entries that memory has for each factor of the input; it has one for all others.
    """
    found, unnamed = dict[int, int](), list[int]()
    for dim, names in enumerate(factors):
        if not names or UNNAMED in names:
            unnamed.append(dim)
            found.update({dim: given[dim]} if len(source) == len(shape) and dim in given else {})
        elif (entries := math.prod(stored.get(name, 1) for name in names)) != shape[dim]:
            found[dim] = entries
    had, has = stored_elements(source, given), stored_elements(shape, found)
    if has > had and unnamed:  # windows of a whole dim
        others = has // math.prod(found.get(dim, shape[dim]) for dim in unnamed)
        found.update(dict.fromkeys(unnamed, 1))
        found[unnamed[0]] = had // others
    return found


def stored_elements(shape: Sequence[int], repeated: Repeated) -> int:
    """The elements that memory has of a view, or of a rank's part of it."""
    return math.prod(repeated.get(dim, extent) for dim, extent in enumerate(shape))


def repeats(shape: Sequence[int], repeated: Repeated) -> bool:
    """Whether memory has fewer elements than a view, or than a rank's part of it, of this shape."""
    return bool(repeated) and math.prod(shape) > stored_elements(shape, repeated)
