"""Both forms of the kernels."""

import pytest

from solvers import compiled, solving


@pytest.fixture(params=["machine code", "plain"])
def form(request, monkeypatch):
    """Runs a test with compiled kernels and without, whatever the size of its problems."""
    if request.param == "machine code" and not compiled.AVAILABLE:
        pytest.skip("there is no numba to compile with")
    monkeypatch.setattr(solving, "SMALL", -1 if request.param == "machine code" else 10**12)
