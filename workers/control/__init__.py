"""Runs the Celery workers that know the database: control and island schedulers."""
