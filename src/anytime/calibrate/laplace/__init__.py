"""Last-layer Laplace at every exit."""
