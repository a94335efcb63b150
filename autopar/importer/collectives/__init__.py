"""Collectives and regions of the model's own."""
