"""The tokens that two vocabularies share, so that an LM with another tokenizer can draft: token-level intersection (TLI, Timor
et al. 2502.05202, Algorithm 4; `use_heterogeneous_vocab` in vLLM).

Two tokens are the same if they stand for the same bytes of text. Spelling differs between tokenizers: a space is `Ġ` in a
byte-level BPE and `▁` in SentencePiece, a newline `Ċ` or itself or `<0x0A>`. Special tokens stand for no text; they are the
same if they have the same name. Each token of one vocabulary has at most one partner in the other, so that a law that is
carried over keeps its mass.

Shape letters are those of specdec/core.py; I counts shared tokens.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.model.target import CausalLM

FEW = 100  # shared tokens, below which hardly anything can be drafted
SAMPLE = Path(__file__).parents[1] / "assets" / "train.jsonl.gz"  # conversations of the demo data, to estimate coverage on
SAMPLE_ROWS = 64
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class SharedVocab:
    """pair_I2: [I, 2] on the host, the ids of the same token in the target's vocabulary and the draft model's, ascending in the
    target's; substitute: the draft id that stands for target ids without a partner, if there are any."""

    def __init__(self, pair_I2: np.ndarray, target_size: int, substitute: int | None, device: torch.device):
        self.size, self.target_size = len(pair_I2), target_size
        self.draft_of_V = np.full(target_size, -1 if substitute is None else substitute, dtype=np.int64)
        self.draft_of_V[pair_I2[:, 0]] = pair_I2[:, 1]
        self.shared_V = np.zeros(target_size, dtype=bool)
        self.shared_V[pair_I2[:, 0]] = True
        assert substitute is not None or self.shared_V.all()
        # the same on the device, made once
        self.target_I, self.draft_I = (torch.from_numpy(column.copy()).to(device) for column in pair_I2.T)
        self.draft_of_V_there = torch.from_numpy(self.draft_of_V).to(device)

    def to_draft_ids_host(self, target_ids: np.ndarray) -> np.ndarray:
        """Target ids as the draft model reads them, one for one."""
        return self.draft_of_V[target_ids]

    def to_draft_ids(self, token_N: Tensor) -> Tensor:
        """Likewise, on the device."""
        return self.draft_of_V_there[token_N]

    def kept(self, logits_NV: Tensor) -> Tensor:
        """[N, I] of the draft model's logits those of shared tokens: a law made of them has no mass elsewhere."""
        return logits_NV.index_select(1, self.draft_I)

    def to_target_vocab(self, drawn_N: Tensor, q_NI: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Tokens and laws over the shared tokens as such over the target's vocabulary."""
        if q_NI is not None:
            q_NI = q_NI.new_zeros(len(q_NI), self.target_size).index_copy_(1, self.target_I, q_NI)
        return self.target_I[drawn_N], q_NI

    def share_of(self, target_ids: Any) -> float | None:
        """The share of these tokens that can be drafted; None of no tokens."""
        ids = np.asarray(target_ids, dtype=np.int64)
        return float(self.shared_V[ids].mean()) if len(ids) else None

    def coverage(self, answers: Iterable[list[int]]) -> dict[str, Any]:
        """How much of the target's vocabulary, and of answers, can be drafted."""
        emitted = [token for answer in answers for token in answer]
        return {
            "num_shared": self.size,
            "share_of_vocabulary": self.size / self.target_size,
            "num_emitted": len(emitted),
            "share_of_emitted": self.share_of(emitted),
        }


def shared(target: CausalLM, draft: CausalLM) -> SharedVocab:
    """The tokens that two models share; says on stderr how much of the target's vocabulary they are.

    Raises ValueError, one line, if there are none, or if nothing can stand for the target's other tokens.
    """
    theirs, own = token_bytes(target.tokenizer, target.vocab_size), token_bytes(draft.tokenizer, draft.vocab_size)
    pairs = sorted((i, own[meaning]) for meaning, i in theirs.items() if meaning in own)
    names = f"the target {target.name} and the draft model {draft.name}"
    if not pairs:
        raise ValueError(
            f"{names} share none of {len(theirs)} and {len(own)} tokens; use a draft model of a related vocabulary"
        )
    substitute, num_other = None, target.vocab_size - len(pairs)
    if num_other:
        substitute = _substitute(draft, f"{num_other} tokens of {target.name}")
    found = SharedVocab(np.array(pairs, dtype=np.int64), target.vocab_size, substitute, target.device)
    if found.size < FEW:
        print(f"warning: {names} share {found.size} tokens, fewer than {FEW}; little can be drafted", file=sys.stderr)
    estimate = found.share_of(sample(target.tokenizer, target.vocab_size))
    of_text = "" if estimate is None else f"; of the tokens of the demo data's answers, an estimate, {estimate:.1%}"
    print(
        f"vocabulary: {draft.name} can draft {found.size} of the {target.vocab_size} tokens of {target.name} "
        f"({found.size / target.vocab_size:.1%}){of_text}",
        file=sys.stderr,
    )
    return found


def check_same_tokens(target: CausalLM, tokenizer: Any, name: str, advice: str) -> None:
    """Hold a draft model's tokenizer against the target's: vocabularies of one size may be of other tokens, and then no draft
    is ever accepted.

    Raises ValueError, one line that ends with `advice`, if an id is an ordinary token of both, and not the same one. Special
    and added tokens, and ids that one of them lacks, differ between fine-tunes of one model: a line on stderr counts them.
    """
    both = [(tokens_by_id(each, target.vocab_size), added_ids(each)) for each in (target.tokenizer, tokenizer)]
    (theirs, their_added), (own, own_added) = both
    differing = sorted(i for i in set(theirs) | set(own) if theirs.get(i) != own.get(i))
    ordinary = [i for i in differing if i in theirs and i in own and i not in their_added | own_added]
    if ordinary:
        first = ordinary[0]
        raise ValueError(
            f"the draft model {name} has another tokenizer than the target {target.name}: {len(ordinary)} ids are other "
            f"tokens, such as {first}, which is {own[first]!r} and {theirs[first]!r}; {advice}"
        )
    if differing and target.processes.is_main:
        first = differing[0]
        print(
            f"note: {len(differing)} special or unused ids of the draft model {name} are not those of {target.name}, such as "
            f"{first}, which is {own.get(first)!r} and {theirs.get(first)!r}; drafts of these are rejected",
            file=sys.stderr,
        )


def tokens_by_id(tokenizer: Any, vocab_size: int) -> dict[int, str]:
    """The spelling of every id that has a row in a model of that many."""
    return {i: token for token, i in tokenizer.get_vocab().items() if 0 <= i < vocab_size}


def added_ids(tokenizer: Any) -> set[int]:
    """Ids of special tokens and of those that were added to the vocabulary proper."""
    return set(getattr(tokenizer, "added_tokens_decoder", {})) | set(getattr(tokenizer, "all_special_ids", ()))


def _substitute(draft: CausalLM, what: str) -> int:
    """The draft model's token for text that it has no token for."""
    for key in ("unk_token_id", "eos_token_id"):
        found = getattr(draft.tokenizer, key, None)
        if found is None or not 0 <= found < draft.vocab_size:  # 0 is an id as any other
            continue
        if key == "eos_token_id":
            line = f"{draft.name} has no unk token; {what}, which it lacks, are read as its eos token {found}"
            print(f"warning: {line}", file=sys.stderr)
        return int(found)
    raise ValueError(f"{draft.name} lacks {what}, and has no unk or eos token to read them as; set unk_token in its tokenizer")


def sample(tokenizer: Any, vocab_size: int) -> np.ndarray:
    """Tokens of some answers of the demo data (which SmolLM2 gave)."""
    with gzip.open(SAMPLE, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in itertools.islice(file, 1, 1 + SAMPLE_ROWS)]
    answers = [m["content"] for row in rows for m in row["messages"] if m["role"] == "assistant"]
    ids = np.array([i for text in answers for i in tokenizer(text, add_special_tokens=False)["input_ids"]], dtype=np.int64)
    return ids[ids < vocab_size]


# What a token means


def token_bytes(tokenizer: Any, vocab_size: int) -> dict[bytes | str, int]:
    """Id of everything that has a token: bytes of text, or the name (str) of a special token. Ids of `vocab_size` and more have
    no row in the model; those below it without a token are in no meaning.

    Of several ids with one meaning the first counts, but an ordinary token before a byte token: SentencePiece takes `<0x61>`
    only where the vocabulary lacks `a`.
    """
    token_of = tokens_by_id(tokenizer, vocab_size)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {i for i, token in added.items() if token.special} | set(getattr(tokenizer, "all_special_ids", ()))
    spelling = spelling_of(tokenizer)
    found: dict[bytes | str, int] = {}
    single: list[tuple[bytes, int]] = []
    for i in sorted(token_of):
        token = token_of[i]
        if i in special:
            found.setdefault(token, i)
        elif spelling.byte_tokens and (byte := _BYTE.fullmatch(token)):
            single.append((bytes.fromhex(byte[1]), i))
        elif text := spelling.text_of(token, i in added):
            found.setdefault(text, i)
    for text, i in single:
        found.setdefault(text, i)
    return found


@dataclass(frozen=True)
class Spelling:
    """How a vocabulary writes text. byte_level: a character for every byte; replaced: (what is written, what it means);
    byte_tokens: `<0x0A>` is a byte."""

    byte_level: bool = False
    replaced: tuple[tuple[str, str], ...] = ()
    byte_tokens: bool = False

    def text_of(self, token: str, added: bool = False) -> bytes:
        """The bytes of an ordinary token. added: beside the vocabulary proper, which in a byte-level one is plain text."""
        if self.byte_level:
            if not added and all(character in BYTES for character in token):
                return bytes(BYTES[character] for character in token)
            return token.encode(errors="replace")
        for written, meant in self.replaced:
            token = token.replace(written, meant)
        return token.encode(errors="replace")


def spelling_of(tokenizer: Any) -> Spelling:
    """From what the tokenizer's own JSON says of its decoder and pre-tokenizer; where there is none, or it says nothing, from
    how " a" is written, as vLLM has it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoding, splitting = _parts(getattr(backend, "decoder", None)), _parts(getattr(backend, "pre_tokenizer", None))
    if any(part["type"] == "ByteLevel" for part in [*decoding, *splitting]):
        return Spelling(byte_level=True)
    replaced = [
        (part["pattern"]["String"], part["content"])
        for part in decoding
        if part["type"] == "Replace" and part["pattern"].get("String")
    ]
    # a Metaspace that only splits writes its mark all the same
    replaced += [(part["replacement"], " ") for part in [*decoding, *splitting] if part["type"] == "Metaspace"]
    byte_tokens = any(part["type"] == "ByteFallback" for part in decoding)
    if replaced:
        return Spelling(False, tuple(dict.fromkeys(replaced)), byte_tokens)
    return _probed(tokenizer)


def _parts(component: Any) -> list[dict[str, Any]]:
    """A decoder or pre-tokenizer of the `tokenizers` library as its JSON, a sequence as its parts."""
    if component is None:
        return []
    told = json.loads(component.__getstate__())
    inner: list[dict[str, Any]] = told.get("decoders") or told.get("pretokenizers") or [told]
    return inner


def _probed(tokenizer: Any) -> Spelling:
    vocab = tokenizer.get_vocab()
    ids = tokenizer.encode(" a", add_special_tokens=False)
    first = str(tokenizer.convert_ids_to_tokens(ids)[0]) if len(ids) else ""
    mark = first[:-1] if first.endswith("a") and len(first) > 1 and first[0] not in " \t" else ""
    if not mark:
        mark = next((m for m in ("Ġ", "▁") if any(token.startswith(m) for token in vocab)), "")
    byte_tokens = all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    return Spelling(mark == "Ġ", ((mark, " "),) if mark else (), byte_tokens)


def _byte_characters() -> dict[str, int]:
    """The character that a byte-level vocabulary writes for a byte: itself where Latin-1 has one that shows, else the next of
    those from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)) - set(shown))
    return {chr(byte): byte for byte in shown} | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}


BYTES = _byte_characters()
