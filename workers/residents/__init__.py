"""Runs one task inside its process, from its start to its end."""
