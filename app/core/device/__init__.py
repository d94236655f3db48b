"""Decides what a device worker does, without a device."""
