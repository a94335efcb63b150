"""Rules of views, permutations, expansions and slices, written from shapes and arguments."""

from __future__ import annotations

import math

from autopar.rules.signature import OperatorCall
from autopar.rules.writing import letters, write

Shape = tuple[int, ...]


def view(call: OperatorCall) -> str:
    """The common factors of both shapes, major to minor."""
    inputs, outputs = refine(call.shape(0), call.result())
    return write([inputs], [outputs], "linear {0}")


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
    names = iter(letters(len(first) + len(second)))
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


def permute(call: OperatorCall) -> str:
    """Its dims in their new order."""
    names = letters(len(call.shape(0)))
    return write([names], [[names[dim] for dim in call.arguments["dims"]]], "linear {0}")


def transpose(call: OperatorCall) -> str:
    """Two dims change places."""
    names = letters(len(call.shape(0)))
    if not names:
        return write([names], [names], "linear {0}")
    a, b = call.arguments["dim0"], call.arguments["dim1"]
    turned = list(names)
    turned[a], turned[b] = names[b], names[a]
    return write([names], [turned], "linear {0}")


def turned(call: OperatorCall) -> str:
    """A matrix's dims change places."""
    names = letters(len(call.shape(0)))
    return write([names], [names[::-1]], "linear {0}")


def squeeze(call: OperatorCall) -> str:
    """Dims of size 1 disappear; another dim that is named is never split down to 1, or it would disappear on the ranks."""
    shape = call.shape(0)
    dims = set(range(len(shape)))
    if "dim" in call.arguments:
        given = call.arguments["dim"]
        dims = {dim % max(len(shape), 1) for dim in ((given,) if isinstance(given, int) else given)}
    words = ["1" if extent == 1 else name for name, extent in zip(letters(len(shape)), shape, strict=True)]
    for dim in dims:
        if shape and shape[dim] > 1:
            words[dim] = _never_single(words[dim], shape[dim])
    return write([words], [[word for dim, word in enumerate(words) if not (dim in dims and word == "1")]], "linear {0}")


def _never_single(name: str, extent: int) -> str:
    """A dim of which at least two elements stay together."""
    least = next(factor for factor in range(2, extent + 1) if extent % factor == 0)
    return f"({name}={extent // least} _)" if least < extent else "_"


def expand(call: OperatorCall) -> str:
    """New or grown dims are made on each rank."""
    shape, result = call.shape(0), call.result()
    names = letters(len(result))
    kept = names[len(result) - len(shape) :]
    words = ["1" if extent == 1 else name for name, extent in zip(kept, shape, strict=True)]
    return write([words], [names], "linear {0}")


def repeat(call: OperatorCall) -> str:
    """Each dim becomes copies of it, the copies major."""
    shape, repeats = call.shape(0), call.arguments["repeats"]
    names = letters(len(repeats))
    kept = names[len(repeats) - len(shape) :]
    words = [f"({name.upper()}{count}={count} {name})" if count else "_" for name, count in zip(names, repeats, strict=True)]
    new = len(repeats) - len(shape)
    words[:new] = [f"{name}={count}" if count else "_" for name, count in zip(names[:new], repeats[:new], strict=True)]
    return write([kept], [words], "linear {0}")


def slice_dim(call: OperatorCall) -> str:
    """The sliced dim is whole, unless the slice takes all of it."""
    names = letters(len(call.shape(0)))
    dim = call.arguments["dim"]
    if call.shape(0) == call.result() and call.arguments["step"] == 1:
        return write([names], [names], "linear {0}")
    words = list(names)
    words[dim] = "_"
    return write([words], [words], "linear {0}")


def pad(call: OperatorCall) -> str:
    """Padded dims are whole; linear when the padding is zero."""
    rank, amounts = len(call.shape(0)), call.arguments["pad"]
    names = letters(rank)
    for index in range(len(amounts) // 2):
        if amounts[2 * index] or amounts[2 * index + 1]:
            names[rank - 1 - index] = "_"
    return write([names], [names], "" if call.arguments["value"] else "linear {0}")


def roll(call: OperatorCall) -> str:
    """The rolled dims are whole."""
    names = letters(len(call.shape(0)))
    dims = call.arguments["dims"] or tuple(range(len(names)))
    for dim in (dims,) if isinstance(dims, int) else dims:
        names[dim] = "_"
    return write([names], [names], "linear {0}")


def unfold(call: OperatorCall) -> str:
    """The windowed dim is whole."""
    names = _whole_at(call.arguments["dimension"], letters(len(call.shape(0))))
    return write([names], [[*names, "_"]], "linear {0}")


def unfold_backward(call: OperatorCall) -> str:
    """The windowed dim is whole; others are broadcast where the gradient has them of size 1."""
    names = _whole_at(call.arguments["dim"], letters(len(call.result())))
    given = ["1" if extent == 1 != size else name for name, extent, size in zip(names, call.shape(0), call.result(), strict=False)]
    return write([[*given, "_"]], [names], "linear {0}")


def _whole_at(dim: int, names: list[str]) -> list[str]:
    """The names with one whole; a tensor without dims has none."""
    return ["_" if at == dim % len(names) else name for at, name in enumerate(names)]


def _along(shape: Shape, call: OperatorCall, length: int) -> tuple[list[str], str]:
    """Words of a matrix's dims, and of the dim of its diagonal: it is split as the rows are if it has an entry in each of them."""
    words = [f"d{dim}" for dim in range(len(shape))]
    every = length == shape[call.arguments["dim1"]]
    words[call.arguments["dim1"]], words[call.arguments["dim2"]] = "k" if every else "r", "c"
    return words, "k" if every else "l!"


def diagonal(call: OperatorCall) -> str:
    """Rows and columns are free: entries of another rank's are zero on this one; of its own rows it has the entries."""
    words, entry = _along(call.shape(0), call, call.arguments["length"])
    whole = "!" if call.inputs[0].dtype == "bool" else ""  # no sum makes one of parts
    given = [word + (whole if word in ("r", "c") else "") for word in words]
    return write([given], [[*(word for word in words if word.startswith("d")), entry]], "linear {0}")


def along_diagonal(call: OperatorCall) -> str:
    """Rows and columns are free: each rank writes the entries that lie in its own."""
    words, entry = _along(call.result(), call, call.shape(0)[-1])
    return write([[*(word for word in words if word.startswith("d")), entry]], [words], "linear {0}")


def on_diagonal(call: OperatorCall) -> str:
    """Rows and columns are free: each rank writes the entries that lie in its own."""
    words, entry = _along(call.result(), call, call.shape(1)[-1])
    return write([words, [*(word for word in words if word.startswith("d")), entry]], [words], "linear {0 1}")
