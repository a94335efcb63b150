"""The operators whose rule depends on their arguments in a way no row can say: each function writes the rule of one call."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence

from autopar.graph import DTYPE_BYTES
from autopar.rules.signature import Call, refs

Shape = tuple[int, ...]


def _names(count: int) -> list[str]:
    letters = string.ascii_letters
    return list(letters[:count]) if count <= len(letters) else [f"d{index}" for index in range(count)]


def _term(words: Sequence[str]) -> str:
    return " ".join(words) if words else "()"


def _rule(inputs: Sequence[Sequence[str]], outputs: Sequence[Sequence[str]], clause: str = "") -> str:
    return f"{', '.join(map(_term, inputs))} -> {', '.join(map(_term, outputs))}" + (f" | {clause}" if clause else "")


def contract(call: Call) -> str:
    """Its own equation."""
    return f"{call.arguments['equation']} | linear {{0}} {{1}}"


def view(call: Call) -> str:
    """The common factors of both shapes, major to minor."""
    inputs, outputs = refine(call.shape(0), call.result())
    return _rule([inputs], [outputs], "linear {0}")


def refine(first: Shape, second: Shape) -> tuple[list[str], list[str]]:
    """The dims of two shapes of equally many elements, in row-major order, as words of common factors.

    Where the sizes stop dividing one another, the rest of that stretch stays whole.

    >>> refine((4, 6), (8, 3))
    (['a=4', '(b=2 c=3)'], ['(a=4 b=2)', 'c=3'])
    >>> refine((6, 4), (4, 6))
    (['(a=2 _)', '_'], ['(a=2 _)', '_'])
    """
    if math.prod(first) == 0 or math.prod(first) != math.prod(second):
        return ["_"] * len(first), ["_"] * len(second)
    words: tuple[list[list[str]], list[list[str]]] = ([[] for _ in first], [[] for _ in second])
    names = iter(_names(len(first) + len(second)))
    i = j = 0
    left, right = (first[0] if first else 1), (second[0] if second else 1)
    while i < len(first) or j < len(second):
        if left == 1 and i < len(first):
            i += 1
            left = first[i] if i < len(first) else 1
        elif right == 1 and j < len(second):
            j += 1
            right = second[j] if j < len(second) else 1
        else:
            common = math.gcd(left, right)
            stuck = common not in (left, right)
            if common > 1:
                name = f"{next(names)}={common}"
                words[0][i].append(name)
                words[1][j].append(name)
            left, right = left // common, right // common
            if stuck:
                i, j = _skip(first, second, i, j, left, right, words)
                left, right = (first[i] if i < len(first) else 1), (second[j] if j < len(second) else 1)
    return [_dim(*item) for item in zip(words[0], first, strict=True)], [_dim(*item) for item in zip(words[1], second, strict=True)]


def _skip(
    first: Shape, second: Shape, i: int, j: int, left: int, right: int, words: tuple[list[list[str]], list[list[str]]]
) -> tuple[int, int]:  # fmt: skip
    """Past the dims up to the next place where both shapes have a boundary; what is left of them is whole."""
    words[0][i].append("_")
    words[1][j].append("_")
    while left != right:
        if left < right:
            i += 1
            left *= first[i]
            words[0][i].append("_")
        else:
            j += 1
            right *= second[j]
            words[1][j].append("_")
    return i + 1, j + 1


def _dim(words: list[str], extent: int) -> str:
    if not words:
        return "1" if extent == 1 else "_"
    return words[0] if len(words) == 1 else f"({' '.join(words)})"


def permute(call: Call) -> str:
    """Its dims in their new order."""
    names = _names(len(call.shape(0)))
    return _rule([names], [[names[dim] for dim in call.arguments["dims"]]], "linear {0}")


def transpose(call: Call) -> str:
    """Two dims change places."""
    names = _names(len(call.shape(0)))
    if not names:
        return _rule([names], [names], "linear {0}")
    a, b = call.arguments["dim0"], call.arguments["dim1"]
    turned = list(names)
    turned[a], turned[b] = names[b], names[a]
    return _rule([names], [turned], "linear {0}")


def squeeze(call: Call) -> str:
    """Dims of size 1 disappear; another dim that is named is never split down to 1, or it would disappear on the ranks."""
    shape = call.shape(0)
    dims = set(range(len(shape)))
    if "dim" in call.arguments:
        given = call.arguments["dim"]
        dims = {dim % max(len(shape), 1) for dim in ((given,) if isinstance(given, int) else given)}
    words = ["1" if extent == 1 else name for name, extent in zip(_names(len(shape)), shape, strict=True)]
    for dim in dims:
        if shape and shape[dim] > 1:
            words[dim] = _never_single(words[dim], shape[dim])
    return _rule([words], [[word for dim, word in enumerate(words) if not (dim in dims and word == "1")]], "linear {0}")


def _never_single(name: str, extent: int) -> str:
    """A dim of which at least two elements stay together."""
    least = next(factor for factor in range(2, extent + 1) if extent % factor == 0)
    return f"({name}={extent // least} _)" if least < extent else "_"


def expand(call: Call) -> str:
    """New or grown dims are made on each rank."""
    shape, result = call.shape(0), call.result()
    names = _names(len(result))
    kept = names[len(result) - len(shape) :]
    words = ["1" if extent == 1 else name for name, extent in zip(kept, shape, strict=True)]
    return _rule([words], [names], "linear {0}")


def repeat(call: Call) -> str:
    """Each dim becomes copies of it, the copies major."""
    shape, repeats = call.shape(0), call.arguments["repeats"]
    names = _names(len(repeats))
    kept = names[len(repeats) - len(shape) :]
    words = [f"({name.upper()}{count}={count} {name})" if count else "_" for name, count in zip(names, repeats, strict=True)]
    new = len(repeats) - len(shape)
    words[:new] = [f"{name}={count}" if count else "_" for name, count in zip(names[:new], repeats[:new], strict=True)]
    return _rule([kept], [words], "linear {0}")


def slice_dim(call: Call) -> str:
    """The sliced dim is whole, unless the slice takes all of it."""
    names = _names(len(call.shape(0)))
    dim = call.arguments["dim"]
    if call.shape(0) == call.result() and call.arguments["step"] == 1:
        return _rule([names], [names], "linear {0}")
    words = list(names)
    words[dim] = "_"
    return _rule([words], [words], "linear {0}")


def pad(call: Call) -> str:
    """Padded dims are whole; linear when the padding is zero."""
    rank, amounts = len(call.shape(0)), call.arguments["pad"]
    names = _names(rank)
    for index in range(len(amounts) // 2):
        if amounts[2 * index] or amounts[2 * index + 1]:
            names[rank - 1 - index] = "_"
    return _rule([names], [names], "" if call.arguments["value"] else "linear {0}")


def roll(call: Call) -> str:
    """The rolled dims are whole."""
    names = _names(len(call.shape(0)))
    dims = call.arguments["dims"] or tuple(range(len(names)))
    for dim in (dims,) if isinstance(dims, int) else dims:
        names[dim] = "_"
    return _rule([names], [names], "linear {0}")


def index(call: Call) -> str:
    """The indexed dims are whole; the index's own dims and the others are free."""
    words, placed, result = _indexing(call)
    indices = [_index_term(call, item, placed) for item in refs(call.arguments["indices"])]
    return _rule([words, *indices], [result], "linear {0}")


