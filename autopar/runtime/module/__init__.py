"""The ``nn.Module`` that trains, and how it is compiled from a plan."""
