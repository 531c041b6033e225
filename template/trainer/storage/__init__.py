"""What the directory of a run is on, whether it survives the machine, and how much room it has."""
