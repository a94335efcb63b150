"""The exported model in the dialect, traced to one functional graph and lowered to a ``Graph``."""
