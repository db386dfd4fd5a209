"""Training data by name, batches of tokens, streamed images, and the logits of a data set."""
