"""Exits on any network: heads, tracing into stages, and modules run in a thread that pauses at each exit."""
