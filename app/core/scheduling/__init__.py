"""Decides a round of an island: a snapshot or a board in, a plan out."""
