"""Bounds a round: the heartbeats that it takes, what it writes at once, what the next remembers."""
