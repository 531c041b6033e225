"""`scaffold`: PyTorch training repos in which losing the GPU is routine."""
