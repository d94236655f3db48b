"""Tells why tasks wait, when they start, and everything else in numbers."""
