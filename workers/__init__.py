"""Roundhouse's hands: the Celery workers of control, island and devices, and what they spawn."""
