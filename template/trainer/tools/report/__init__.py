"""What interruptions and saves have cost a run."""
