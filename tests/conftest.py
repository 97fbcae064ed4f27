"""Every test runs torch on one thread: two on a busy machine are slower, and figures need a setting."""

import torch

torch.set_num_threads(1)
