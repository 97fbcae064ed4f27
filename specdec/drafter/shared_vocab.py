"""The tokens that two vocabularies share, so that an LM with another tokenizer can draft: token-level intersection (TLI, Timor
et al. 2502.05202, Algorithm 4; `use_heterogeneous_vocab` in vLLM).

Two tokens are the same if they stand for the same bytes of text, or are special tokens of the same name
(`specdec.drafter.token_bytes`). Each token of one vocabulary has at most one partner in the other, so that a distribution that
is mapped to the other vocabulary keeps its mass.

Shape letters are those of specdec/core.py; I counts shared tokens.
"""

from __future__ import annotations

import gzip
import itertools
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.drafter.token_bytes import added_ids, ids_by_bytes, tokens_by_id
from specdec.files import ASSETS
from specdec.model.target import CausalLM

FEW = 100  # shared tokens, below which hardly anything can be drafted
DEMO = ASSETS / "train.jsonl.gz"  # conversations, to estimate coverage on
DEMO_ROWS = 64


class SharedVocab:
    """A map between the tokens that a target and a draft model share.

    pair_I2: [I, 2] on the host, the ids of the same token in the target's vocabulary and the draft model's, ascending in the
        target's.
    target_size: of the target's vocabulary.
    substitute: the draft id for target ids without a partner; None: there are none.
    device: of the target.
    """

    def __init__(self, pair_I2: np.ndarray, target_size: int, substitute: int | None, device: torch.device):
        self.size = len(pair_I2)
        self.target_size = target_size
        self.draft_id_V = np.full(target_size, -1 if substitute is None else substitute, dtype=np.int64)
        self.draft_id_V[pair_I2[:, 0]] = pair_I2[:, 1]
        self.is_shared_V = np.zeros(target_size, dtype=bool)
        self.is_shared_V[pair_I2[:, 0]] = True
        assert substitute is not None or self.is_shared_V.all()
        # on the device
        self.target_I, self.draft_I = (torch.from_numpy(column.copy()).to(device) for column in pair_I2.T)
        self.draft_id_device_V = torch.from_numpy(self.draft_id_V).to(device)

    def to_draft_ids_host(self, target_ids: np.ndarray) -> np.ndarray:
        """Target ids as the draft model's, one for one."""
        return self.draft_id_V[target_ids]

    def to_draft_ids(self, token_N: Tensor) -> Tensor:
        """As `to_draft_ids_host`, on the device."""
        return self.draft_id_device_V[token_N]

    def shared_logits(self, logits_NV: Tensor) -> Tensor:
        """[N, I] of the draft model's logits those of shared tokens: their softmax has no mass on other tokens."""
        return logits_NV.index_select(1, self.draft_I)

    def to_target_vocab(self, index_N: Tensor, q_NI: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Tokens as indices of shared tokens, and distributions over these, as ids of the target and over its vocabulary."""
        if q_NI is not None:
            q_NI = q_NI.new_zeros(len(q_NI), self.target_size).index_copy_(1, self.target_I, q_NI)
        return self.target_I[index_N], q_NI

    def share_of(self, target_ids: Sequence[int] | np.ndarray) -> float | None:
        """The share of these tokens that can be drafted; None of no tokens."""
        ids = np.asarray(target_ids, dtype=np.int64)
        return float(self.is_shared_V[ids].mean()) if len(ids) else None

    def coverage(self, answers: Iterable[list[int]]) -> dict[str, Any]:
        """How much of the target's vocabulary, and of answers, can be drafted."""
        emitted = [token for answer in answers for token in answer]
        return {
            "num_shared": self.size,
            "share_of_vocabulary": self.size / self.target_size,
            "num_emitted": len(emitted),
            "share_of_emitted": self.share_of(emitted),
        }


def intersect(target: CausalLM, draft: CausalLM) -> SharedVocab:
    """The tokens that two models share; prints on stderr how much of the target's vocabulary they are.

    Raises ValueError, one line, if there are none, or if the draft model has no token to read the target's other tokens as.
    """
    target_ids = ids_by_bytes(target.tokenizer, target.vocab_size)
    draft_ids = ids_by_bytes(draft.tokenizer, draft.vocab_size)
    pairs = sorted((i, draft_ids[text]) for text, i in target_ids.items() if text in draft_ids)
    names = f"the target {target.name} and the draft model {draft.name}"
    if not pairs:
        raise ValueError(
            f"{names} share none of {len(target_ids)} and {len(draft_ids)} tokens; use a draft model of a related vocabulary"
        )
    num_other = target.vocab_size - len(pairs)
    substitute = _substitute(draft, f"{num_other} tokens of {target.name}") if num_other else None
    vocab = SharedVocab(np.array(pairs, dtype=np.int64), target.vocab_size, substitute, target.device)
    if vocab.size < FEW:
        print(f"warning: {names} share {vocab.size} tokens, fewer than {FEW}; little can be drafted", file=sys.stderr)
    estimate = vocab.share_of(demo_answers(target.tokenizer, target.vocab_size))
    of_text = "" if estimate is None else f"; of the tokens of the demo data's answers, an estimate, {estimate:.1%}"
    print(
        f"vocabulary: {draft.name} can draft {vocab.size} of the {target.vocab_size} tokens of {target.name} "
        f"({vocab.size / target.vocab_size:.1%}){of_text}",
        file=sys.stderr,
    )
    return vocab


def check_same_tokens(target: CausalLM, tokenizer: Any, name: str, advice: str) -> None:
    """Check that a draft model's tokenizer has the target's tokens: with another vocabulary of the same size, no draft would be
    accepted.

    tokenizer, name: of the draft model.
    advice: the fix, the end of the error line.
    Raises ValueError, one line, if an id is an ordinary token of both, and not the same one. Special and added tokens, and ids
    that one of them lacks, differ between fine-tunes of one model: a line on stderr counts them.
    """
    target_tokens = tokens_by_id(target.tokenizer, target.vocab_size)
    draft_tokens = tokens_by_id(tokenizer, target.vocab_size)
    added = added_ids(target.tokenizer) | added_ids(tokenizer)
    differing = sorted(i for i in set(target_tokens) | set(draft_tokens) if target_tokens.get(i) != draft_tokens.get(i))
    ordinary = [i for i in differing if i in target_tokens and i in draft_tokens and i not in added]
    if ordinary:
        first = ordinary[0]
        raise ValueError(
            f"the draft model {name} has another tokenizer than the target {target.name}: {len(ordinary)} ids are other "
            f"tokens, such as {first}, which is {draft_tokens[first]!r} and {target_tokens[first]!r}; {advice}"
        )
    if differing and target.processes.is_main:
        first = differing[0]
        print(
            f"note: {len(differing)} special or unused ids of the draft model {name} are not those of {target.name}, such as "
            f"{first}, which is {draft_tokens.get(first)!r} and {target_tokens.get(first)!r}; drafts of these are rejected",
            file=sys.stderr,
        )


def _substitute(draft: CausalLM, what: str) -> int:
    """The draft model's token for text that it has no token for. what: the tokens that it lacks, for messages."""
    for key in ("unk_token_id", "eos_token_id"):
        token = getattr(draft.tokenizer, key, None)
        if token is None or not 0 <= token < draft.vocab_size:  # 0 is an id as any other
            continue
        if key == "eos_token_id":
            line = f"{draft.name} has no unk token; {what}, which it lacks, are read as its eos token {token}"
            print(f"warning: {line}", file=sys.stderr)
        return int(token)
    raise ValueError(f"{draft.name} lacks {what}, and has no unk or eos token to read them as; set unk_token in its tokenizer")


def demo_answers(tokenizer: Any, vocab_size: int) -> np.ndarray:
    """Tokens of some answers of the demo data, which SmolLM2 generated."""
    with gzip.open(DEMO, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in itertools.islice(file, 1, 1 + DEMO_ROWS)]
    answers = [m["content"] for row in rows for m in row["messages"] if m["role"] == "assistant"]
    ids = np.array([i for text in answers for i in tokenizer(text, add_special_tokens=False)["input_ids"]], dtype=np.int64)
    return ids[ids < vocab_size]
