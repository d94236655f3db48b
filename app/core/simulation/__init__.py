"""Replays lists of jobs under a virtual clock, with the same scheduling rounds as an island."""
