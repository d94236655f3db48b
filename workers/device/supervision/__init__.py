"""Runs the parts of a device's supervisor, each with a state of its own, in one thread."""