def index_put(call: Call) -> str:
    """The indexed dims are whole; the values' index dims add up when they accumulate."""
    words, placed, result = _indexing(call)
    indices = [_index_term(call, item, placed) for item in refs(call.arguments["indices"])]
    (values,) = refs(call.arguments["values"])
    shape = call.shape(values)
    given = ["1" if extent == 1 else word for extent, word in zip(shape, result[len(result) - len(shape) :], strict=True)]
    summed = [word for word in placed if call.arguments["accumulate"] and word in given]
    terms = [[word if word in summed or word not in placed else f"{word}!" for word in term] for term in ([*indices, given])]
    whole = [*words, *(f"+{word}" for word in summed)]
    return _rule([whole, *terms], [whole], f"linear {{0 {values}}}")


def _indexing(call: Call) -> tuple[list[str], list[str], list[str]]:
    """(words of the indexed tensor, words of the broadcast index, words of what indexing it gives)."""
    indices = call.arguments["indices"]
    rank = len(call.shape(0))
    indexed = [dim for dim, item in enumerate(indices) if item is not None]
    shapes = [call.shape(item) for item in refs(indices)]
    if any(call.inputs[item].dtype == "bool" for item in refs(indices)):
        raise ValueError("a boolean index")
    depth = max((len(shape) for shape in shapes), default=0)
    names = _names(rank + depth)
    words = ["_" if dim in indexed else names[dim] for dim in range(rank)]
    placed = names[rank:]
    adjacent = bool(indexed) and indexed == list(range(indexed[0], indexed[-1] + 1))
    before = [names[dim] for dim in range(indexed[0])] if adjacent else []
    after = [names[dim] for dim in range(rank) if dim not in indexed and names[dim] not in before]
    return words, placed, before + placed + after


