"""Changes of a ``Graph``."""
