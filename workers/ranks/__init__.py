"""Runs N ranks on M devices, with the same bits as on N devices."""
