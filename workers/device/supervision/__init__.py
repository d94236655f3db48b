"""Holds the parts of a device's supervisor. Each has its own state; all run in one thread."""
