"""What a person reads of a plan: terminal tables, a self-contained HTML page, a chrome trace of the simulated timeline."""

from __future__ import annotations

from autopar.report.frontier import frontier, frontier_html
from autopar.report.page import html
from autopar.report.terminal import summary
from autopar.report.trace import chrome_trace

__all__ = ["chrome_trace", "frontier", "frontier_html", "html", "summary"]
