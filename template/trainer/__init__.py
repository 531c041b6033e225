"""A PyTorch training run for which interruption is routine."""
