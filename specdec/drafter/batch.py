"""Training samples, what the target computes of them, and both as the loss reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """A rendered conversation with a name.

    id: the name.
    token_n: int64 [n].
    mask_n: bool [n], True where a token is supervised.
    part_of: name of the conversation, where that makes several samples.
    rejected_n: bool [n], True where a draft token was rejected when a drafter and the target made the sample, if they did.
    """

    id: str
    token_n: np.ndarray
    mask_n: np.ndarray
    part_of: str | None = None
    rejected_n: np.ndarray | None = None


@dataclass
class Features:
    """What the target computes of a sample of n tokens.

    hidden_nTD: states of the T tapped layers, in ascending order of their ids.
    argmax_n, logsumexp_n: int64 and float32, of the target's logits after each token, where the next token is supervised
        (elsewhere -1 and 0); None where they have not been computed.
    """

    hidden_nTD: Tensor
    argmax_n: Tensor | None = None
    logsumexp_n: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in (self.hidden_nTD, self.argmax_n, self.logsumexp_n) if x is not None)


@dataclass
class Batch:
    """Samples laid end to end: N tokens, B samples. Without a target (`TokenSource`), three of the fields are None.

    ids: names of the samples.
    length_B, mask_N: lengths and loss mask, on the host: which rows take part is decided there, without waiting for the device.
    rejected_N: on the host, where draft tokens were rejected; nowhere in a sample of which it is not known.
    layers: ids of the T tapped layers.
    token_N, hidden_NTD: tokens, and the target's states of the tapped layers.
    argmax_N, logsumexp_N: the target's likeliest next token and the logsumexp of its logits, where the next token is generated.
    weight_B: weight of each sample's tokens in the loss; None weighs all 1.
    """

    ids: list[str]
    length_B: np.ndarray
    mask_N: np.ndarray
    rejected_N: np.ndarray
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


def collate(
    samples: Sequence[Sample], features: Sequence[Features] | None, layers: tuple[int, ...], device: torch.device
) -> Batch:
    """One batch of samples and their features; None: there is no target."""

    def join(tensors: Sequence[Tensor | None]) -> Tensor:
        return torch.cat([tensor for tensor in tensors if tensor is not None]).to(device, non_blocking=True)

    return Batch(
        ids=[sample.id for sample in samples],
        length_B=np.array([len(sample.token_n) for sample in samples]),
        mask_N=np.concatenate([sample.mask_n for sample in samples]),
        rejected_N=np.concatenate(
            [np.zeros_like(sample.mask_n) if sample.rejected_n is None else sample.rejected_n for sample in samples]
        ),
        layers=layers,
        token_N=join([torch.from_numpy(sample.token_n) for sample in samples]),
        hidden_NTD=None if features is None else join([each.hidden_nTD for each in features]),
        argmax_N=None if features is None else join([each.argmax_n for each in features]),
        logsumexp_N=None if features is None else join([each.logsumexp_n for each in features]),
    )
