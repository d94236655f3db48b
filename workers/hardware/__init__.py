"""Configures torch and its devices, and sees which memory was written to."""
