"""Programs in a folder, written and run without the model's code."""
