"""Bounds on the step of every plan: surrogate sums, Lagrangian prices of memory, an aggregated rank."""
