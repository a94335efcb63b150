"""A command's words before they are parsed: options without their value, and words that nothing takes, are told by name.

The parser would take the next option for the value, and then complain of a third word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.errors import UsageError


def check_words(verb: str, command: Any, words: Sequence[str]) -> None:
    """Raises UsageError: an option that takes a value has none, a word is one too many, a long option has one dash.

    Args:
        command: what typer makes of the verb: its ``params`` know their names and whether they take a value.
    """
    options = {name: option for option in command.params for name in (*option.opts, *option.secondary_opts) if name.startswith("-")}
    names = {*options, "--help", "-h"}
    room = sum(option.param_type_name == "argument" for option in command.params)
    left, before = iter(words), f"autopar {verb}"
    for word in left:
        name, equals, _ = word.partition("=")
        if word == "--":
            return
        if name in options:
            before = word
            if not (equals or options[name].is_flag):
                before = f"{word} {_value(verb, options[name], word, next(left, ''), names)}"
        elif word.startswith("-") and f"-{name}" in names:
            raise UsageError(f"there is no option {name}", f"write -{name}, with two dashes")
        elif word.startswith("-") and word != "-":
            if word[:2] not in options:
                return  # help, or an option that is none: the parser's to say
        elif room == 0:
            hint = f"quote a value with spaces in it, and write lists without any; autopar {verb} --help lists its arguments"
            raise UsageError(f"nothing takes the word {word!r} after {before}", hint)
        else:
            room, before = room - 1, word


def _value(verb: str, option: Any, name: str, following: str, names: set[str]) -> str:
    """The word after an option that takes one. Raises UsageError."""
    other = following.partition("=")[0]
    if following and other not in names:
        return following
    found = f"the option {other} follows" if following else "none follows"
    hint = f"give {name} VALUE: {option.help}" if option.help else f"autopar {verb} --help lists its arguments"
    raise UsageError(f"{name} takes a value, and {found}", hint)
