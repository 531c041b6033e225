"""A PyTorch training run that may be interrupted at any time."""
