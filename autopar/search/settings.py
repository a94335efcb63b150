"""The numbers that steer the search: unit, meaning and, where one was measured, the case that set it.

They stand by room, in the order of a search. Work is in work seconds (``autopar.effort``). ``benchmarks/ablation.py`` shows what a phase
buys.
"""

from __future__ import annotations

# What counts as what

PROOF = 1e-6
"""Relative gap up to which a plan is called optimal."""
GAIN = 1e-3
"""Relative change that counts as a gain."""
ROUNDS, IDLE_ROUNDS = 12, 3
"""Rounds of any loop of solves, at most: of prices, weights, potentials, crossover, or reserves. And rounds without a gain that end one."""
NEAR = 5e-3
"""Relative difference of seconds or bytes that a user does not notice.

Solves whose solutions are repaired stop at this gap. An estimate that near the limit or the best plan is scheduled at full depth. Equal
layers are worth as much.
"""
SMALL_ENTRIES, LARGE_ENTRIES = 30_000, 1_000_000
"""Edge entries of a problem: small up to the first, large from the second."""
LONG_GRAPH = 1_500
"""Operators from which few schedules of a graph are made, since each takes long."""
ROOMY = 0.5
"""Share of the memory limit. A plan below that has room: the limit is left out of its problems, all choices may be searched, and memory is
not the reason that a baseline prefetches less."""
TIES = 1e-7
"""Share of a plan's cost that bytes times life may add to a problem, so that ties go to less memory."""

WRITING_SECONDS = 5e-4
"""CPU seconds for each operator to record the plan and write its file, kept from the time limit: twice those of Llama-3-8B, 32 layers."""

# choices: enumeration and pricing

STRATEGY_WORK, RESHARD_WORK = 35e-6, 8e-6
"""Work to enumerate and price one strategy, and one reshard between two specs. Measured on Llama-3-8B, 8x8 and 4x4x4."""
UNEVEN_WASTE, UNEVEN_LARGEST = 4 / 3, 3 / 5
"""Bounds for uneven splits: the largest part times the parts, over the whole; and the largest part's share of the whole.

6 rows on 4 ranks are 2, 2, 2 and none. 2 of 3 elements on one of 2 ranks gain little.
"""

# coarsening: merged axes, and plans near those

WHOLE_ENTRIES, ENTRIES_PER_WORK = 25_000_000, 600_000
"""Edge entries up to which all choices are searched after all: altogether, and for each work second left."""
WHOLE_GAP = 0.02
"""Gap that is worth more searches: of all choices beside plans of merged axes, and of other limits for what goes to the host."""
PARTS_AFTER_DRAFTS = 3
"""Parts of the work, each as large as a draft's, for the search that begins with the drafts."""

# baselines

FORCED_RESHARD_WEIGHT, SLICE_WEIGHT = 1e6, 1e-3
"""Weights on the seconds of a reshard that a recipe does not intend, the last resort; and of a slice, which needs no communication."""
TUNED_BASELINES = 2
"""Number of baselines of a large problem or a long graph whose limits are tuned."""

# ilp: prices and solves

FIRST_WAITED, FIRST_CALLS = 0.5, 0.2
"""Belief before the first schedule, for collectives that may overlap: exposed share, and calls per value.

With 0.5 for both Llama-3-8B, 8x8, 7 GiB takes 0.7 % longer.
"""
BELIEF_KEPT = 0.6
"""Share of the old belief in the new one."""
SOLVE_SHARE = 1 / 6
"""Share of the effort that one solve may take. The first may take half of the effort."""
SOLVE_WORK, LEAST_SOLVE_WORK = 6.0, 1.0
"""Work of a solve whose solution is one of several to come: of crossover, the memory dual, or least memory; and least work of others."""
LEAST_SOLVE_SECONDS = 0.5
"""Wall-clock seconds that a solve may take, however near the time limit is."""
CLOSE_GAP = 2e-3
"""Gap at which a solve of a large problem, or the search for a plan's limits, stops."""
EXACT_MOMENTS, CROSSOVER_MOMENTS = 16, 6
"""Times of a recomputation that are told apart in an exact problem, and in crossover."""
SMALL_TENSOR_SHARE = 1e-3
"""Share of the bytes that backward reads. A tensor below that is not recomputed for its own sake."""
JOINT_ENTRIES, JOINT_EXACT_ENTRIES = 100_000, 60_000
"""Edge entries up to which recomputation joins the problem; and, of the resulting problem, up to which all its times are told apart."""

# schedules of answers

