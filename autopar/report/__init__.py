"""What a person reads of a plan: terminal tables, a self-contained HTML page, a chrome trace of the simulated timeline."""
