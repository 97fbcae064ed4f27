"""Training samples as the loss reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass
class Batch:
    """Samples laid end to end: N tokens, B samples. Without a target (`TokenSource`), three of the fields are None.

    ids: names of the samples.
    length_B, mask_N: lengths and loss mask, on the host: which rows take part is decided there, without waiting for the device.
    layers: ids of the T tapped layers.
    token_N, hidden_NTD: tokens, and the target's states of the tapped layers.
    argmax_N, logsumexp_N: the target's likeliest next token and the logsumexp of its logits, where the next token is generated.
    weight_B: weight of each sample's tokens in the loss; None weighs all 1.
    """

    ids: list[str]
    length_B: np.ndarray
    mask_N: np.ndarray
    layers: tuple[int, ...]
    token_N: Tensor
    hidden_NTD: Tensor | None
    argmax_N: Tensor | None
    logsumexp_N: Tensor | None
    weight_B: np.ndarray | None = None

    def hidden(self, layers: Sequence[int]) -> Tensor:
        """[N, len(layers), D]"""
        assert self.hidden_NTD is not None, "this batch has tokens only"
        places = [self.layers.index(layer) for layer in layers]
        if places == list(range(places[0], places[0] + len(places))):
            return self.hidden_NTD[:, places[0] : places[0] + len(places)]
        return self.hidden_NTD[:, places]
