"""Rules of reading and writing by index: the indexed dims are whole, the index's own dims and all others are free."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.rules.signature import OperatorCall, refs
from autopar.rules.writing import letters, write


def index(call: OperatorCall) -> str:
    """The indexed dims are whole; the index's own dims and the others are free."""
    if _masks(call):
        return _whole(call)
    words, placed, result = _indexing(call)
    indices = [_index_term(call, item, placed) for item in refs(call.arguments["indices"])]
    return write([words, *indices], [result], "linear {0}")


def index_put(call: OperatorCall) -> str:
    """The indexed dims are whole; the values' index dims add up when they accumulate; a mask with one value is elementwise."""
    if _masks(call):
        return _masked_put(call)
    words, placed, result = _indexing(call)
    indices = [_index_term(call, item, placed) for item in refs(call.arguments["indices"])]
    (values,) = refs(call.arguments["values"])
    shape = call.shape(values)
    given = ["1" if extent == 1 else word for extent, word in zip(shape, result[len(result) - len(shape) :], strict=True)]
    summed = [word for word in placed if call.arguments["accumulate"] and word in given]
    terms = [[word if word in summed or word not in placed else f"{word}!" for word in term] for term in ([*indices, given])]
    whole = [*words, *(f"+{word}" for word in summed)]
    return write([whole, *terms], [whole], f"linear {{0 {values}}}")


def _masks(call: OperatorCall) -> bool:
    return any(call.inputs[item].dtype == "bool" for item in refs(call.arguments["indices"]))


def _whole(call: OperatorCall, clause: str = "") -> str:
    """Nothing is split."""
    return write([["_"] * len(tensor.shape) for tensor in call.inputs], [["_"] * len(call.result())], clause)


def _masked_put(call: OperatorCall) -> str:
    """``x[mask] = value``: free in every dim when there is one mask and one value, else whole."""
    indices = call.arguments["indices"]
    masks, (values,) = refs(indices), refs(call.arguments["values"])
    if len(masks) > 1 or call.inputs[values].elements != 1:
        return _whole(call)
    words = letters(len(call.shape(0)))
    first = next(dim for dim, item in enumerate(indices) if item is not None)
    mask = words[first : first + len(call.shape(masks[0]))]
    return write([words, mask, ["1"] * len(call.shape(values))], [words], f"linear {{0 {values}}}")


def _indexing(call: OperatorCall) -> tuple[list[str], list[str], list[str]]:
    """(words of the indexed tensor, words of the broadcast index, words of what indexing it gives)."""
    indices = call.arguments["indices"]
    rank = len(call.shape(0))
    indexed = [dim for dim, item in enumerate(indices) if item is not None]
    depth = max((len(call.shape(item)) for item in refs(indices)), default=0)
    names = letters(rank + depth)
    words = ["_" if dim in indexed else names[dim] for dim in range(rank)]
    placed = names[rank:]
    adjacent = bool(indexed) and indexed == list(range(indexed[0], indexed[-1] + 1))
    before = [names[dim] for dim in range(indexed[0])] if adjacent else []
    after = [names[dim] for dim in range(rank) if dim not in indexed and names[dim] not in before]
    return words, placed, before + placed + after


def _index_term(call: OperatorCall, position: int, placed: list[str]) -> list[str]:
    shape = call.shape(position)
    words = placed[len(placed) - len(shape) :]
    broadcast = [other for other in refs(call.arguments["indices"]) if other != position]
    extents = [1] * len(placed)
    for other in (*broadcast, position):
        for offset, extent in enumerate(reversed(call.shape(other))):
            extents[-1 - offset] = max(extents[-1 - offset], extent)
    full = extents[len(extents) - len(shape) :]
    return ["1" if extent == 1 and whole != 1 else word for word, extent, whole in zip(words, shape, full, strict=True)]


def searched(call: OperatorCall) -> str:
    """Where values belong in a sorted row: one row for all, or a row for each of the leading dims."""
    if len(call.shape(0)) == 1:
        return "_, ... -> ..."
    words = letters(len(call.shape(0)))
    return write([[*words[:-1], "_"], words], [words])


