"""Finds out who calls, what they may see, and how many calls they may make."""
