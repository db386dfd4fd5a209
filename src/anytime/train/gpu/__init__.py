"""Speed on a GPU: CUDA graphs, parallel branches, fused kernels, flat weights."""
