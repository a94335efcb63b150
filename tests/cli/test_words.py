"""Words of a command that stand where others were meant: options without their value, values in two words."""

from __future__ import annotations

from importlib import import_module

import pytest
import typer

from autopar.cli.main import VERBS
from tests.cli.running import autopar, refused

WRONG = {
    "plan zoo:mlp --mesh dp=2 --recompute --time-limit 95":
        "--recompute takes a value, and the option --time-limit follows\nhint: give",
    "plan zoo:mlp --mesh --recompute=off": "--mesh takes a value, and the option --recompute follows\nhint: give --mesh VALUE: dp=2,tp=4",
    "plan zoo:mlp --mesh 2 -o --json": "-o takes a value, and the option --json follows",
    "plan zoo:mlp --mesh": "--mesh takes a value, and none follows",
    "plan zoo:mlp --optimizer --help":
        "--optimizer takes a value, and the option --help follows\nhint: give --optimizer VALUE: adamw, adamw-mixed",
    "plan zoo:mlp --mesh dp=2, tp=2": "nothing takes the word 'tp=2' after --mesh dp=2,",
    "plan zoo:mlp --mesh=2 --pin layers.0.weight=S0 R": "nothing takes the word 'R' after --pin layers.0.weight=S0\nhint: quote",
    "plan zoo:mlp --pareto 8": "nothing takes the word '8' after --pareto",
    "plan -mesh 2": "there is no option -mesh\nhint: write --mesh",
    "plan zoo:mlp --mseh 2 --recompute": "No such option: --mseh",
    "schema plan problem": "nothing takes the word 'problem' after plan",
    "demo 4": "nothing takes the word '4' after autopar demo",
}  # fmt: skip


@pytest.mark.parametrize("words", WRONG)
def test_words_in_the_wrong_place_are_told(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(autopar(capsys, *words.split()), 2, WRONG[words])


def options(verb: str) -> list[str]:
    app = typer.Typer(add_completion=False)
    app.command()(getattr(import_module(f"autopar.cli.{verb}"), verb))
    return [option.opts[0] for option in typer.main.get_command(app).params if option.param_type_name == "option" and not option.is_flag]


@pytest.mark.parametrize("verb, option", [(verb, option) for verb in VERBS for option in options(verb)])
def test_every_option_that_takes_a_value_says_so(verb: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = f"{option} takes a value, and the option --help follows\nhint: give {option} VALUE: "
    refused(autopar(capsys, verb, option, "--help"), 2, said)


def test_values_that_look_like_options_are_values(capsys: pytest.CaptureFixture[str]) -> None:
    refused(autopar(capsys, "plan", "zoo:mlp", "--mesh", "2", "--seed", "-1"), 2, "the seed is -1")
    refused(autopar(capsys, "plan", "zoo:mlp", "--mesh=--json"), 2, "cannot read '--json' in the mesh")
    refused(autopar(capsys, "plan", "--mesh", "2", "--", "--json"), 2, "cannot read the target '--json'")
