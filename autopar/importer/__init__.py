"""nn.Module -> Graph. See ``capture``."""

from __future__ import annotations

from autopar.importer.capturing import Capture, capture, capture_graph

__all__ = ["Capture", "capture", "capture_graph"]
