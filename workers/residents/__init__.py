"""Runs one task inside its process, from its spec to its end."""
