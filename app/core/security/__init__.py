"""Decides what keys, people, hosts and addresses may do."""
