"""Trajectory Balance with Asynchrony: asynchronous, off-policy RL post-training of language models."""
