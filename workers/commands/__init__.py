"""Runs unmodified programs, freezes them, and keeps their working folder."""
