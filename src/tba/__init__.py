"""Trajectory Balance with Asynchrony: asynchronous, off-policy RL post-training of language models."""

import os

# Whether there is a GPU is asked before parts are forked, and must not start CUDA: a fork could not use it then.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
