"""Fix and re-solve: one choice fixed, the rest as cheap as the problem allows."""
