"""Turns rows into snapshots, from which an island decides, and its decisions into rows."""
