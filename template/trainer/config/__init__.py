"""Settings: what they are, how they are read, what a checkpoint remembers of them."""
