"""The model run on stand-ins of its tensors: what its Python asks and calls meanwhile."""
