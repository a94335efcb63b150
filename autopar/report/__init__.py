"""What a person reads of a plan: terminal tables, a self-contained HTML page, a chrome trace of the simulated timeline."""

from __future__ import annotations

from autopar.report.page import page
from autopar.report.terminal import summary
from autopar.report.trace import trace

__all__ = ["page", "summary", "trace"]
