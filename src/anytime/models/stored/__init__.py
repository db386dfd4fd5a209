"""Networks as a description and their weights: what `anytime.save` stores of a model, and how it is made again."""
