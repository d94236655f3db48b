"""Computes who goes next and who should hold how much."""
