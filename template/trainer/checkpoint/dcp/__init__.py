"""Everything that knows torch's Distributed Checkpoint (DCP), its private names included."""
