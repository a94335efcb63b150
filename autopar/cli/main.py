"""``autopar VERB ...``: finds the verb's file, runs it, and turns errors into a message, a hint and an exit status.

A verb is imported only when it is run, so that ``autopar --help`` takes no longer than Python itself. Typer reads each verb's signature.
"""

from __future__ import annotations

import difflib
import gc
import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from typing import Any

from autopar.cli.clock import start_clock
from autopar.cli.terminal import discard_output, fail, open_closed_streams, out
from autopar.cli.words import check_words

VERBS = {
    "plan": "choose how a model is split over a mesh, and write the plan",
    "show": "what a plan says: time, memory, specs, collectives; --html, --svg and --trace write files",
    "explain": "why one parameter, operator or tensor lies as it does",
    "diff": "what changed between two plans",
    "check": "recompute a plan's legality, cost and memory from the plan alone",
    "verify": "run the sharded program on local ranks against the single-device model",
    "export": "write each rank's program and weights, to be run without the model's code",
    "tune": "run the best plans on the ranks of torchrun, and write the fastest",
    "sweep": "plan for several numbers of devices and compare",
    "rules": "the table of sharding rules; --missing lists a model's operators without one",
    "profile": "measure this machine and write a hardware file",
    "hardware": "the built-in hardware files; one of them with the source of each figure",
    "solve": "solve a problem file: nodes, choices and a memory limit, or a pipeline",
    "schema": "the JSON Schema of the plan file",
    "completion": "a script that completes commands and options in a shell",
    "demo": "plan and train a small model on local ranks beside the single-process run",
}
"""Every verb: the function of its name in the file of its name, and what it does."""

INTERRUPTED = 130
KEEPING = {
    **dict.fromkeys(("plan", "sweep", "solve"), "once there is a plan, Ctrl-C keeps the best so far"),
    "tune": "once every plan was measured, Ctrl-C keeps the fastest so far",
}
"""Verbs that Ctrl-C makes give the best so far, and from when on."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status. As a script it ends at once after Ctrl-C, and as a rank that torchrun started.

    A thread of gloo may still hold tensors of the last collective, for whose end it asks the interpreter. Python 3.11 aborts the process if
    that comes while it ends ("terminate called without an active exception"). A rank that failed must be gone for the others to notice.
    """
    start_clock(with_process=arguments is None)
    if arguments is None:
        open_closed_streams()
    status = _main(list(sys.argv[1:] if arguments is None else arguments))
    if arguments is None and (status == INTERRUPTED or "RANK" in os.environ):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    if arguments is None:
        gc.freeze()  # a script's end: the interpreter would look through all that a plan was made of, a tenth of a large one's time
    return status


def _main(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        out(_help())
        return 0 if words else 2
    if words[0] == "--version":
        from autopar.version import __version__

        out(f"autopar {__version__}")
        return 0
    if words[0] not in VERBS:
        near = difflib.get_close_matches(words[0], VERBS, n=1)
        hint = f"did you mean autopar {near[0]}?" if near else f"one of {', '.join(VERBS)}; autopar --help says what they do"
        return fail(f"there is no command {words[0]!r}", hint, 2)
    try:
        return _run(words[0], words[1:])
    except BrokenPipeError:
        discard_output()  # the reader left: nothing more to say, nor at exit
        return 1
    except KeyboardInterrupt:  # while a verb is still imported
        return _interrupted(words[0])


def _run(verb: str, words: list[str]) -> int:
    import typer

    from autopar.errors import AutoparError, UsageError

    WrongUsage = typer.BadParameter.__bases__[0]  # of all that is wrong with a command's words; public by no name of its own

    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    command = _interruptible(verb, getattr(import_module(f"autopar.cli.{verb}"), verb))
    app.command(help=VERBS[verb], context_settings={"help_option_names": ["-h", "--help"]})(command)
    parser = typer.main.get_command(app)
    try:
        check_words(verb, parser, words)
        ended = parser.main(words, f"autopar {verb}", standalone_mode=False)
    except AutoparError as error:
        return fail(error.message, error.hint, error.exit_status)
    except WrongUsage as error:  # type: ignore[misc]
        return fail(error.format_message(), f"autopar {verb} --help lists its arguments", UsageError.exit_status)
    except BrokenPipeError:
        raise
    except OSError as error:
        named = f" {error.filename}" if error.filename else ""
        return fail(f"the system refuses{named}: {error.strerror}", "check the path, its permissions, and the room that is left", 3)
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else 0 if left.code is None else 1
    return ended if isinstance(ended, int) else 0


def _interruptible(verb: str, command: Callable[..., None]) -> Callable[..., None]:
    """The command with words for Ctrl-C where nothing below it has an answer to keep; typer would end without any."""

    @wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        try:
            command(*arguments, **options)
        except KeyboardInterrupt:
            raise SystemExit(_interrupted(verb)) from None

    return run


def _interrupted(verb: str) -> int:
    hint = KEEPING.get(verb, "no process is left of it; run it again")
    return fail("interrupted before there was an answer", hint, INTERRUPTED)


def _help() -> str:
    width = max(map(len, VERBS))
    rows = "\n".join(f"  {verb.ljust(width)}  {text}" for verb, text in VERBS.items())
    return (
        "autopar: a PyTorch model, example inputs and a device mesh in; a sharding plan and the sharded program out\n\n"
        f"usage: autopar COMMAND ...      autopar COMMAND --help\n\n{rows}\n\n"
        "TARGET is file.py:function, package.module:function, zoo:NAME,key=value,... or hf:CONFIG.json,batch=..,seq=..;\n"
        "autopar plan zoo: lists the built-in models. A plan that splits something:\n"
        "autopar plan zoo:llama3-8b,layers=4,batch=16,seq=8192 --mesh dp=8,tp=8 -o plan.json"
    )
