"""Says what keys, people, hosts and addresses are allowed."""
