"""Turns requests into rows, and records the actions that people request afterwards."""
