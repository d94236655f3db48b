"""Finds out who calls, what the caller may see, and how many calls the caller may make."""
