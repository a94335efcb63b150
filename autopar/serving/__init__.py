"""Generating text with a causal model and a cache: programs that take a prompt and programs that take one token, on the same weights.

cached      a causal model that keeps its cache in buffers, and answers with the next tokens: an ordinary model, to plan and verify
planning    the plans of its calls, weights and cache lying alike in all of them
served      the plans on ranks: generate
"""

from __future__ import annotations

from autopar.serving.cached import cached
from autopar.serving.planning import Serving, load_serving, plan_serving
from autopar.serving.served import Served, serve

__all__ = ["Served", "Serving", "cached", "load_serving", "plan_serving", "serve"]
