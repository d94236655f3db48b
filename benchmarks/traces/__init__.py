"""Holds lists of jobs of clusters that several teams shared, real and generated."""
