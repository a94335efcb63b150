# cython: infer_types=True, annotation_typing=False, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""Branch and bound over the orders of a fixed cut: active schedules (Giffler and Thompson 1960), heads and tails, dominance.

A node is the set of operations placed so far. Some device has the operation that could end soonest, at time C. An optimal step exists in
which that device runs next an operation that could begin before C. Where an F would take memory, another operation may have to run first:
one branch keeps those operations back until the device has run another.

Nodes with equal counts are compared by the times at which devices are free and data arrives. One that is nowhere earlier is left out.
"""

from __future__ import annotations

from .constants import NO_STEP
from .views import Chain, OrderTree

DEPTH, NODES, STORED, FRESH, CAPACITY, VECTOR, BUCKETS, COMPARED, WORDS = 0, 1, 2, 3, 4, 5, 6, 7, 8
"""Places in ``scalars``: depth of the node, -1 once all are done; nodes so far; nodes remembered; whether the node is new; the most nodes
remembered; length of a node's vector; lists of remembered nodes; how many of a list are compared; length of a node's key."""
LARGEST_WORD = 2**55
"""A word of a key that reaches this takes no further count, so that it never overflows."""
TOLERANCE = 1e-9
"""Share of the incumbent's step by which a node must promise to be shorter."""


def fill_tails(chain: Chain, tree: OrderTree) -> None:
    """Write the least seconds from the end of each operation to the end of the step, and order each device's operations by it.

    Longest paths: through the chunks, from microbatch to microbatch, and from the release of a microbatch to the F that waits for its room.
    """
    chunks, devices, microbatches, last = chain.sizes[0], chain.sizes[1], chain.sizes[2], chain.sizes[3] - 1
    for i in range(microbatches - 1, -1, -1):
        for kind in range(last, -1, -1):
            for at in range(chunks):
                c = at if kind == 1 else chunks - 1 - at
                code = 3 * c + kind
                op, tail = code * microbatches + i, 0.0
                if i < microbatches - 1:
                    tail = tree.tails[op + 1] + chain.seconds[code]
                if kind == last and last > 0 and i + tree.flight[c] < microbatches:
                    tail = max(tail, tree.tails[3 * c * microbatches + i + tree.flight[c]] + chain.seconds[3 * c])
                if kind < last:
                    tail = max(tail, tree.tails[op + microbatches] + chain.seconds[code + 1])
                if kind == 0 and c < chunks - 1:
                    tail = max(tail, tree.tails[op + 3 * microbatches] + chain.seconds[code + 3] + chain.hop[c])
                if kind == 1 and c > 0:
                    tail = max(tail, tree.tails[op - 3 * microbatches] + chain.seconds[code - 3] + chain.hop[c - 1])
                tree.tails[op] = tail
    at = 0
    for d in range(devices):
        tree.line_ptr[d] = at
        for c in range(chunks):
            if chain.place[c] == d:
                for kind in range(last + 1):
                    for i in range(microbatches):
                        op = (3 * c + kind) * microbatches + i
                        place = at
                        while place > tree.line_ptr[d] and tree.tails[tree.by_tail[place - 1]] < tree.tails[op]:
                            tree.by_tail[place] = tree.by_tail[place - 1]
                            place -= 1
                        tree.by_tail[place] = op
                        at += 1
    tree.line_ptr[devices] = at


def bound_rest(chain: Chain, tree: OrderTree) -> float:
    """The least step of any order that goes on from the node: longest paths, and for each device its work between heads and tails.

    For each set of a device's operations whose tails reach a length: the first begin, their seconds, and that tail.
    """
    chunks, devices, microbatches, last, bound = chain.sizes[0], chain.sizes[1], chain.sizes[2], chain.sizes[3] - 1, 0.0
    for i in range(microbatches):
        for kind in range(last + 1):
            for at in range(chunks):
                c = chunks - 1 - at if kind == 1 else at
                code = 3 * c + kind
                op = code * microbatches + i
                if i < tree.count[code]:
                    tree.heads[op] = tree.ends[op]
                    continue
                head = tree.ready[chain.place[c]]
                if i > 0:
                    head = max(head, tree.heads[op - 1])
                if kind > 0:
                    head = max(head, tree.heads[op - microbatches])
                elif last > 0 and i >= tree.flight[c]:
                    head = max(head, tree.heads[(code + last) * microbatches + i - tree.flight[c]])
                if kind == 0 and c > 0:
                    head = max(head, tree.heads[op - 3 * microbatches] + chain.hop[c - 1])
                if kind == 1 and c < chunks - 1:
                    head = max(head, tree.heads[op + 3 * microbatches] + chain.hop[c])
                tree.heads[op] = head + chain.seconds[code]
                bound = max(bound, tree.heads[op] + tree.tails[op])
    for d in range(devices):
        work, first = 0.0, NO_STEP
        bound = max(bound, tree.ready[d])
        for place in range(tree.line_ptr[d], tree.line_ptr[d + 1]):
            op = tree.by_tail[place]
            code = op // microbatches
            if op - code * microbatches >= tree.count[code]:
                work += chain.seconds[code]
                first = min(first, tree.heads[op] - chain.seconds[code])
                bound = max(bound, first + work + tree.tails[op])
    return bound


