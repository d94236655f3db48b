"""Captures the whole object graph of a job as bytes, and makes it again."""
