"""How ranks hold and exchange tensors: their parts, groups, and the collectives between them."""
