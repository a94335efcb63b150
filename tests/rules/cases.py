"""One case or more for every row of the table."""

from __future__ import annotations

from tests.rules import compute_cases, layout_cases, rare_cases
from tests.rules.drawing import Case

CASES: tuple[Case, ...] = compute_cases.CASES + layout_cases.CASES + rare_cases.CASES
