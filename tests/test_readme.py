"""The README's code runs, prints what it says, and names only commands and files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import autopar
from autopar.cli.main import VERBS

README = Path(__file__).resolve().parents[1] / "README.md"
BLOCK = re.compile(r"^```(\w+)( notest)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_example_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], pytestconfig: pytest.Config
) -> None:
    blocks = BLOCK.findall(README.read_text())
    code = [text for language, untested, text in blocks if language == "python" and not untested]
    expected = next(text for language, _, text in blocks if language == "text")
    monkeypatch.chdir(tmp_path)
    for text in code:
        exec(compile(text, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    if pytestconfig.getoption("--update-golden"):
        README.write_text(README.read_text().replace(expected, printed))
    else:
        assert steady(printed) == steady(expected)
    assert (tmp_path / "plan.json").exists()


def steady(text: str) -> str:
    """Without the solver's seconds."""
    return re.sub(r"solved in [0-9.]+ s", "solved", text)


def test_commands_are_those_of_the_program() -> None:
    assert set(re.findall(r"^\| `autopar (\w+)", README.read_text(), re.MULTILINE)) == set(VERBS)


def test_the_layout_table_names_what_exists() -> None:
    table = README.read_text().partition("## Layout")[2].partition("## Limits")[0]
    names = [name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)]
    package = Path(autopar.__file__).parent
    assert len(names) > 12
    for name in names:
        places = (package.parent / name, package / name, README.parent / name)
        assert any(place.exists() for place in places), name
