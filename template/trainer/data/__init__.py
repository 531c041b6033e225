"""Samples by number: their order, how a global batch is dealt to ranks, and the loader."""
