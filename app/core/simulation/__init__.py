"""Replays lists of jobs with the real round of an island under a virtual clock."""
