"""Symmetry: equal layers are searched once, and a bound covers plans whose layers differ."""
