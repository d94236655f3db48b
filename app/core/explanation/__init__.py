"""Puts reasons into words, and estimates when a waiting task starts."""
