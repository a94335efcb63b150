"""Where a node comes from, and what to say at the user's line."""
