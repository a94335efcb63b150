"""PipelineProblem -> PipelineSolution: a cut of layers into chunks, modes and orders with a short step, and a bound over all of them.

The road of ``solve_pipeline(problem)``:

    problem, file_format         the problem, and its files
    settings                     every number that steers the search, with its unit and reason
    bounds                       what every order takes, of one cut and over all cuts
    intervals                    the mixes of modes worth taking for a chunk's layers
    cut_search                   local search over cuts, modes and warm-ups
    cut_list, exact_orders       branch and bound over cuts, then over the orders of each
    incumbent                    the best plan and the best bound; each plan is timed and checked there
    solving, solution            ``solve_pipeline`` and what it returns

    timetable                    orders, what makes them legal, the total order behind them
    chain, simulation            arrays for the kernels; when each action begins, what is in flight, bytes over time
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .file_format import load
    from .problem import Mode, PipelineProblem
    from .simulation import Simulation, simulate
    from .solution import PipelineSolution
    from .solving import solve_pipeline
    from .timetable import Action, Operation, PipelinePlan, check_legal, merge_orders, numbered, parse_orders

__all__ = [
    "Action", "Mode", "Operation", "PipelinePlan", "PipelineProblem", "PipelineSolution", "Simulation", "check_legal", "load",
    "merge_orders", "numbered", "parse_orders", "simulate", "solve_pipeline",
]  # fmt: skip

_HOME = {
    "Action": "timetable",
    "Mode": "problem",
    "Operation": "timetable",
    "PipelinePlan": "timetable",
    "PipelineProblem": "problem",
    "PipelineSolution": "solution",
    "Simulation": "simulation",
    "check_legal": "timetable",
    "load": "file_format",
    "merge_orders": "timetable",
    "numbered": "timetable",
    "parse_orders": "timetable",
    "simulate": "simulation",
    "solve_pipeline": "solving",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
