"""From a signal or a notice to a request that all ranks act on."""
