"""Runs the ranks of a command as one gang that shares the slots of its host."""
