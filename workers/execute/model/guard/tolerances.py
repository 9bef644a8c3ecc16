"""The greatest differences between logits that self-tests allow, relative to the greatest logit.

Families that work stay below half of them. What a decoder computes wrongly differs by about 1.
"""

from __future__ import annotations

import torch

TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 1e-1}  # by the type that is computed in
ROUNDED = 0.5  # of weights, activations, or keys and values in eight bits or fewer
