"""Decides for tasks that need several devices at once how long they wait, and where they run."""
