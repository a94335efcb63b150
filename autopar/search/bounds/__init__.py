"""Bounds on the step of every plan: surrogate sums, a Lagrangian bound for memory, one aggregated rank."""
