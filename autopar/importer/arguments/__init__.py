"""Arguments and results as nests of tensors, by public names."""
