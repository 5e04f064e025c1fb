"""One setting for both halves: which weights a run begins with, and what each half makes of them.

A searcher starts an engine and a reference from it, the trainer a policy. Above the leaves (engines, policy), below
recipes: the two halves meet nowhere else.
"""
