"""The model as torch.export sees it."""
