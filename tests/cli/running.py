"""Runs the command in this process: fast, and its words can be compared."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from autopar.cli.main import main


@dataclass(frozen=True)
class Ran:
    """Exit status, stdout and stderr of one command."""

    status: int
    out: str
    err: str


def autopar(capsys: pytest.CaptureFixture[str], *words: object) -> Ran:
    """``autopar WORDS...``."""
    capsys.readouterr()
    status = main([str(word) for word in words])
    captured = capsys.readouterr()
    return Ran(status, captured.out, captured.err)


def refused(ran: Ran, status: int, said: str) -> None:
    """An error as every error must be: this exit status, one message with ``said`` in it, a last line of hint, nothing on stdout."""
    assert ran.status == status, ran
    assert said in ran.err, ran.err
    assert ran.err.strip().splitlines()[-1].startswith("hint: "), ran.err
    assert "Traceback" not in ran.err
    assert ran.out == ""
