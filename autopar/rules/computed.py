"""The operators whose rule depends on their arguments in a way no row can say: each function writes the rule of one call."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence

from autopar.graph import DTYPE_BYTES, Dtype
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


def _skip(first: Shape, second: Shape, i: int, j: int, left: int, right: int, words: tuple[list[list[str]], list[list[str]]]) -> tuple[int, int]:
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
    """Dims of size 1 disappear."""
    words = ["1" if extent == 1 else name for name, extent in zip(_names(len(call.shape(0))), call.shape(0), strict=True)]
    gone = len(words) - len(call.result())
    if "dim" in call.arguments:
        given = call.arguments["dim"]
        dims = {dim % max(len(words), 1) for dim in ((given,) if isinstance(given, int) else given)}
    else:
        dims = set(range(len(words)))
    kept = [word for dim, word in enumerate(words) if not (dim in dims and word == "1" and gone)]
    return _rule([words], [kept], "linear {0}")


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
    padded = result[len(result) - len(shape) :]
    value_words = ["1" if extent == 1 else word for extent, word in zip(shape, padded, strict=True)]
    free = [] if not call.arguments["accumulate"] else [word for word in placed if word in value_words]
    whole = {word for word in placed if word not in free}
    suffix = [f"+{word}" for word in free]
    terms = [[*words, *suffix], *indices, value_words]
    rule = _rule(terms, [[*words, *suffix]], "linear {0 2}")
    return rule if not whole else _marked(terms, [[*words, *suffix]], whole)


def _marked(terms: list[list[str]], outputs: list[list[str]], whole: set[str]) -> str:
    marked = [[word + "!" if word in whole else word for word in term] for term in terms]
    return _rule(marked, outputs, "linear {0 2}")


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
    words, index_words = _along_index(call, "index")
    return _rule([words, index_words], [index_words], "linear {0}")


def scatter(call: Call) -> str:
    """The indexed dim is whole."""
    words, index_words = _along_index(call, "index")
    whole = [word + "!" if dim == call.arguments["dim"] % max(len(words), 1) and word != "_" else word for dim, word in enumerate(index_words)]
    sources = [list(whole)] * len(refs(call.arguments.get("src")))
    return _rule([words, whole, *sources], [words], "linear {0 2}" if sources else "")


def scatter_add(call: Call) -> str:
    """The indexed dim is whole; parts of the source add up."""
    words, index_words = _along_index(call, "index")
    dim = call.arguments["dim"]
    if not words or call.inputs[2].shape != call.inputs[1].shape:
        words, index_words = ["_"] * len(words), ["_"] * len(index_words)
        return _rule([words, index_words, index_words], [words], "linear {0 2}")
    summed = [*words, f"+{index_words[dim]}"]
    return _rule([summed, index_words, index_words], [summed], "linear {0 2}")


def _along_index(call: Call, name: str) -> tuple[list[str], list[str]]:
    """Words of a tensor and of an index of as many dims: dims of equal size are shared, the indexed one is not."""
    shape, dim = call.shape(0), call.arguments["dim"]
    (position,) = refs(call.arguments[name])
    other = call.shape(position)
    names = _names(len(shape) + 1)
    words, index_words = [], []
    for at, (extent, size) in enumerate(zip(shape, other, strict=True)):
        if at == dim % len(shape):
            words.append("_")
            index_words.append(names[-1])
        else:
            words.append(names[at] if extent == size else "_")
            index_words.append(names[at] if extent == size else "_")
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
    zero = not call.arguments.get("fill_value", 0)
    return "-> ..." + (" | linear {}" if zero else "")


def new_full(call: Call) -> str:
    """Made on each rank whatever the first tensor's layout; zeros are also a partial sum."""
    names = _names(len(call.result()) + len(call.shape(0)))
    result, like = names[: len(call.result())], names[len(call.result()) :]
    zero = not call.arguments.get("fill_value", 0)
    return _rule([like], [[*result, *(f"~{name}" for name in like)]], "linear {}" if zero else "")


def attention(call: Call) -> str:
    """Batch and heads; query heads in groups of a key head; the query sequence when not causal."""
    s = "s!" if call.arguments["causal"] else "s"
    mask = _mask(call)
    return f"b (h g) {s} d!, b h t! d!, b h t! e!{mask} -> b (h g) s e!, b (h g) s"


def attention_backward(call: Call) -> str:
    """As attention; gradients of keys and values add up over a split query sequence; linear in the gradient."""
    s = "s!" if call.arguments["causal"] else "s"
    q, k, v = f"b (h g) {s} d!", "b h t! d!", "b h t! e!"
    g = " +g" if call.shape(1)[1] != call.shape(2)[1] else ""
    mask = _mask(call)
    return f"b (h g) s e!, {q}, {k}, {v}, b (h g) s e!, b (h g) s{mask} -> {q}, {k}{g}, {v}{g} | linear {{0}}"


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
    batched, weights = len(call.shape(0)) == 2, call.arguments["weight"] is not None
    rows = "n" if batched and call.arguments["reduction"] == 0 else "n!"
    classes = "c! -> " if not batched else f"{rows} c!, {rows}"
    if not batched:
        return f"c!, (){', c!' if weights else ''} -> (), ()"
    return f"{classes}{', c!' if weights else ''} -> {'n' if rows == 'n' else '_...'}, ()"


def convolution(call: Call) -> str:
    """Batch, groups and channels; a transposed one has its weight the other way round."""
    weight = "(g i) o _..." if call.arguments["transposed"] else "(g o) i _..."
    bias = "" if call.arguments["bias"] is None else ", (g o) +i"
    g = f"g={call.arguments['groups']}"
    return f"n ({g} i) _..., {weight}{bias} -> n (g o) _... | linear {{0}} {{1}}" if not bias else (
        f"n ({g} i) _..., {weight}{bias} -> n (g o) _... | linear {{0 2}} {{1 2}}"
    )  # fmt: skip


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
    words, index_words = _along_index(call, "index")
    (source,) = refs(call.arguments["src"])
    if call.shape(source) != call.shape(1):
        words, index_words = ["_"] * len(words), ["_"] * len(index_words)
        return _rule([words, index_words, ["_"] * len(call.shape(source))], [words])
    marked = [word + "!" if dim == call.arguments["dim"] % len(words) else word for dim, word in enumerate(index_words)]
    return _rule([words, marked, marked], [words])
