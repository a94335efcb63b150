"""Weights that are several in one (queries, keys and values), held in blocks."""
