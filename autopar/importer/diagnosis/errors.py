"""What went wrong in a capture, in one sentence at the user's line.

torch's own messages run over pages and speak of its internals; here the cause is named by a table of signs, and the place is the
innermost frame of the traceback outside torch and this package.
"""

from __future__ import annotations

import linecache
import logging
import os
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autopar.errors import AutoparError, CaptureError, TimeLimitError
from autopar.importer.diagnosis.fixed_sizes import REWRITES, hint_of

_OURS = str(Path(__file__).resolve().parents[2])
_ZOO = os.path.join(_OURS, "zoo")
_TORCH = str(Path(torch.__file__).parent)
_LAYERS, _CALLERS = os.path.join(_TORCH, "nn", "modules"), ("module.py", "container.py")
_STANDARD = sysconfig.get_path("stdlib")

NO_COLLECTIVES = (
    "leave it out: the model is written for one device, on whole tensors, and the plan puts the collectives in; a function that runs on "
    "each rank's part, collectives and all, is given to torch.distributed.tensor.experimental.local_map"
)

OWN_GRADIENT = (
    "in a region call what its forward does: gradients of collectives follow from what they compute; elsewhere give it setup_context, and "
    "generate_vmap_rule = True"
)

OWN_GENERATOR = (
    "numbers are drawn from a torch.Generator of the model's own",
    "leave generator= out, since a plan's draws have seeds that all ranks share, or pass what is drawn as an input",
)
"""What is wrong with it, and what to do: said where export hands the generator on, and where that fails, as in torch 2.11."""

LONGEST = 300
"""Characters of another library's message that an error repeats."""

_CAUSES: tuple[tuple[str, str, str], ...] = (
    (
        "GuardOnDataDependentSymNode|DataDependentOutputException|data-dependent|unhashable type: non-nested SymInt",
        "Python control flow or a size depends on the values of a tensor",
        "a plan needs one graph for all inputs: use torch.where instead of if, and sizes that are known before the run",
    ),
    (
        "DynamicOutputShapeException|PendingUnbackedSymbol",
        "the size of a result depends on the values of a tensor",
        "use operators whose result sizes are known before the run, such as topk, one_hot or a mask",
    ),
    (
        "UnsupportedOperatorException",
        "the operator has no shape function, so its result's size is unknown before the run",
        "register one with torch.library.register_fake",
    ),
    (
        "FakeTensorDeviceMismatchError|found two different devices",
        "tensors are made on different devices",
        "make new tensors on the device of an input (device=x.device) instead of a fixed one; capture runs everything on cpu shapes",
    ),
    ("_C.Generator'>", *OWN_GENERATOR),
    (
        "InternalTorchDynamoError",
        "an operator that runs a graph of its own (torch.cond, a compiled function) is not supported",
        "write this part with plain tensor operators",
    ),
    (
        "c10d|ProcessGroup|process group has not been initialized|torch.distributed|Unsupported group type|group cannot be None",
        "the model calls torch.distributed itself",
        NO_COLLECTIVES,
    ),
    (
        "autograd.Function with functorch transforms|generate_vmap_rule",
        "a torch.autograd.Function is called under vmap, or in a region of local_map",
        OWN_GRADIENT,
    ),
    (
        "is not differentiated again",
        "a gradient is differentiated again through an operator that has no second derivative here",
        "take that gradient of a part that is made of other operators (attention: write it out)",
    ),
    (
        "which is not a known type",
        "forward takes or returns an object that is not a tensor, a plain value, or a container of these",
        "return tensors in tuples, lists or dictionaries, or register the class with torch.utils._pytree",
    ),
    (
        "FakeTensor.__format__|its data is not allocated yet|Cannot access data pointer",
        "the values of a tensor are read, but the model is captured on tensors without values",
        "read, print and format them outside of the forward, of what it returns",
    ),
    (
        "not supported for tensor subclasses",
        "tensors leave torch (NumPy or Python values)",
        "keep the computation in torch operators",
    ),
)
"""A sign in the exception's class names or message, the cause it means, and what to do about it."""
_OF_VALUES = frozenset(meaning for _, meaning, _ in _CAUSES[:2])
"""The causes that some call of torch has made."""


@dataclass(frozen=True)
class Maker:
    """A call of torch whose result depends on values: the function's name, and the user's line."""

    name: str
    place: tuple[str, int] | None


@contextmanager
def diagnosed(step: str, running: Callable[[], tuple[str, int] | None] = lambda: None) -> Iterator[None]:
    """Turn exceptions of a step of the capture into ``CaptureError``.

    ``step`` says what was done (``running the model``); ``running`` gives the user's line when the traceback does not hold it.
    """
    try:
        with _quiet():
            yield
    except TimeLimitError:
        raise
    except AutoparError as error:
        place = running()
        if place is None or error.message.startswith(place[0]):
            raise
        raise type(error)(at_line(error.message, place), error.hint) from None
    except Carried as carried:
        if isinstance(carried.error, TimeLimitError):
            raise carried.error from None
        raise explain(carried.error, step, running(), carried.maker, runs=carried.runs) from None
    except Exception as error:
        raise explain(error, step, running()) from None


