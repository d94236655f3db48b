"""Decides about webhooks: the bodies of messages, retries, and which URLs may be called."""
