"""Speed on a GPU: CUDA graphs, parallel branches, weights in two precisions."""
