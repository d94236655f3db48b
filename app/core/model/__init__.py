"""Defines the values that all rooms share, and the tables of their states."""
