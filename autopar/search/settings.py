"""The numbers that steer the search: unit, meaning and, where one was measured, the case that set it.

They stand by room, in the order in which a search comes to them. Work is in work seconds (``autopar.effort``). ``benchmarks/ablation.py``
shows what a phase buys without or with another number.
"""

from __future__ import annotations

# What counts as what

PROOF = 1e-6
"""Relative gap up to which a plan is called optimal."""
GAIN = 1e-3
"""Relative change that counts as a gain."""
IDLE_ROUNDS = 3
"""Rounds without a gain after which prices, weights or potentials are left alone."""
SMALL_ENTRIES, LARGE_ENTRIES, HUGE_ENTRIES = 30_000, 1_000_000, 10_000_000
"""Edge entries of a problem: small up to the first, large from the second, solved in seconds from the third."""
LONG_GRAPH = 1_500
"""Operators from which few schedules are made of a graph, since each takes long."""
ROOMY = 0.5
"""Share of the memory limit below which the limit is left out of problems, or of what decides on a search of all choices."""
TIES = 1e-7
"""Share of a plan's cost that bytes times life may add to a problem, so that ties go to less memory."""

# choices: enumeration and pricing

STRATEGY_WORK, RESHARD_WORK = 35e-6, 8e-6
"""Work to enumerate and price one strategy, and one reshard between two specs. Measured on Llama-3-8B, 8x8 and 4x4x4."""
ENUMERATION_SHARE = 1 / 3
"""Share of the work left for all choices where merged axes can give a plan instead."""
UNEVEN_WASTE, UNEVEN_LARGEST = 4 / 3, 3 / 5
"""Uneven splits: most of the largest part times the parts, over the whole; and the largest part's share of the whole.

6 rows on 4 ranks are 2, 2, 2 and none. 2 of 3 elements on one of 2 ranks gain little."""

# coarsening: merged axes, and plans near those

COARSE_ENTRIES = 1_000_000
"""Edge entries of three and more axes from which the search goes from plan to plan."""
WHOLE_ENTRIES, ENTRIES_PER_WORK = 25_000_000, 600_000
"""Edge entries up to which all choices are searched after all: altogether, and for each work second that is left."""
WHOLE_GAP = 0.02
"""Gap of the best plan of merged axes from which all choices are searched."""
COARSE_LOOKS = 3
"""Times that the search looks around its best plan, at most."""
HURRIED_SHARE = 0.5
"""Share of the work after which the best plan of merged axes is scheduled before the search looks around it."""
CHANGED_AXES = 1
"""Axes that a near plan may use in another way."""

# baselines

FORCED_RESHARD_WEIGHT, SLICE_WEIGHT = 1e6, 1e-3
"""Weights on the seconds of a reshard that a recipe does not mean, the last resort; and of a slice, which needs no communication."""
ROOMY_BASELINE = 0.8
"""Share of the memory limit below which a plan that prefetches less does so for other reasons than memory."""
TUNED_BASELINES = 2
"""Baselines of a large problem or a long graph that have their limits tuned."""

# ilp: prices and solves

FIRST_WAITED, FIRST_CALLS = 0.5, 0.2
"""Believed before the first schedule of collectives that may run ahead or behind: share waited for, and calls for each value."""
BELIEF_KEPT = 0.6
"""Share of the old belief in the new one."""
PRICE_ROUNDS = 8
"""Rounds of learned prices, at most."""
SOLVE_SHARE = 1 / 6
"""Share of the effort that one solve may take; the first may take half."""
FIRST_SOLVE_WORK, LEAST_SOLVE_WORK = 1.0, 0.1
"""Least work of a solve while no plan fits, and after that."""
LEAST_SOLVE_SECONDS = 0.5
"""Wall-clock seconds that a solve may take, however little the time limit leaves."""
CLOSE_GAP = 2e-3
"""Gap at which a solve of a large problem, or the search for a plan's limits, stops."""
EXACT_MOMENTS, CROSSOVER_MOMENTS = 16, 6
"""Times of a second run that are told apart in an exact problem, and in crossover."""
SMALL_TENSOR_SHARE = 1e-3
"""Share of what backward reads below which a tensor is not recomputed for its own sake."""
JOINT_ENTRIES, JOINT_EXACT_ENTRIES = 100_000, 60_000
"""Edge entries up to which recomputation joins the problem; and, of the problem that results, up to which all its times are told apart."""

# schedules of answers

NEAR_LIMIT, NEAR_BEST = 5e-3, 5e-3
"""Relative distances, of memory to the limit and of seconds to the best, within which an estimate is scheduled at full depth."""
ESTIMATE_ERROR = 0.03
"""Relative error of estimated seconds, at most."""
UNLIKELY_PLAN = 1.06
"""Times the best plan's seconds from which an answer for a bound has no other limits tried. None of 30 became the best."""
LARGE_TRIES, LONG_TRIES, USUAL_TRIES = 3, 8, 24
"""Limits that are tried for one answer: of a large problem, of a long graph, and of others."""
LAST_TRIES, LAST_TRIES_DEEP = 4, 2
"""Times as many for the best plan in the end; and at full depth, where an estimate had them before."""
REMEMBERED_PLANS = 8
"""Assignments, the last scheduled, whose tried limits are remembered."""
FINAL_MOVES = 5
"""Times the usual moves of local search for the final plan. On Llama-3-8B, 8x8, 70 GiB: 211.4 ms; with 2, 212.5 ms."""
SHORT_DEPTHS, DEEP_LAYERS = (8, 14), 44
"""Depths of the graphs that estimate a deeper one, and the equal layers from which one is estimated. Each layer adds as much."""
FEWEST_REPEATS = 6
"""Repeats from which a group of equal layers is folded."""

