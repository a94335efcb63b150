"""All forms of the kernels."""

import pytest

from solvers import compiled, solving

FORMS = {"machine code": compiled.EVERYTHING, "loops": compiled.LOOPS, "plain": compiled.NOTHING}


@pytest.fixture(params=FORMS)
def form(request, monkeypatch):
    """Runs a test with compiled kernels, with compiled loops and without, whatever the size of its problems."""
    if FORMS[request.param] and not compiled.AVAILABLE:
        pytest.skip("there is no numba to compile with")
    monkeypatch.setattr(solving, "_worth_compiling", lambda entries, seconds: FORMS[request.param])
