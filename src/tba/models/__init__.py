"""A recipe's model, one setting for both sides: the weights that a run begins with, and how each side uses them.

A searcher starts an engine and a reference from it, the trainer a policy. This package is above the leaves (engines,
policy) and below recipes: the two sides meet nowhere else.
"""
