"""Problem -> Solution: one choice for each node at least total cost under a memory limit at every time.

``import solvers`` loads no solver: names resolve on first use, so that a command line starts fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from solvers.evaluation import evaluate
    from solvers.problem import INFINITE, Problem, ProblemError
    from solvers.solution import Solution, Status
    from solvers.solving import METHODS, solve

__all__ = ["INFINITE", "METHODS", "Problem", "ProblemError", "Solution", "Status", "evaluate", "solve"]

_HOME = {
    "INFINITE": "problem",
    "METHODS": "solving",
    "Problem": "problem",
    "ProblemError": "problem",
    "Solution": "solution",
    "Status": "solution",
    "evaluate": "evaluation",
    "solve": "solving",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'solvers' has no attribute {name!r}")
    value = getattr(import_module(f"solvers.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
