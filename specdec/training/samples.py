"""Training samples: which are held out, in which order steps see them, what their tokens say of a drafter's vocabulary."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np

from specdec.chat.template import token_ids_of_template
from specdec.drafter.batch import Sample


def split_validation(samples: Iterable[Sample], count: int) -> tuple[list[Sample], list[Sample]]:
    """(training, validation) samples: about `count` for validation, never a part of a conversation. The choice depends on names
    only, so it stays when a set is put in another order."""
    samples = list(samples)
    conversation_of = lambda sample: sample.part_of or sample.id
    by_hash = sorted(samples, key=lambda sample: zlib.crc32(conversation_of(sample).encode()))
    chosen = {conversation_of(sample) for sample in by_hash[:count]}
    training = [sample for sample in samples if conversation_of(sample) not in chosen]
    return training, [sample for sample in samples if conversation_of(sample) in chosen]


def fingerprint(samples: Iterable[Sample]) -> str:
    """A hash of tokens and masks, for telling whether two runs had the same data."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(sample.token_n.tobytes())
        digest.update(sample.mask_n.tobytes())
        if sample.rejected_n is not None:
            digest.update(sample.rejected_n.tobytes())
    return digest.hexdigest()[:16]


def batch_indices(step: int, num_samples: int, batch_size: int, seed: int) -> list[int]:
    """The samples of optimiser step `step` (from 0): a function of these numbers alone, so there is no state to save.

    Every epoch runs over all samples in a permutation of its own.
    """
    positions = range(step * batch_size, (step + 1) * batch_size)
    return [int(_permutation(seed, i // num_samples, num_samples)[i % num_samples]) for i in positions]


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, num_samples: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(num_samples)


def draft_vocabulary(samples: Iterable[Sample], size: int, vocab_size: int) -> np.ndarray:
    """[size] int64, ascending: the tokens that a drafter with a reduced vocabulary can draft.

    The most frequent supervised ones (of equals, the lower id); the lowest ids that never occur fill up.
    """
    if not 1 <= size <= vocab_size:
        raise ValueError(f"draft_vocab_size={size} is outside 1..{vocab_size}, the target's vocabulary")
    count_V = np.zeros(vocab_size, dtype=np.int64)
    for sample in samples:
        count_V += np.bincount(sample.token_n[sample.mask_n], minlength=vocab_size)
    by_count = np.lexsort((np.arange(vocab_size), -count_V))  # tokens that do not occur have equal counts, so they come by id
    return np.sort(by_count[:size])


def mask_token(samples: Iterable[Sample], tokenizer: Any, vocab_size: int, token: int | None = None) -> int:
    """A mask token: one that never occurs in the samples, in prompts or answers.

    tokenizer: None if there is none.
    vocab_size: rows of the embedding.
    token: the token to check; None: the lowest id beyond the tokenizer's, else a special token that has no role and is not in
        the chat template (of several, the last that is reserved), else the highest id that does not occur.
    Raises ValueError, one line, if `token` occurs or is out of range, or no id is free.
    """
    occurs_V = np.zeros(vocab_size, dtype=bool)
    first_id = ""
    for sample in samples:
        occurs_V[sample.token_n] = True
        if token is not None and not first_id and (sample.token_n == token).any():
            first_id = sample.id
    if token is not None:
        if not 0 <= token < vocab_size:
            raise ValueError(f"mask token {token} is outside 0..{vocab_size - 1}, the rows of the embedding; null chooses one")
        if first_id:
            raise ValueError(f"mask token {token} occurs in sample {first_id}; give an id that the data never has, or null")
        return token
    known: set[int] = set() if tokenizer is None else {*tokenizer.get_vocab().values(), *tokenizer.added_tokens_decoder}
    beyond = [i for i in range(max(known, default=vocab_size) + 1, vocab_size) if not occurs_V[i]]
    if beyond:
        return beyond[0]
    used: set[int] = set()
    if known:
        roles = (getattr(tokenizer, f"{role}_token_id", None) for role in ("bos", "eos", "pad", "unk"))
        used = {*token_ids_of_template(tokenizer), *(i for i in roles if i is not None)}
        names = {i: str(added) for i, added in tokenizer.added_tokens_decoder.items() if added.special}
        free = [i for i in sorted(names) if i < vocab_size and i not in used and not occurs_V[i]]
        reserved = [i for i in free if "reserved" in names[i] or "unused" in names[i]]
        if free:
            return max(reserved or free)
    rest = [i for i in np.flatnonzero(~occurs_V).tolist() if i not in used]
    if not rest:
        raise ValueError(f"every one of the {vocab_size} tokens occurs in the data; none is left to be the mask token")
    return int(rest[-1])
