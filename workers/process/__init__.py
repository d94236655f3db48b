"""Starts, bounds and connects the processes of a device host."""