def _index_term(call: Call, position: int, placed: list[str]) -> list[str]:
    shape = call.shape(position)
    words = placed[len(placed) - len(shape) :]
    broadcast = [other for other in refs(call.arguments["indices"]) if other != position]
    extents = [1] * len(placed)
    for other in (*broadcast, position):
        for offset, extent in enumerate(reversed(call.shape(other))):
            extents[-1 - offset] = max(extents[-1 - offset], extent)
    full = extents[len(extents) - len(shape) :]
    return ["1" if extent == 1 and whole != 1 else word for word, extent, whole in zip(words, shape, full, strict=True)]


def gather(call: Call) -> str:
    """The indexed dim is whole, the index's size along it free."""
    words, index_words = _along_index(call)
    return _rule([words, index_words], [index_words], "linear {0}")


def scatter(call: Call) -> str:
    """The indexed dim is whole."""
    words, index_words = _along_index(call, whole=True)
    sources = [index_words] * len(refs(call.arguments.get("src")))
    return _rule([words, index_words, *sources], [words], "linear {0 2}" if sources else "")


def scatter_add(call: Call) -> str:
    """The indexed dim is whole; parts of the source add up."""
    words, index_words = _along_index(call)
    if not words or call.shape(2) != call.shape(1):
        words = ["_"] * len(words)
        return _rule([words, words, words], [words], "linear {0 2}")
    summed = [*words, f"+{index_words[call.arguments['dim']]}"]
    return _rule([summed, index_words, index_words], [summed], "linear {0 2}")


def _along_index(call: Call, *, whole: bool = False) -> tuple[list[str], list[str]]:
    """Words of a tensor and of an index of as many dims: dims of equal size are shared, the indexed one is not."""
    shape = call.shape(0)
    (position,) = refs(call.arguments["index"])
    names = _names(len(shape) + 1)
    words, index_words = [], []
    for at, (extent, size) in enumerate(zip(shape, call.shape(position), strict=True)):
        indexed = at == call.arguments["dim"] % len(shape)
        words.append(names[at] if extent == size and not indexed else "_")
        index_words.append((names[-1] + "!" if whole else names[-1]) if indexed else words[-1])
    return words, index_words


def convert(call: Call) -> str:
    """Elementwise; partial values pass where nothing is rounded."""
    source, target = call.inputs[0].dtype, call.outputs[0].dtype
    exact = source == target or (_floating(source) and _floating(target) and DTYPE_BYTES[target] > DTYPE_BYTES[source])
    return "... -> ..." + (" | linear {0}" if exact else "")


def _floating(name: str) -> bool:
    return name in ("float16", "bfloat16", "float32", "float64")


def masked_fill(call: Call) -> str:
    """Elementwise; linear when it fills in zeros."""
    return "..., ... -> ..." + ("" if call.arguments["value"] else " | linear {0}")


def divide(call: Call) -> str:
    """Elementwise; linear in the dividend unless it rounds."""
    return "... * -> ..." + ("" if call.arguments.get("rounding_mode") else " | linear {0}")


def full(call: Call) -> str:
    """Made on each rank; zeros are also a partial sum."""
    return "-> ..." + ("" if call.arguments["fill_value"] else " | linear {}")


def new(call: Call) -> str:
    """Made on each rank whatever the first tensor's layout."""
    names = _names(len(call.result()) + len(call.shape(0)))
    result, like = names[: len(call.result())], names[len(call.result()) :]
    return _rule([like], [[*result, *(f"~{name}" for name in like)]])


