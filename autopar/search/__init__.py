"""Graph x rules x cost model -> the best schedule within the memory limit, with a proved bound on its step.

phases       a phase is a row: name, share of the work, condition, function; a loop runs and records them
telemetry    what each phase did: work, CPU seconds, step and bound before and after
thresholds   sizes at which the search changes its method, as one value; tests lower them
settings     the numbers that steer the search: unit, meaning, and the case that set them
solving      solves within a budget: the one place that calls the solvers
driver       find_plan, find_pinned_plan, the searches on one mesh, one on a model, the table of its phases, their state, the result
choices      the search space: strategies of operators, specs of inputs, prices of reshards, pins
ilp          choices -> integer problem -> assignment: nodes and edges, memory items, prices, rematerialization
bounds       bounds on the step of every plan: surrogate sums, Lagrangian prices of memory, one aggregated rank
folding      symmetry: equal layers are searched once, and a bound covers plans whose layers differ
coarsening   meshes with axes merged, and the one-axis neighbourhood of their plans
memory       short memory: repair, crossover with rematerialization, reduced limits, the least memory
fixing       fix and re-solve: equal layers tied, alternatives to one choice
baselines    plans that people write by hand: recipes, propagation, checkpointing, their schedules

A new phase is a function and a row of ``driver.phase_table``. ``benchmarks/ablation.py --without NAME`` says what it buys.
"""

from autopar.search.baselines.screening import Screened, screen_baselines
from autopar.search.driver.candidates import SEARCHED, Candidate, merge_candidates
from autopar.search.driver.find_plan import find_plan
from autopar.search.driver.offloading import find_plan_with_host
from autopar.search.driver.pinned import find_pinned_plan
from autopar.search.driver.result import Baseline, SearchResult, Shared
from autopar.search.driver.state import Progress
from autopar.search.settings import PROOF
from autopar.search.telemetry import PhaseRecord
from autopar.search.thresholds import Thresholds

__all__ = [
    "PROOF", "SEARCHED", "Baseline", "Candidate", "PhaseRecord", "Progress", "Screened", "SearchResult", "Shared", "Thresholds",
    "find_pinned_plan", "find_plan", "find_plan_with_host", "merge_candidates", "screen_baselines",
]  # fmt: skip
