"""`scaffold`: PyTorch training repos in which losing the GPU is routine."""


class Refused(Exception):
    """What was asked for is not possible. One line: what, why, and what to do; the command exits 1 with it."""
