"""A replay of a plan in a few lines of its own, for what the package says of steps, bytes and legality."""

from __future__ import annotations

from autopar.solvers.pipeline import PipelinePlan, PipelineProblem


def replay(problem: PipelineProblem, plan: PipelinePlan) -> tuple[float, list[float]] | None:
    """Seconds of the step and the most bytes of each device; None for a plan that is none."""
    p, n, m, last = problem.devices, problem.devices * problem.chunks, problem.microbatches, problem.kinds[-1]
    where = [c % p if problem.placement == "loop" or c < p else 2 * p - 1 - c for c in range(n)]
    if len(plan.cut) != n or min(plan.cut) < 1 or sum(plan.cut) != len(problem.layers) or len(plan.orders) != p:
        return None
    if any(not 0 <= mode < len(modes) for mode, modes in zip(plan.modes, problem.layers, strict=True)):
        return None
    chunk_of = [c for c, layers in enumerate(plan.cut) for _ in range(layers)]
    total = [dict.fromkeys(("F", "B", "W", "held", "rest"), 0.0) for _ in range(n)]
    for c, mode, modes in zip(chunk_of, plan.modes, problem.layers, strict=True):
        chosen, sums = modes[mode], total[c]
        sums["F"] += chosen.forward
        sums["B"] += chosen.backward + (0 if problem.split else chosen.weights)
        sums["W"] += chosen.weights
        sums["held"] += chosen.held if problem.training else 0
        sums["rest"] += chosen.rest
    for d, line in enumerate(plan.orders):
        if sorted(map(str, line)) != sorted(f"{kind}{c}" for c in range(n) if where[c] == d for kind in problem.kinds for _ in range(m)):
            return None
    end, free, at = dict[tuple[str, int, int], float](), [0.0] * p, [0] * p
    now = [sum(total[c]["rest"] for c in range(n) if where[c] == d) for d in range(p)]
    most = list(now)
    for _ in range(p * len(plan.orders[0])):
        for d in range(p):
            if at[d] == len(plan.orders[d]):
                continue
            one = plan.orders[d][at[d]]
            c, i = one.chunk, plan.orders[d][: at[d]].count(one)
            reads = {"F": [("F", c - 1)], "B": [("F", c), ("B", c + 1)], "W": [("B", c)]}[one.kind]
            reads = [(kind, other) for kind, other in reads if 0 <= other < n]
            if any((kind, other, i) not in end for kind, other in reads):
                continue
            arrive = [end[kind, other, i] + (problem.transfer if where[other] != d else 0) for kind, other in reads]
            free[d] = end[one.kind, c, i] = max([free[d], *arrive]) + total[c][one.kind]
            at[d] += 1
            now[d] += total[c]["held"] * (one.kind == "F")
            most[d] = max(most[d], now[d])
            now[d] -= total[c]["held"] * (one.kind == last)
    if any(place < len(line) for place, line in zip(at, plan.orders, strict=True)):
        return None
    return None if problem.limit is not None and max(most) > problem.limit + 1e-9 else (max(free), most)
