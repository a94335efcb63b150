"""Equal layers: found, traced once, put back."""
