"""This machine: its accelerators and cores, and its place among the nodes of the run."""
