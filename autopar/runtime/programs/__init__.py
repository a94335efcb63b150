"""The programs of a module: one for each mode, shapes and settings that it is called with."""
