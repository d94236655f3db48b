"""Authenticates people and devices, records what administrators did, and limits the rate of
calls.
"""
