"""Runs the proxy of a device worker, through which residents reach the network as far as they
may.
"""