ESTIMATE_ERROR = 0.03
"""Relative error of estimated seconds, at most. A solution for a bound that trails by twice as much has no other limits tried: none of 30
became the best."""
LARGE_TRIES, LONG_TRIES, USUAL_TRIES = 3, 8, 24
"""Limits that are tried for one solution: of a large problem; of a long graph, for alternatives and for values on the host; of others."""
MORE_TRIES = 4
"""Factor on these tries for the final plan, and for the first solution of crossover, since later ones begin with its limits.

Without those for the final plan Llama-3-405B, 256x2, 256 sequences of 8192, takes 1.3 % longer.
"""
REMEMBERED_PLANS = 8
"""Number of assignments, the last scheduled, whose limit searches are kept."""
FINAL_MOVES = 15
"""Factor on the moves of local search for the final plan. On Llama-3-8B, 8x8, 70 GiB: 210.5 ms; with 5, 211.4 ms in 1 CPU s less."""
SHORT_DEPTHS, DEEP_LAYERS = (8, 14), 44
"""Depths of the graphs from which a deeper one is extrapolated, and the equal layers from which one is. Each layer adds the same."""
FEWEST_REPEATS = 6
"""Repeats from which a group of equal layers is folded."""
SCREENING_DEPTHS = (4, 6)
"""Depths of the graphs from which plans by hand are estimated to rank meshes: what a folded graph has, and two layers more."""

# memory: crossover, repair, reduced limits, the least memory

LIMIT_SHARES = (0.95, 1.0)
"""Shares of the limit that solutions may hold. The first leaves room to prefetch. On Llama-3-8B, 8x8, 14 and 7 GiB, 0.9 bought nothing."""
CROSSOVER_IDLE = 1
"""Crossover passes without a gain, one after another, before it ends. Each learns prices for the next.

With 0 Llama-3-70B, 32x8, 74.5 GiB takes 1738 ms instead of 1717 ms, in as many CPU seconds.
"""
LIGHT_ANSWERS = 2
"""Solutions in which everything may be recomputed, of a large problem, at most."""
FLIPS = 200
"""Sets of recomputed operators that are scheduled in a small problem, at most. Without any, 7 of 210 tiny graphs miss their optimum."""
RESERVE_GRAIN = 1_000
"""Reserved bytes are rounded up to one such part of the limit."""
LEAST_MEMORY_SOLVES = 2
"""Solves under each limit that is tried for the least memory, at most."""
LEAST_MEMORY_FIRST_WORK, LEAST_MEMORY_LAST_WORK = 30.0, 0.5
"""Work of the solve for least memory, and of each further one once the work is used up."""

# bounds: surrogate weights

CUT_STEP = 0.3
"""Share of the cutting planes' weights in the next ones. The rest is of the best so far."""
PATH_GAIN = 1e-4
"""Relative gain for which a path enters as a term."""
SPAN_NODES = 2_000
"""Nodes of a phase up to which spans are looked for, which cost a matrix product."""
BOUND_SOLVE_SHARE = 0.5
"""Gap of a solve for a bound: this share of the open gap, or of the rise that weights can still reach."""
LOOSE_GAP = 0.1
"""Gap above which a large problem tries other weights."""

# bounds: memory dual

DUAL_PRICE_SHARE = 0.65
"""Share of the work for prices. The rest proves the result for free layers."""
DUAL_LEAST_SHARE = 0.1
"""Share of the effort that must be left for a memory dual."""
DUAL_GAIN = 5e-4
"""Gap at which a solve stops, and gain below which no other price is tried."""
FIRST_PRICE_SHARE, PRICE_GROWTH = 0.06, 4.0
"""Cap on the first price, as a share of the seconds over the bytes allowed; and factor on the best prices, the cap on the next."""
DUAL_RANGE = 1e9
"""Seconds of paid memory to those of the step without prices, at most: a linear program of doubles tells no more apart."""
DUAL_STEP, DUAL_STEP_DECAY = 0.5, 0.6
"""Share of the master's prices in the next ones; and factor on it after each round without a gain.

Without the factor the bound of Llama-3-8B, 8x8, 7 GiB is 0.23 % lower.
"""

# bounds: decomposition of tied layers

DECOMPOSITION_ENOUGH, DECOMPOSITION_LITTLE = 1e-4, 5e-4
"""Shares of the tied optimum that may be missing: for steps to end, and for the outside to be solved."""
DECOMPOSITION_SOLVE_GAP = 2e-4
"""Gap at which the solve of a subproblem stops."""
OUTSIDE_SHARE = 0.5
"""Share of the work for the outside, without which the layer's bound is of no use."""
LAST_PROOF_SHARE = 0.1
"""Share of the effort by which a last proof may exceed it."""

# values on the host

HOST_SHARES = {"limit": 0.15, "larger": 0.15, "hidden": 0.5, "fit": 0.1}
"""Shares of the effort: of the search under the limit itself, of that under all that the host has room for, of that under what copies can
hide, and of moving values of one plan to the host."""
HOST_HIDDEN_SHARE = 1 / 3
"""Share of the bytes that the host's link carries in a step, up to which copies can be hidden: they go to the host beside forward, a third
of a step."""

# the end of a search

TIED_LAYERS_TRIED = 3
"""Number of repeats whose choices are tried for all, so that layers are equal."""
USED_UP_SHARE = 0.9
"""Share of its work from which a search counts as ended by it."""
