"""Choices -> integer problem -> assignment: nodes and edges, memory items, prices, rematerialization, decoding."""
