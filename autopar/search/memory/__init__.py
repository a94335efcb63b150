"""Short memory: solutions repaired, recombined with rematerialization, or solved under reduced limits; and the least memory."""
