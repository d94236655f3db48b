"""Runs N ranks on M devices, so that the bits stay the same."""
