"""Last-layer Laplace at every exit, and the mixture of exits built on it."""
