"""Fix and re-solve: some choices are fixed, the problem is solved for the rest."""
