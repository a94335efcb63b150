"""Optimizers whose states lie on the host or in float32, and steps that need whole matrices."""
