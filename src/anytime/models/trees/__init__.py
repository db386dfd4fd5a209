"""Ensembles of trees as models with exits: `exits.py` cuts one into stages, the other files run the trees of a library each."""
