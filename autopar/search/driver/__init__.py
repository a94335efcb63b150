"""The course of a search: request, table of phases, state that they work on, result."""
