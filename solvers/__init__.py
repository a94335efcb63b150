"""Problem -> Solution: one choice for each node at least total cost under a memory limit at every time.

The road of ``solve(problem)``:

    problem, arrays, errors      the problem and what can be wrong with it
    documents, contest_format    a file -> JSON -> the problem's arrays, and back
    solving, auto                ``solve``; the method ``auto``, which joins those below
    settings                     every number that steers them, with its unit and reason
    reduction                    the exact steps that leave a smaller core (presolve_state, memory, kernels)
    exact_elimination            small width: one sweep is the proof
    sparse_elimination           without memory: all nodes eliminated, in tables of the rows that a better answer may use
    array_program                with memory, small core: LP, then integer program, in HiGHS (integer_program: the same through PuLP)
    linear_program               small linear programs of callers, straight into HiGHS
    message_search               large core: prices of memory and messages for the bound (dual_ascent),
                                 neighbourhood search for the choices (local_search, lns_moves)
    pairwise,                    a core's costs, and working space, as the loops of the large core read them
    elimination_workspace
    reduced_cost_fixing          what bound and choices rule out; the rest goes round again
    incumbent, evaluation        nothing is called feasible or a bound that was not checked there
    solution                     what ``solve`` returns
    kernels                      the loops in which the time goes, compiled where a compiler is there

``autopar.solvers.pipeline`` is a problem of its own: layers cut into stages, and the orders of their microbatches.

Budgets are *work*: counted, so that the same problem, seed and work give the same answer on every machine, whatever its load.
Importing it loads no solver: names resolve on first use, so that a command line starts fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import ProblemError, TooLargeError
    from .evaluation import evaluate
    from .problem import INFINITE, Problem
    from .solution import INTERRUPTED, Solution, Status
    from .solving import METHODS, solve

__all__ = [
    "INFINITE", "INTERRUPTED", "METHODS", "Problem", "ProblemError", "Solution", "Status", "TooLargeError", "evaluate", "solve",
]  # fmt: skip

_HOME = {
    "INFINITE": "problem",
    "INTERRUPTED": "solution",
    "METHODS": "solving",
    "Problem": "problem",
    "ProblemError": "errors",
    "TooLargeError": "errors",
    "Solution": "solution",
    "Status": "solution",
    "evaluate": "evaluation",
    "solve": "solving",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
