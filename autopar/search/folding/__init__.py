"""Symmetry: equal layers searched once, and the bound for layers that may differ."""