def explore(chain: Chain, tree: OrderTree, nodes: int) -> bool:
    """Go on from where the tree stands, for so many nodes at most; True once nothing is left that is shorter than ``best``.

    A shorter step is written to ``best``, its orders to ``orders``.
    """
    wide, stop = len(tree.open) // len(tree.width), tree.scalars[NODES] + nodes
    while tree.scalars[DEPTH] >= 0 and tree.scalars[NODES] < stop:
        depth = tree.scalars[DEPTH]
        if tree.scalars[FRESH]:
            tree.scalars[FRESH] = 0
            tree.scalars[NODES] += 1
            tree.width[depth] = _branches(chain, tree, depth, depth * wide)
        if tree.width[depth] == 0:
            tree.scalars[DEPTH] -= 1
            if depth > 0:
                _undo(chain, tree, depth - 1)
            continue
        tree.width[depth] -= 1
        _apply(chain, tree, depth, tree.open[depth * wide + tree.width[depth]])
        tree.scalars[DEPTH] += 1
        tree.scalars[FRESH] = 1
    return tree.scalars[DEPTH] < 0


def _branches(chain: Chain, tree: OrderTree, depth: int, at: int) -> int:
    """Write the operations that may come next, the most promising last; returns how many there are."""
    chunks, microbatches, last = chain.sizes[0], chain.sizes[2], chain.sizes[3] - 1
    if bound_rest(chain, tree) >= tree.best[0] * (1.0 - TOLERANCE):
        return 0
    left = 0
    for c in range(chunks):
        for kind in range(last + 1):
            left += microbatches - tree.count[3 * c + kind]
    if left == 0:
        _keep(chain, tree, depth)
        return 0
    if _dominated(chain, tree):
        return 0
    soonest, device, chosen = NO_STEP, -1, -1
    for c in range(chunks):
        for kind in range(last + 1):
            code = 3 * c + kind
            begin = _begin(chain, tree, code)
            tree.begins[code] = begin
            if begin < NO_STEP and begin + chain.seconds[code] < soonest:
                soonest, device, chosen = begin + chain.seconds[code], chain.place[c], code
    if chosen < 0:
        return 0
    count, kept_back = 0, 0
    if chosen % 3 == 0 and tree.tight[device]:
        tree.open[at] = -1 - device
        count = 1
    for c in range(chunks):
        for kind in range(last + 1):
            code = 3 * c + kind
            if chain.place[c] == device and (tree.begins[code] < soonest or code == chosen):
                kept_back |= 1 << code
                place = at + count
                while place > at and tree.open[place - 1] >= 0 and _sooner(tree, microbatches, tree.open[place - 1], code):
                    tree.open[place] = tree.open[place - 1]
                    place -= 1
                tree.open[place] = code
                count += 1
    tree.kept_back[2 * depth] = kept_back
    tree.until[depth] = soonest
    return count


def _sooner(tree: OrderTree, microbatches: int, one: int, other: int) -> bool:
    """Whether one operation promises more than the other: it can begin sooner, or has the longer tail."""
    if tree.begins[one] != tree.begins[other]:
        return tree.begins[one] < tree.begins[other]
    return tree.tails[one * microbatches + tree.count[one]] > tree.tails[other * microbatches + tree.count[other]]


def _begin(chain: Chain, tree: OrderTree, code: int) -> float:
    """When the next of a code could begin; ``NO_STEP`` where it cannot come next."""
    c, kind, n, microbatches = code // 3, code % 3, tree.count[code], chain.sizes[2]
    if n >= microbatches or (tree.blocked[0] >> code) & 1:
        return NO_STEP
    begin = tree.ready[chain.place[c]]
    if kind == 0:
        if tree.usage[chain.place[c]] + chain.held[c] > chain.room[chain.place[c]]:
            return NO_STEP
        if c > 0:
            if tree.count[code - 3] <= n:
                return NO_STEP
            begin = max(begin, tree.ends[(code - 3) * microbatches + n] + chain.hop[c - 1])
    elif tree.count[code - 1] <= n:
        return NO_STEP
    elif kind == 1 and c < chain.sizes[0] - 1:
        if tree.count[code + 3] <= n:
            return NO_STEP
        begin = max(begin, tree.ends[(code + 3) * microbatches + n] + chain.hop[c])
    return begin


