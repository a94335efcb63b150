"""The operators whose rule depends on their arguments in a way no row can say: each function writes the rule of one call.

Layout and indexing have files of their own, ``computed_layout`` and ``computed_indexing``.
"""

from __future__ import annotations

from autopar.graph import DTYPE_BYTES
from autopar.rules.signature import OperatorCall, refs
from autopar.rules.writing import letters, term, write

FLOATS = ("float16", "bfloat16", "float32", "float64")


def contract(call: OperatorCall) -> str:
    """Its own equation."""
    return f"{call.arguments['equation']} | linear {{0}} {{1}}"


def convert(call: OperatorCall) -> str:
    """Elementwise; partial values pass where nothing is rounded."""
    return "... -> ..." + (" | linear {0}" if is_exact(call.inputs[0].dtype, call.outputs[0].dtype) else "")


def is_exact(source: str, target: str) -> bool:
    """Whether numbers of a dtype are the same ones as the other: it is the same, or both are floats and it is wider."""
    both = source in FLOATS and target in FLOATS
    return source == target or (both and DTYPE_BYTES[target] > DTYPE_BYTES[source])


def masked_fill(call: OperatorCall) -> str:
    """Elementwise; linear when it fills in zeros."""
    return "..., ... -> ..." + ("" if call.arguments["value"] else " | linear {0}")


def conjugate(call: OperatorCall) -> str:
    """Elementwise; also of a number that a tensor was multiplied by, in its gradient."""
    return "... -> ... | linear {0}" if call.inputs else "-> ..."


def divide(call: OperatorCall) -> str:
    """Elementwise; linear in the dividend unless it rounds."""
    return "... * -> ..." + ("" if call.arguments.get("rounding_mode") else " | linear {0}")


def norm(call: OperatorCall) -> str:
    """Powers are summed over a split dim; the largest and the smallest magnitude are a maximum and a minimum."""
    extreme = {float("inf"): "max", float("-inf"): "min"}.get(float(2 if call.arguments["ord"] is None else call.arguments["ord"]))
    return f"... d -> ... +d:{extreme}" if extreme else "... d -> ... ~d | inner d: sum(...)"


def extreme(call: OperatorCall) -> str:
    """Over a split dim ranks agree on the value, then on the first place that has it."""
    return f"... d -> ... ~d, ... ~d | inner d: {'max' if call.arguments['largest'] else 'min'}(...) min(...)"


def weight_norm(call: OperatorCall) -> str:
    """Each slice along ``dim`` has a norm of its own, computed over all the other dims."""
    rank = len(call.shape(0))
    kept = call.arguments["dim"] % rank
    tensor = ["a" if dim == kept else "_" for dim in range(rank)]
    norms = ["a" if dim == kept else "1" for dim in range(rank)]
    if len(call.inputs) == 2:
        return write([tensor, norms], [tensor, norms])
    return write([tensor, tensor, norms, norms], [tensor, norms], "linear {0}")


def renormalised(call: OperatorCall) -> str:
    """Each slice along ``dim`` has a norm of its own, over all the other dims."""
    words = ["a" if dim == call.arguments["dim"] % len(call.shape(0)) else "_" for dim in range(len(call.shape(0)))]
    return write([words], [words])


def full(call: OperatorCall) -> str:
    """Made on each rank; zeros are also a partial sum."""
    return "-> ..." + ("" if call.arguments["fill_value"] else " | linear {}")


def histogram(call: OperatorCall) -> str:
    """Counts of parts add up, where the bins do not depend on the values."""
    return "... -> _" if call.arguments["min"] != call.arguments["max"] else "...! -> _"


def new(call: OperatorCall) -> str:
    """Made on each rank whatever the first tensor's layout."""
    names = letters(len(call.result()) + len(call.shape(0)))
    result, like = names[: len(call.result())], names[len(call.result()) :]
    return write([like], [[*result, *(f"~{name}" for name in like)]])


def new_full(call: OperatorCall) -> str:
    """As new; zeros are also a partial sum."""
    return new(call) + ("" if call.arguments["fill_value"] else " | linear {}")


def new_zeros(call: OperatorCall) -> str:
    """As new, and a partial sum."""
    return new(call) + " | linear {}"


