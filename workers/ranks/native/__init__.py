"""Runs the ranks of a gang over torch's own groups, which can be held, dropped and built anew."""
