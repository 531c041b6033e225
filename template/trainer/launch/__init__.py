"""The supervisor of one node."""