def attention(call: OperatorCall) -> str:
    """Batch, heads and the query sequence; query heads in groups of a key head.

    Under a causal mask a rank's queries start at ``offset`` among the keys, and the last of them attend to the most: without a further
    mask, ranks may trade half of their queries, and of what comes out. Keys and values are whole on each rank, or travel around the ranks.
    """
    clauses = _exchanges(call, "{0} {3} {4}", "{1 2}")
    return f"b (h g) s d!, b h t! d!, b h t! e!{_mask(call)} -> b (h g) s e!, b (h g) s{clauses}"


def attention_backward(call: OperatorCall) -> str:
    """As attention; gradients of keys and values add up over a split query sequence; linear in the gradient."""
    clauses = _exchanges(call, "{0 1 4} {5} {6}", "{2 3}")
    q, k, v = "b (h g) s d!", "b h t! d!", "b h t! e!"
    return f"b (h g) s e!, {q}, {k}, {v}, b (h g) s e!, b (h g) s{_mask(call)} -> {q}, {k}, {v} | linear {{0}}{clauses}"


def _exchanges(call: OperatorCall, rows: str, keys: str) -> str:
    """With a mask nothing travels: its rows would have to follow the queries, and of a block of keys that it hides from a query kernels
    give no ``lse``. Nor do keys under causality unless each is at the place of a query."""
    causal, masked = call.arguments["causal"], bool(refs(call.arguments["mask"]))
    at_start = not masked and call.arguments["offset"] == 0
    square = call.shape(refs(call.arguments["q"])[0])[2] == call.shape(refs(call.arguments["k"])[0])[2]
    return (
        (" | triangle s" if causal else "")
        + (f" | mirror s: {rows}" if causal and at_start else "")
        + (f" | ring s t: {keys}" if at_start and (square or not causal) else "")
    )


def _mask(call: OperatorCall) -> str:
    found = refs(call.arguments["mask"])
    words = ["b?", "(h g)?", "s?", "t?"]
    return "" if not found else ", " + term(words[4 - len(call.shape(found[0])) :])


def convolution(call: OperatorCall) -> str:
    """Batch, groups and channels; a transposed one has its weight the other way round."""
    weight = "(g i) o _..." if call.arguments["transposed"] else "(g o) i _..."
    tensors = f"n (g={call.arguments['groups']} i) _..., {weight}"
    if call.arguments["bias"] is None:
        return f"{tensors} -> n (g o) _... | linear {{0}} {{1}}"
    return f"{tensors}, (g o) +i -> n (g o) _... | linear {{0 2}} {{1 2}}"


def add_product(call: OperatorCall) -> str:
    """The bias broadcasts, and is added once: partial where the product is."""
    bias = ["m? n?", "n?"][2 - len(call.shape(0))] if call.shape(0) else "()"
    return f"{bias} +k, m k, k n -> m n | linear {{0 1}} {{0 2}}"


def convolution_backward(call: OperatorCall) -> str:
    """As the forward operator, with the gradient's batch and channels summed where they are missing."""
    weight = "(g i) o _..." if call.arguments["transposed"] else "(g o) i _..."
    g = f"g={call.arguments['groups']}"
    return f"n ({g} o) _..., n (g i) _..., {weight} -> n (g i) _..., {weight}, (g o) ~i | linear {{0}}"


def solve(call: OperatorCall) -> str:
    """Matrices or vectors on the right; ``aten._linalg_solve_ex`` takes ``b`` as vectors where its shape is that of ``a`` less a dim."""
    first, second = call.shape(0), call.shape(1)
    vectors = len(second) == 1 or second == first[:-1]
    right = "... _" if vectors else "... _ _"
    return f"... _ _, {right} -> {right}, ... _ _, ... _, ..."


def pseudo_inverse(call: OperatorCall) -> str:
    """Tolerances are one for all matrices, or one a matrix."""
    tolerances = ["()" if not tensor.shape else "..." for tensor in call.inputs[1:]]
    return ", ".join(["... _ _", *tolerances]) + " -> ... _ _"


def all_reduce(call: OperatorCall) -> str:
    """n ... -> ... ~n | exchange n: all_reduce, by its reduction."""
    return f"n ... -> ... ~n | exchange n: all_reduce {call.arguments['reduction']}"
