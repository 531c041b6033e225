"""A language model on text or token files."""
