"""Starts the whole system on one machine, and prepares what it starts with."""
