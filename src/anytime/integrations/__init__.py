"""Thin adapters to other libraries, one file each. Import the one that is needed: each wants an extra of its own."""
