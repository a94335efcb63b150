"""How a schedule runs on a rank: its instructions bound to a backend, as Python, as graphs, or recorded once and replayed."""
