"""Implements the `roundhouse` command, from HTTP to the words that it prints."""
