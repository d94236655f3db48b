"""Decides what a device worker does; nothing here touches a device."""