def new_full(call: Call) -> str:
    """As new; zeros are also a partial sum."""
    return new(call) + ("" if call.arguments["fill_value"] else " | linear {}")


def new_zeros(call: Call) -> str:
    """As new, and a partial sum."""
    return new(call) + " | linear {}"


def attention(call: Call) -> str:
    """Batch and heads; query heads in groups of a key head; the query sequence when not causal."""
    s = "s!" if call.arguments["causal"] else "s"
    return f"b (h g) {s} d!, b h t! d!, b h t! e!{_mask(call)} -> b (h g) s e!, b (h g) s"


def attention_backward(call: Call) -> str:
    """As attention; gradients of keys and values add up over a split query sequence; linear in the gradient."""
    s = "s!" if call.arguments["causal"] else "s"
    q, k, v = f"b (h g) {s} d!", "b h t! d!", "b h t! e!"
    return f"b (h g) s e!, {q}, {k}, {v}, b (h g) s e!, b (h g) s{_mask(call)} -> {q}, {k}, {v} | linear {{0}}"


def _mask(call: Call) -> str:
    found = refs(call.arguments["mask"])
    words = ["b?", "(h g)?", "s?", "t?"]
    return "" if not found else ", " + _term(words[4 - len(call.shape(found[0])) :])


def unfold(call: Call) -> str:
    """The windowed dim is whole."""
    names = _names(len(call.shape(0)))
    names[call.arguments["dimension"]] = "_"
    return _rule([names], [[*names, "_"]], "linear {0}")


def diagonal(call: Call) -> str:
    """The two dims it is taken from are whole."""
    names = _names(len(call.shape(0)))
    dims = {call.arguments["dim1"] % len(names), call.arguments["dim2"] % len(names)}
    rest = [name for dim, name in enumerate(names) if dim not in dims]
    words = ["_" if dim in dims else name for dim, name in enumerate(names)]
    return _rule([words], [[*rest, "_"]], "linear {0}")


def negative_log_likelihood(call: Call) -> str:
    """Rows are free when the losses are not reduced."""
    weight = "" if call.arguments["weight"] is None else ", c!"
    if len(call.shape(0)) != 2:
        return f"c!, _...{weight} -> _..., ()"
    return f"n c!, n{weight} -> n, ()" if call.arguments["reduction"] == 0 else f"n! c!, n!{weight} -> (), ()"


def convolution(call: Call) -> str:
    """Batch, groups and channels; a transposed one has its weight the other way round."""
    weight = "(g i) o _..." if call.arguments["transposed"] else "(g o) i _..."
    tensors = f"n (g={call.arguments['groups']} i) _..., {weight}"
    if call.arguments["bias"] is None:
        return f"{tensors} -> n (g o) _... | linear {{0}} {{1}}"
    return f"{tensors}, (g o) +i -> n (g o) _... | linear {{0 2}} {{1 2}}"


def unfold_backward(call: Call) -> str:
    """The windowed dim is whole."""
    names = _names(len(call.result()))
    names[call.arguments["dim"]] = "_"
    return _rule([[*names, "_"]], [names], "linear {0}")


def embedding_backward(call: Call) -> str:
    """The table's rows are whole; rows of the gradient add up, unless scaled by how often each occurs."""
    whole = "!" if call.arguments["scale_grad_by_freq"] else ""
    return f"...{whole} k, ... -> _ k | linear {{0}}"


def scatter_reduce(call: Call) -> str:
    """The indexed dim is whole."""
    (source,) = refs(call.arguments["src"])
    if call.shape(source) != call.shape(1):
        words = ["_"] * len(call.shape(0))
        return _rule([words, words, words], [words])
    words, index_words = _along_index(call, whole=True)
    return _rule([words, index_words, index_words], [words])


def add_product(call: Call) -> str:
    """The bias broadcasts, and is added once: partial where the product is."""
    bias = ["m? n?", "n?"][2 - len(call.shape(0))] if call.shape(0) else "()"
    return f"{bias} +k, m k, k n -> m n | linear {{0 1}} {{0 2}}"


def turned(call: Call) -> str:
    """A matrix's dims change places."""
    names = _names(len(call.shape(0)))
    return _rule([names], [names[::-1]], "linear {0}")
