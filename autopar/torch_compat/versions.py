"""The versions of torch that autopar was tested with."""

from __future__ import annotations

import warnings
from functools import cache

import torch

TESTED = ("2.11", "2.12", "2.13", "2.14", "2.15")
"""The minor versions of torch that the tests pass with: all of them with the one that ``pyproject.toml`` pins, the quick ones with the
others (``.ci/torch-versions``)."""


class UntestedTorchWarning(UserWarning):
    """A torch that autopar was not tested with: the private names used here may have changed."""


@cache
def check_tested() -> None:
    """Says once, at the first capture or compile, that this torch is none of ``TESTED``."""
    if ".".join(torch.__version__.split(".")[:2]) not in TESTED:
        warnings.warn(
            f"autopar was tested with torch {' and '.join(TESTED)}, this is torch {torch.__version__}: what fails may be due to that, and "
            "autopar verify shows whether a plan computes what the model does",
            UntestedTorchWarning,
            stacklevel=3,
        )