class Carried(Exception):
    """An exception of the user's code on its way through export.

    Export attaches the graph so far to the exceptions that pass through it, and prints that graph; this one takes no attributes.

    Args:
        maker: what made the size, or asked for the value, that the program does not know.
        runs: whether the model runs where it is not exported.
    """

    error: Exception
    maker: Maker | None
    runs: bool

    def __init__(self, error: Exception, maker: Maker | None = None, *, runs: bool = False) -> None:
        super().__init__(str(error))
        for name, value in (("error", error), ("maker", maker), ("runs", runs)):
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):
            super().__setattr__(name, value)


def is_known_cause(error: Exception) -> bool:
    """Whether an error is refused in words of its own."""
    return isinstance(error, AutoparError) or any(word in _signs(error) for sign, *_ in _CAUSES for word in sign.split("|"))


def _signs(error: Exception) -> str:
    """The text in which signs are looked for."""
    return " ".join([*(kind.__name__ for kind in type(error).__mro__), str(error)])


def explain(
    error: Exception, step: str, place: tuple[str, int] | None = None, maker: Maker | None = None, *, runs: bool = False
) -> CaptureError:  # fmt: skip
    """The error for users.

    Args:
        place: the file and line when the traceback does not hold the user's frames.
        maker, runs: see ``Carried``; the line that makes a size is named, not the one that first looks at it.
    """
    if isinstance(error, AutoparError):
        return CaptureError(at_line(error.message, place or user_place(error)), error.hint)
    signs = _signs(error)
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    found = f"{type(error).__name__}: {first[:LONGEST]}" if first else type(error).__name__
    cause, hint = f"{step} fails with {found}", "run the model on these inputs without autopar to see what it says"
    if runs:
        cause = f"the model runs, and fails while it is exported, with {found}"
        hint = "give it the masks that it makes itself otherwise: models that ask whether they are exported or compiled go another way then"
    for sign, meaning, advice in _CAUSES:
        if any(word in signs for word in sign.split("|")):
            cause, hint = f"{meaning} ({found})" if "Unsupported" in sign else meaning, advice
            if maker is not None and meaning in _OF_VALUES:
                place, hint = maker.place or place, hint_of(maker.name, maker.place) if maker.name in REWRITES else hint
            break
    return CaptureError(at_line(cause, place or user_place(error)), hint)


def refuse_collective(name: str, place: tuple[str, int] | None = None) -> None:
    """Raises CaptureError for a collective of the model's own, at the user's line where it is known."""
    raise CaptureError(at_line(f"the model calls a collective of torch.distributed itself ({name})", place), NO_COLLECTIVES)


def refuse_rank() -> None:
    """Raises CaptureError for a model that asks which rank it runs on: what it makes of the answer would be a constant of all ranks."""
    raise CaptureError(
        "the model asks which rank it runs on, but all ranks run one program, made on any of them",
        "ask outside of the model, and pass what depends on the rank as an input",
    )


def refuse_conversion(module: torch.nn.Module) -> None:
    """Raises CaptureError for a forward that gives a module other tensors: what it would have from the second step on."""
    raise CaptureError(
        f"the forward converts its {type(module).__name__} to another dtype or device",
        "convert it before planning; or convert what goes into it, and its weights where they are used: F.linear(x, self.weight.float())",
    )


def at_line(message: str, place: tuple[str, int] | None) -> str:
    """The message with file, line and source before it."""
    if place is None:
        return message
    source = linecache.getline(*place).strip()
    return f"{place[0]}:{place[1]}: {message}" + (f"\n    {source}" if source else "")


def user_place(error: BaseException) -> tuple[str, int] | None:
    """File and line of the innermost frame that is the user's (or a built-in model's), else of a layer of ``torch.nn``."""
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    users = [place for place in frames if is_user_file(place[0])]
    layers = [place for place in frames if os.path.dirname(place[0]) == _LAYERS and os.path.basename(place[0]) not in _CALLERS]
    return next(reversed(users or layers), None)


def is_user_file(file: str) -> bool:
    """Whether a source file is neither torch's, nor this package's, nor generated."""
    ours = file.startswith(_OURS + os.sep) and not file.startswith(_ZOO + os.sep)
    standard = file.startswith(_STANDARD + os.sep) and "site-packages" not in file
    return os.path.isabs(file) and not ours and not standard and not file.startswith(_TORCH + os.sep)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from writing pages of log when it fails.

    Of its hundreds of loggers most have no level of their own and follow. Each level that is set costs a pass over all loggers.
    """
    parts = [logger for name, logger in logging.root.manager.loggerDict.items() if name.startswith("torch.")]
    levelled = [logger for logger in parts if isinstance(logger, logging.Logger) and logger.level]
    levels = [(logger, logger.level) for logger in (logging.getLogger("torch"), *levelled)]
    try:
        for logger, _ in levels:
            logger.setLevel(logging.CRITICAL + 1)
        with warnings.catch_warnings():
            # recurrent modules hold their weights in a list too, which export sees change while it swaps parameters
            warnings.filterwarnings("ignore", message="The tensor attributes? .* assigned during export")
            yield
    finally:
        for logger, level in levels:
            logger.setLevel(level)
