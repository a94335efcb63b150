"""Plans that a person writes: recipes, their propagation through the graph, checkpointing, their schedules."""
