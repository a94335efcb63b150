"""TARGET (a function in a file or a package, ``zoo:NAME,key=value,...``, ``hf:CONFIG.json,...``) -> a model with example inputs."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from autopar.cli.terminal import printing_aside
from autopar.errors import AutoparError, CaptureError, UsageError
from autopar.graph import Graph
from autopar.target import Target

Mode = Literal["train", "inference"]

NO_SETTINGS: Mapping[str, str] = {}
_LONGEST = 300
"""Characters of a message of the user's own code that are repeated, of its first line."""
_FORMS = "write file.py:function, package.module:function, zoo:NAME,key=value,... or hf:CONFIG.json,batch=..,seq=.."


def load_target(text: str, mode: Mode = "train", device: str = "cpu", given: Mapping[str, str] = NO_SETTINGS) -> Target:
    """The model, its example inputs and its loss.

    Args:
        text: as the user wrote it.
        given: further settings: keys of a built-in or Hugging Face model, arguments of a function.
        mode: for built-in models: in training forward takes the targets too and returns the loss.
        device: where built-in models are made; ``meta`` needs no memory and is enough to plan.

    Raises:
        UsageError: no such file, module, function or built-in model, or a function that returns something else.
        CaptureError: the user's code fails; names its line.
    """
    kind, colon, rest = text.partition(":")
    if kind == "zoo" and colon:
        from autopar import zoo

        name, settings = _settings(rest, text, given)
        built: Target = zoo.build(name, mode=mode, device=device, **settings)
        return built
    if kind == "hf" and colon:
        from autopar.cli.huggingface import build

        path, settings = _settings(rest, text, given)
        return build(path, settings, mode)
    with printing_aside():
        return _load(text, given)


def _load(text: str, given: Mapping[str, str]) -> Target:
    """The target of a function of the user's."""
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        from autopar import zoo

        built_in = text.partition(",")[0] in zoo.names()
        raise UsageError(f"cannot read the target {text!r}", f"zoo:{text} is the built-in model" if built_in else _FORMS)
    module = _from_file(Path(place)) if place.endswith(".py") else _from_package(place)
    function = getattr(module, name, None)
    if not callable(function):
        made = [
            key
            for key, value in vars(module).items()
            if callable(value) and not key.startswith("_") and getattr(value, "__module__", "") == module.__name__
        ]
        raise UsageError(f"{place} has no function {name!r}", f"it has {', '.join(made[:8])}" if made else f"define {name}() in it")
    if inspect.iscoroutinefunction(function):
        raise UsageError(f"{text} is an async function", "define it without async: it is called once, and what it returns is planned")
    settings = {key: read_value(value) for key, value in given.items()}
    try:
        inspect.signature(function).bind(**settings)
    except TypeError as error:
        takes = ", ".join(inspect.signature(function).parameters) or "nothing"
        raise UsageError(f"{text} cannot be called with {', '.join(settings) or 'no arguments'}: {error}", f"it takes {takes}") from None
    except ValueError:
        pass  # no signature is known
    try:
        return _target(text, function(**settings))
    except (Exception, SystemExit) as error:  # the user's own code: anything can come out of it
        raise _failed(f"{text} raised", error) from error


def capture_target(text: str, mode: Mode, compute_dtype: str | None = None, microbatches: int = 1) -> Graph:
    """The graph of a target."""
    from autopar.api import capture

    target = load_target(text, mode, device="meta")
    with printing_aside():
        return capture(
            target.model, target.args, target.kwargs, mode=mode, loss=target.loss, loss_args=target.loss_args, compute_dtype=compute_dtype,
            microbatches=microbatches,
        )  # fmt: skip


def zoo_listing() -> str:
    """The built-in models with their keys and defaults, one a line."""
    from autopar import zoo

    return "\n".join(f"zoo:{name},{','.join(f'{key}={value}' for key, value in zoo.keys(name).items())}" for name in zoo.names())


def read_value(text: str) -> Any:
    """The number, truth value or text of a function's argument."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _settings(rest: str, text: str, given: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    name, *words = rest.split(",")
    settings = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key or not value:
            raise UsageError(f"cannot read {word!r} in the target {text!r}", "write key=value after the name, e.g. zoo:gpt2,layers=4")
        if key in settings:
            raise UsageError(f"{key} is given twice in the target {text!r}", "give each key once")
        settings[key] = value
    twice = next((key for key in given if key in settings), None)
    if twice is not None:
        raise UsageError(f"{twice} is given in the target {text!r} and varied", "leave it out of the target")
    return name, {**settings, **given}


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"there is no file {path}", "check the path; a module is written package.module:function")
    name = path.stem
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # so that the file can import its neighbours
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    previous = sys.modules.get(name)
    sys.modules[name] = module  # dataclasses and pickling look a class's module up by name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        if previous is None:
            del sys.modules[name]
        else:
            sys.modules[name] = previous
        raise _failed(f"{path} cannot be imported:", error) from error
    return module


def _from_package(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        file = Path(f"{name}.py")
        raise UsageError(f"{name!r} is not the name of a module", f"did you mean {file}:function?" if file.is_file() else _FORMS)
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise UsageError(f"there is no module {error.name!r}", _FORMS) from error
        raise _failed(f"{name} cannot be imported:", error) from error
    except (Exception, SystemExit) as error:
        raise _failed(f"{name} cannot be imported:", error) from error


def _failed(what: str, error: Exception | SystemExit) -> AutoparError:
    """The user's exception with the last line of the user's own code in it."""
    if isinstance(error, AutoparError):
        return error
    own = Path(__file__).resolve().parent
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_library(frame.filename, own)]
    if isinstance(error, SyntaxError):
        where = f" at {error.filename}:{error.lineno}"
    else:
        where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    said = next((line.strip()[:_LONGEST] for line in str(error).splitlines() if line.strip()), "no message")
    return CaptureError(f"{what} {type(error).__name__}: {said}{where}", "run the function on its own in Python to see the whole trace")


def _is_library(filename: str, own: Path) -> bool:
    return filename.startswith("<frozen") or "site-packages" in filename or Path(filename).parent == own or filename == importlib.__file__


def _target(text: str, returned: Any) -> Target:
    import torch

    if isinstance(returned, tuple):
        if not 2 <= len(returned) <= 3:
            raise _wrong(text, f"a tuple of {len(returned)}")
        model, args, *more = returned
        target = Target(model, args, more[0] if more else {})
    elif isinstance(returned, torch.nn.Module) or not hasattr(returned, "model"):
        raise _wrong(text, f"a {type(returned).__name__}")
    else:
        target = Target(
            returned.model, getattr(returned, "args", ()), getattr(returned, "kwargs", None) or {}, getattr(returned, "loss", None),
            getattr(returned, "loss_args", ()),
        )  # fmt: skip
    if not isinstance(target.model, torch.nn.Module):
        raise _wrong(text, f"a {type(target.model).__name__} as the model")
    if not isinstance(target.args, tuple | list):
        raise _wrong(text, f"a {type(target.args).__name__} as args")
    if not isinstance(target.kwargs, Mapping):
        raise _wrong(text, f"a {type(target.kwargs).__name__} as kwargs")
    return Target(target.model, tuple(target.args), dict(target.kwargs), target.loss, tuple(target.loss_args))


def _wrong(text: str, what: str) -> UsageError:
    return UsageError(
        f"{text} returned {what}",
        "return (model, args), (model, args, kwargs), or an object with model, args, kwargs, loss, loss_args; args is a tuple",
    )
