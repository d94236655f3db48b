"""Defines what an island and its devices say to each other, and checks its form."""
