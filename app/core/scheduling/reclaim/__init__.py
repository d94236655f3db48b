"""Decides which tasks give devices back: to others, to a limit, or to make room for a gang."""