def _apply(chain: Chain, tree: OrderTree, depth: int, code: int) -> None:
    """Place the next of a code; a code below 0 keeps back what device -1 - code could begin."""
    microbatches, last = chain.sizes[2], chain.sizes[3] - 1
    tree.lines[depth], tree.kept_back[2 * depth + 1] = code, tree.blocked[0]
    if code < 0:
        tree.saved[depth] = tree.ready[-1 - code]
        tree.ready[-1 - code] = max(tree.ready[-1 - code], tree.until[depth])
        tree.blocked[0] |= tree.kept_back[2 * depth]
        return
    c, kind = code // 3, code % 3
    d = chain.place[c]
    end = _begin(chain, tree, code) + chain.seconds[code]
    tree.saved[depth] = tree.ready[d]
    tree.ready[d], tree.ends[code * microbatches + tree.count[code]] = end, end
    tree.count[code] += 1
    tree.blocked[0] &= ~tree.blocked[1 + d]
    if kind == 0:
        tree.usage[d] += chain.held[c]
    if kind == last:
        tree.usage[d] -= chain.held[c]


def _undo(chain: Chain, tree: OrderTree, depth: int) -> None:
    """Take back what ``_apply`` did at a depth."""
    code, last = tree.lines[depth], chain.sizes[3] - 1
    tree.blocked[0] = tree.kept_back[2 * depth + 1]
    if code < 0:
        tree.ready[-1 - code] = tree.saved[depth]
        return
    c, kind = code // 3, code % 3
    d = chain.place[c]
    tree.ready[d] = tree.saved[depth]
    tree.count[code] -= 1
    if kind == 0:
        tree.usage[d] -= chain.held[c]
    if kind == last:
        tree.usage[d] += chain.held[c]


def _keep(chain: Chain, tree: OrderTree, depth: int) -> None:
    """All is placed: note the step and the orders where they are shorter than the best."""
    devices, step = chain.sizes[1], 0.0
    for d in range(devices):
        step = max(step, tree.ready[d])
    if step >= tree.best[0]:
        return
    tree.best[0] = step
    length = len(tree.orders) // devices
    for d in range(devices):
        at = d * length
        for place in range(depth):
            code = tree.lines[place]
            if code >= 0 and chain.place[code // 3] == d:
                tree.orders[at] = code
                at += 1


def _dominated(chain: Chain, tree: OrderTree) -> bool:
    """Whether a node seen before has the same operations placed and nothing later; otherwise remember this one while there is room."""
    chunks, devices, microbatches, last = chain.sizes[0], chain.sizes[1], chain.sizes[2], chain.sizes[3] - 1
    words, entry, used, total = tree.scalars[WORDS], tree.scalars[STORED], 0, 0
    at, key = entry * tree.scalars[VECTOR], entry * words  # beyond the last remembered there is room for the node asked about
    for word in range(words):
        tree.keys[key + word] = 0
    tree.keys[key] = tree.blocked[0]
    word = 1
    for d in range(devices):
        tree.vectors[at + used] = tree.ready[d]
        used += 1
    for c in range(chunks):
        for kind in range(last + 1):
            code = 3 * c + kind
            if tree.keys[key + word] >= LARGEST_WORD // (microbatches + 1):
                word += 1
            tree.keys[key + word] = tree.keys[key + word] * (microbatches + 1) + tree.count[code]
            other, hop = -1, 0.0
            if kind == 0 and c > 0:
                other, hop = code - 3, chain.hop[c - 1]
            if kind == 1 and c < chunks - 1:
                other, hop = code + 3, chain.hop[c]
            if other >= 0:
                for i in range(tree.count[code], tree.count[other]):
                    tree.vectors[at + used] = max(tree.ready[chain.place[c]], tree.ends[other * microbatches + i] + hop)
                    used += 1
    for word in range(words):
        total = (total * 31 + tree.keys[key + word] % tree.scalars[BUCKETS]) % tree.scalars[BUCKETS]
    compared, seen = 0, tree.bucket[total]
    while seen >= 0 and compared < tree.scalars[COMPARED]:
        word = 0
        while word < words and tree.keys[seen * words + word] == tree.keys[key + word]:
            word += 1
        if word == words:
            compared += 1
            before, place = seen * tree.scalars[VECTOR], 0
            while place < used and tree.vectors[before + place] <= tree.vectors[at + place]:
                place += 1
            if place == used:
                return True
        seen = tree.following[seen]
    if entry < tree.scalars[CAPACITY]:
        tree.following[entry], tree.bucket[total] = tree.bucket[total], entry
        tree.scalars[STORED] += 1
    return False
