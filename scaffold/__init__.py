"""`scaffold`: PyTorch training repos for GPUs that can be taken away."""


class Refused(Exception):
    """What was asked for is not possible. One line: what, why, and what to do; the command exits 1 with it."""
