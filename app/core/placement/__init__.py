"""Plans which island and which device runs which part of a graph."""