def gather(call: OperatorCall) -> str:
    """The indexed dim is whole, the index's size along it free."""
    if _has_numbers(call):
        return _whole(call, "linear {0}")
    words, index_words = _along_index(call)
    return write([words, index_words], [index_words], "linear {0}")


def scatter(call: OperatorCall) -> str:
    """The indexed dim is whole."""
    count = len(refs(call.arguments.get("src")))
    clause = "linear {0 2}" if count else ""
    if _has_numbers(call):
        return _whole(call, clause)
    words, index_words = _along_index(call, whole=True)
    return write([words, index_words, *[index_words] * count], [words], clause)


def scatter_add(call: OperatorCall) -> str:
    """The indexed dim is whole; parts of the source add up."""
    if _has_numbers(call) or call.shape(2) != call.shape(1):
        return _whole(call, "linear {0 2}")
    words, index_words = _along_index(call)
    summed = [*words, f"+{index_words[call.arguments['dim']]}"]
    return write([summed, index_words, index_words], [summed], "linear {0 2}")


_EXTREMES: Mapping[object, str] = {"amax": "max", "amin": "min"}
"""Reductions to which each part may add the old value: it counts the same once or often."""


def scatter_reduce(call: OperatorCall) -> str:
    """The indexed dim is whole; extremes of parts of the source are partial where what was there before is among them."""
    (source,) = refs(call.arguments["src"])
    if _has_numbers(call) or call.shape(source) != call.shape(1):
        return _whole(call)
    partial = _of_parts(call)
    words, index_words = _along_index(call, whole=not partial)
    return write([words, index_words, index_words], [[*words, *(f"+{index_words[call.arguments['dim']]}:{how}" for how in partial)]])


def index_reduce(call: OperatorCall) -> str:
    """As scatter_reduce, by one index for all other dims."""
    names, rank, partial = letters(len(call.shape(0)) + 1), len(call.shape(0)), _of_parts(call)
    index = names[-1] if partial else f"{names[-1]}!"
    words = [("_", index) if dim == call.arguments["dim"] % rank else (names[dim],) * 2 for dim in range(rank)]
    whole, source = ([word[at] for word in words] for at in (0, 1))
    return write([whole, [index], source], [[*whole, *(f"+{index}:{how}" for how in partial)]])


def _of_parts(call: OperatorCall) -> list[str]:
    """How results of parts of the source become one, if they do."""
    return [_EXTREMES[call.arguments["reduce"]]] if call.arguments["reduce"] in _EXTREMES and call.arguments["include_self"] else []


def _has_numbers(call: OperatorCall) -> bool:
    """Whether a tensor has no dims: the others have at most one then, and it stands for one of size 1."""
    return any(not tensor.shape for tensor in call.inputs)


def _along_index(call: OperatorCall, *, whole: bool = False) -> tuple[list[str], list[str]]:
    """Words of a tensor and of an index of as many dims: dims of equal size are shared, the indexed one is not."""
    shape = call.shape(0)
    (position,) = refs(call.arguments["index"])
    names = letters(len(shape) + 1)
    words, index_words = [], []
    for at, (extent, size) in enumerate(zip(shape, call.shape(position), strict=True)):
        indexed = at == call.arguments["dim"] % len(shape)
        words.append(names[at] if extent == size and not indexed else "_")
        index_words.append((names[-1] + "!" if whole else names[-1]) if indexed else words[-1])
    return words, index_words


def embedding_backward(call: OperatorCall) -> str:
    """The table's rows are whole; rows of the gradient add up, unless scaled by how often each occurs."""
    whole = "!" if call.arguments["scale_grad_by_freq"] else ""
    return f"...{whole} k, ... -> _ k | linear {{0}}"


def negative_log_likelihood(call: OperatorCall) -> str:
    """Rows are free when the losses are not reduced."""
    weight = "" if call.arguments["weight"] is None else ", c!"
    if len(call.shape(0)) != 2:
        return f"c!, _...{weight} -> _..., ()"
    return f"n c!, n{weight} -> n, ()" if call.arguments["reduction"] == 0 else f"n! c!, n!{weight} -> (), ()"
