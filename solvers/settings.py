"""Every number that steers the solver, in one table. ``benchmarks/solvers.py --without NAME=VALUE`` compares another.

A *unit of work* is about one CPU second of compiled code on a server core of 2024. What is counted is the same everywhere: entries of
tables that are read, changes of prices, iterations of the simplex method. The numbers ending in ``_work`` turn counts into units; they
were measured on the contest's instances and on layered problems.

A letter names an instance of the contest on intra-operator parallelism. What is said of one was measured after 12 to 14 units of work,
with one seed, so that a percent or two may be chance. Numbers without a case were not left out alone.
"""

from __future__ import annotations

from dataclasses import dataclass

PARTS = ("dominance", "oversized", "elimination", "fixing", "warm start")
"""Parts that ``benchmarks/solvers.py --without`` leaves out by name."""


@dataclass(frozen=True)
class Settings:
    """The numbers; each is followed by its meaning with unit, and what was measured without it."""

    skip: frozenset[str] = frozenset()
    """Parts left out (``PARTS``), to measure what they buy."""

    # Work.
    entry_work: float = 2.5e-9
    """Units for a table entry that is read. Measured: 1.9e-9 in a pass of messages, 2.5e-9 in presolve, 3.4e-9 in a sweep."""
    node_work: float = 1.3e-6
    """Units for a node in an elimination sweep, mostly for the order of elimination. Measured."""
    iteration_work: float = 0.8e-8
    """Units for a simplex iteration, for each row and column. Measured."""
    iterations_between_questions: int = 5
    """Simplex iterations of an integer program for each time that HiGHS asks whether to go on: it tells no number. Measured."""
    start_work: float = 2e-4
    """Units for a run of HiGHS or a round of messages, whatever the size."""

    # Presolve.
    largest_presolve_table: int = 20_000
    """Entries of the table that eliminating a node with two neighbours may make. Larger ones cost more than they save."""
    presolve_rounds: int = 4
    """Rounds of propagation and dominance, at most. With 20, A, B, G and P cost the same and take as long."""

    # Which method: ``auto``.
    direct_entries: int = 20_000
    """Table entries up to which a core goes to HiGHS at once. With 120,000 llama3 on 2x2x2 is 229 % dearer after 4 units."""
    exact_entries: int = 120_000
    """Table entries up to which HiGHS solves what messages leave."""
    exact_share: float = 0.4
    """Share of the work left that one exact attempt, an integer program or an exact sweep, may take."""
    rounds_between_looks: int = 4
    """Rounds of messages after which their gain is judged."""
    least_gain: float = 0.03
    """Share of the gap that has to close between two looks, for messages to go on."""
    smaller: float = 0.6
    """Share of its entries that a core may keep, at most, to replace the present one."""

    # Exact elimination.
    exact_orders: int = 16
    """Orders of elimination tried for an exact sweep. With 4, six layers of ``zoo:moe`` on 4 devices take 26 CPU seconds instead of 1."""

    # Sparse elimination, for cores without memory.
    sparse_rows: tuple[int, ...] = (4_000, 60_000, 1_000_000, 4_000_000)
    """Rows that a table may have, from one attempt to the next. The last take 0.3 GB: eight layers of ``zoo:llama3`` on 2x4 need them."""
    spare_cut: float = 0.9
    """Factor of the room for rows where they are too many. With 0.8 the third attempt on those eight layers leaves 0.28 %, not 0.14."""
    least_spare: float = 0.01
    """Share of that room below which just any rows are kept: too many cost nothing."""
    row_work: float = 3e-8
    """Units for a row that is read or written. Measured."""
    lookup_work: float = 1e-8
    """Units for a row that is looked up in another table, and for a row of that. Measured."""
    proof_gap: float = 1e-3
    """Gap asked below which a large core is eliminated though the caller is not patient: proofs ask for less.

    With 0 the bound of Llama-3-70B, 32x8, is 1.3 % lower. With 1 DeepSeek's plan on 8x8 takes 4 % longer: less work is left to the search.
    """
    worth_beginning: float = 0.95
    """Share of its entries that the core may keep, at most, for messages to begin anew on what is left of it. They cost 70 passes."""

    # The integer program.
    largest_coefficient: float = 1e6
    """Costs in HiGHS are at most this, which its tolerances are made for."""
    tight: float = 1e-9
    """HiGHS's feasibility tolerance; the share by which its float bounds are lowered, and by which sums of one timetable may differ.

    Without prices, passes of messages end once a few gain less than this share of the bound.
    """
    closing_gap: float = 0.5
    """Share of the gap asked at which integer programs and first messages end: their own gap leaves out what every answer costs."""
    rows_at_once: int = 10
    """Memory rows added in one round: a handful bind."""

    # Messages and prices of memory (the dual).
    warm_passes: int = 40
    """Passes of messages at the first prices, mostly zero, before prices change."""
    dual_updates: int = 16
    """Changes of prices in a round: about as much work as the sweeps of a round."""
    dual_passes: int = 2
    """Passes of messages for each change of prices."""
    momentum: float = 0.9
    """Share of the messages' last step that the next repeats, at most (Nesterov). Without it the bound of K is 2.3 % lower."""
    gradient_memory: float = 0.9
    """Weight of earlier gradients of the prices (Adam). Without both weights K is 11 % dearer and its bound 1.9 % lower."""
    square_memory: float = 0.95
    """Weight of earlier squared gradients (Adam)."""
    evening: float = 0.1
    """Share of the largest gradient to which smaller ones are evened out."""
    temperature: float = 0.1
    """Temperature of beliefs read as probabilities, as a share of the gap per node."""
    cooling: float = 0.5
    """Factor of the temperature whenever the step begins anew.

    Without cooling, new beginnings and ``steepest`` K is 5.3 % dearer and its bound 7.3 % lower.
    """
    steepest: float = 0.2
    """Cosine between a step and the gradient that its length counts on, at least (Polyak). Without it U's bound is 11 % lower."""
    first_step: float = 0.1
    """Share of the step that would close the gap if the dual were flat: longer ones throw the first prices far off."""
    dual_patience: int = 12
    """Changes of prices without a better bound before the step is cut."""
    step_cut: float = 0.7
    """Factor of the step after ``dual_patience`` changes without progress."""
    step_growth: float = 1.1
    """Factor of the step after progress. Without it S costs 6.0 % more and its bound is 1.4 % lower."""
    least_step: float = 0.003
    """A step cut below this begins anew with ``next_step``."""
    next_step: float = 0.05
    """Share of the step that would close the gap, once steps begin anew."""
    progress: float = 1e-5
    """Share by which a bound must grow to count as better."""

    # Neighbourhood search (the primal).
    sweeps: int = 30
    """Sweeps in a round."""
    table_entries: int = 20_000_000
    """Entries of all tables of a sweep: 200 MB. An exact sweep reads at most a third as many for one node."""
    spare_neighbours: int = 24
    """Neighbours that eliminations may add to a node before one is held instead. With 64 K costs 21 % more."""
    polishing_passes: int = 10
    """Passes of messages that begin an episode from the dual's prices. With 1 K costs 7.6 % more."""
    polishing_sweeps: int = 5
    """Sweeps without limits that follow them. Without these K is 31 times as dear."""
    polishing_largest: float = 1e4
    """Table entries looked at for one node of those sweeps, at most."""
    episode: int = 60
    """Sweeps of an episode after its last improvement."""
    first_episode: int = 15
    """Sweeps of an episode while nothing feasible is known: newer prices help more. With 60 K costs 15 % more with one of two seeds."""
    renewal: float = 0.25
    """Share of the gap that the dual has to close before a new line of answers begins from it."""
    tired: int = 4
    """Episodes without progress after which a line ends. Without lines K is 7.5 % dearer."""
    smallest_power: float = 3.0
    """Power of ten of the smallest limit on table entries that a sweep draws."""
    largest_power: float = 4.5
    """Power of ten of the largest. With one limit, 10,000, K costs 1.0 % less; without jitter as well S costs 3.8 % more."""
    shakes: tuple[float, ...] = (0.0, 0.001, 0.003, 0.01)
    """Shares of nodes that are set at random before a sweep. Each sweep draws one share.

    With 0.003 alone, one limit and one noise, U costs 1.1 % more after 50 units.
    """
    spreads: tuple[float, ...] = (0.0, 0.0, 0.03, 0.1, 0.3)
    """Spreads of the dual's prices between sweeps. An episode draws one; with 0 its prices stay.

    Without them U costs 4.5 % more, S 0.3 %, K 0.5 %. With 0.1 alone S costs 4.8 % more.
    """
    noises: tuple[float, ...] = (0.1, 0.25)
    """Spreads of the prices with which an episode begins, of which it draws one."""
    jitter: float = 0.3
    """Spread of the nodes' priorities in the order of elimination, so that sweeps differ. Without it: K -1.7 %, S +1.0 %, U -0.6 %."""
    price_over: float = 1.3
    """Factor of the price of a time whose limit is exceeded, between sweeps. Where prices do not drift K is 31 times as dear."""
    price_over_mean: float = 0.3
    """Share of the mean price added there, so that prices of zero rise."""
    price_stopped: float = 0.02
    """Rise of the price of a time that stops a change, for each of up to three. Without this and the fall U costs 1.4 % more."""
    price_stopped_mean: float = 0.001
    """Share of the mean price added there."""
    price_free: float = 0.01
    """Fall of the price of a time that is not used at all, and in proportion of one that is in part."""

    # Proofs and answers.
    negligible: float = 1e-6
    """What counts as none: a gap (the contract of ``Status``), a distance from a whole number, a share of the room exceeded in an LP."""
    safety: float = 1e-12
    """Share of the costs summed by which a bound is lowered for the rounding of floats."""
    lean_work: float = 2.0
    """Units of work for a feasible limit where the given one was not met."""
    lean_seconds: float = 2.0
    """Seconds that it has even where the time limit is past. Without them a solve that is cut off early says nothing."""


SETTINGS = Settings()
