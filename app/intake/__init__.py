"""Turns requests into rows, and notes what people ask for afterwards."""
