"""Moves bytes between the store, this host's disk and other hosts."""
