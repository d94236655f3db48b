"""Defines the values that everything speaks of, and the tables of their lives."""
