"""The road of a search: what is asked, the phases, the state they work on, and the result."""