# memory: crossover, repair, reduced limits, the least memory

LIMIT_SHARES = (0.95, 1.0)
"""Shares of the limit that answers may hold. The first leaves room to prefetch. On Llama-3-8B, 8x8, 14 and 7 GiB, 0.9 bought nothing."""
CROSSOVER_SOLVES, CROSSOVER_PASSES = 8, 4
"""Solves under one share, each with more left free; and passes of crossover. At most."""
CROSSOVER_GAP, CROSSOVER_SOLVE_WORK = 5e-3, 6.0
"""Gap at which a solve of crossover stops, and its work."""
FIRST_ANSWER_TRIES = 4
"""Times as many limits are tried for the first answer, since others begin from its."""
LIGHT_ANSWERS, LIGHT_GAP = 2, 1e-2
"""Answers in which all may be recomputed, of a large problem, at most; and the gap at which their solves stop."""
FITTING_SOLVES = 6
"""Solves under the same prices until an answer fits as a schedule, at most."""
FLIPS = 200
"""Sets of recomputed operators that are scheduled in a small problem, at most."""
RESERVE_GRAIN = 1_000
"""Reserved bytes are rounded up to this part of the limit."""
LEAST_MEMORY_STEPS, LEAST_MEMORY_SOLVES = 6, 2
"""Limits that are tried for the least memory, and solves at each. At most."""
LEAST_MEMORY_FIRST_WORK, LEAST_MEMORY_SOLVE_WORK, LEAST_MEMORY_LAST_WORK = 30.0, 3.0, 0.5
"""Work of the solve for least memory, of those under other limits, and of each once the work is used up."""
LEAST_MEMORY_GAP = 0.01
"""Relative distance of the least memory known and the least not ruled out that is near enough."""

# bounds: surrogate weights

BOUND_ROUNDS, PATIENT_ROUNDS = 30, 6
"""Rounds of weights, at most; and those without a gain where memory is short, whose first weights say nothing of small plans."""
CUT_STEP = 0.3
"""Share of the weights that the cuts want in the next; the rest is the best so far."""
PATH_GAIN = 1e-4
"""Relative gain for which a path comes in as a term."""
SPAN_NODES = 2_000
"""Nodes of a phase up to which spans are looked for, which cost a matrix product."""
BOUND_SOLVE_GAP_SHARE, BOUND_SOLVE_GAP, BOUND_SOLVE_RISE_SHARE = 0.25, 0.02, 0.5
"""A solve for a bound stops at this share of the open gap, at the second at most, and at this share of what weights may still gain."""
HUGE_GAIN = 0.015
"""Relative gain of a bound for which no other is asked in a huge problem."""
LOOSE_GAP, TIGHT_GAP = 0.1, 0.02
"""Gaps from which a large problem asks for other weights too, and up to which bounds that pay for memory are left out."""

# bounds: memory dual

DUAL_ROUNDS = 14
"""Prices of memory that are tried, at most."""
DUAL_SOLVE_WORK, DUAL_SOLVE_MOST = 3.0, 12.0
"""Work of one solve, and most where that gives no answer."""
DUAL_PRICE_SHARE = 0.65
"""Share of the work for prices; the rest proves the result for layers left free."""
DUAL_LEAST_SHARE = 0.1
"""Share of the effort that must be left for a memory dual."""
DUAL_GAIN, DUAL_ENOUGH = 5e-4, 0.01
"""Gap at which a solve stops and gain for which no other price is tried; and share of the open gap that is enough."""
FIRST_PRICE_SHARE, PRICE_GROWTH, PRICE_CEILING = 0.06, 4.0, 0.99
"""Highest first price, as a share of the seconds over the bytes allowed; growth over the best prices; share of the highest that binds."""
DUAL_STEP, DUAL_STEP_DECAY, DUAL_STEP_LEAST = 0.5, 0.6, 0.1
"""Share of the wanted prices in the next; factor after each that gained nothing; and the least share."""

# bounds: decomposition of tied layers

DECOMPOSITION_STEPS = 12
"""Subgradient steps on the potentials, at most."""
DECOMPOSITION_GAIN = 0.1
"""Share of what the layer lacks that a step has to gain."""
DECOMPOSITION_ENOUGH, DECOMPOSITION_LITTLE = 1e-4, 5e-4
"""Shares of the tied optimum that may be missing: when steps end, and for the outside to be solved."""
DECOMPOSITION_SOLVE_GAP = 2e-4
"""Gap at which the solve of a piece stops."""
OUTSIDE_SHARE = 0.5
"""Share of the work for the outside, without which the layer bounds nothing."""
SLIGHT_GAIN = 1e-5
"""Relative gain for which a bound is proved, but of a long graph."""
PROVED_CLAIMS = 2
"""Best bounds of tied layers that are proved for free ones, at most."""
LAST_PROOF_SHARE, LAST_PROOF_WORK, LAST_PROOF_SOLVES = 0.1, 0.5, 2
"""Share of the effort and work by which a last proof may pass it, and the solves that it may take."""

# the end of a search

TIED_LAYERS_SHARE, TIED_LAYERS_TRIED = 5e-3, 3
"""Relative increase of the objective that equal layers are worth, and ways of a layer that are tried for all."""
ALTERNATIVE_TRIES = 6
"""Limits of schedules that are tried for each alternative."""
USED_UP_SHARE = 0.9
"""Share of its work from which a search counts as stopped by it."""
