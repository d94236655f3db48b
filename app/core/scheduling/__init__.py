"""Decides a round of an island: takes a snapshot or a board, and returns a plan."""
