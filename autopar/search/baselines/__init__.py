"""Baselines: plans that people write by hand, as recipes, propagated through the graph, checkpointed and scheduled."""
