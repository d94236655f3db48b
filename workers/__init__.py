"""Acts on what `app` decides: the Celery workers of control, islands and devices, and their
processes.
"""
