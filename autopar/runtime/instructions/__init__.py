"""How an instruction runs on a rank: statements of straight-line code, and the operators that they call."""
