"""Turns rows into what an island decides from, and its decisions into rows."""
