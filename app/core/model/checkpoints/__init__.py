"""Defines checkpoints: their contents, their files, and the steps of moving a running task."""
