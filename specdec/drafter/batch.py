"""Training samples as the loss reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass
class Batch:
    """Samples laid end to end: N tokens. layers: the ids of the tapped layers. mask_N and length_B are on the host: which rows
    take part is decided there, without waiting for the device. weight_B: what a token of each sample weighs, if not 1. Where
    the target was not asked (`TokenSource`), hidden_NTD and what follows from it are None."""

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
