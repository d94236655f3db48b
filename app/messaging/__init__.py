"""Sends what was committed: nudges, signed orders, news for streams, webhooks."""
