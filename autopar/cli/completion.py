"""``autopar completion``: a script that completes commands, options and files in a shell."""

from __future__ import annotations

import re
from importlib import import_module
from inspect import signature
from typing import Annotated, get_type_hints

import typer

from autopar.cli.main import VERBS
from autopar.cli.terminal import out
from autopar.errors import UsageError

SHELLS = ("bash", "zsh", "fish")


def completion(shell: Annotated[str, typer.Argument(help="bash, zsh or fish: source <(autopar completion bash)")]) -> None:
    if shell not in SHELLS:
        raise UsageError(f"no completion for the shell {shell!r}", f"use one of {', '.join(SHELLS)}")
    options = {verb: options_of(verb) for verb in VERBS}
    out(_fish(options) if shell == "fish" else _bash(options, zsh=shell == "zsh"), end="")


def options_of(verb: str) -> tuple[str, ...]:
    """The long options of a command, from its signature."""
    command = getattr(import_module(f"autopar.cli.{verb}"), verb)
    hints = get_type_hints(command, include_extras=True)
    found = ["--help"]
    for name in signature(command).parameters:
        info = hints[name].__metadata__[0]
        if isinstance(info, typer.models.OptionInfo):
            words = (info.default, *(info.param_decls or ()))  # typer takes the first name for a default until it reads the signature
            given = [word for word in words if isinstance(word, str) and word.startswith("--")]
            found += given or [f"--{name.replace('_', '-')}"]
    return tuple(found)


def _bash(options: dict[str, tuple[str, ...]], *, zsh: bool) -> str:
    cases = "\n".join(f'        {verb}) words="{" ".join(found)}" ;;' for verb, found in options.items())
    script = f"""_autopar() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{' '.join(options)}" -- "$word"))
        return
    fi
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    case "$word" in
        -*) COMPREPLY=($(compgen -W "$words" -- "$word")) ;;
        *) COMPREPLY=($(compgen -f -- "$word")) ;;
    esac
}}
complete -o filenames -F _autopar autopar
"""
    return f"autoload -U +X bashcompinit && bashcompinit\n{script}" if zsh else script


def _fish(options: dict[str, tuple[str, ...]]) -> str:
    lines = [f"complete -c autopar -n __fish_use_subcommand -f -a {verb} -d '{VERBS[verb]}'" for verb in options]
    for verb, found in options.items():
        for option in found:
            lines.append(f"complete -c autopar -n '__fish_seen_subcommand_from {verb}' -l {re.sub('^--', '', option)}")
    return "\n".join(lines) + "\n"
