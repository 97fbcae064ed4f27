"""The bytes of text that the tokens of a tokenizer stand for.

Spelling differs between tokenizers: a space is `Ġ` in a byte-level BPE and `▁` in SentencePiece, a newline `Ċ` or itself or
`<0x0A>`. Special tokens stand for no text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from specdec.prompts import BYTE_TOKEN


def tokens_by_id(tokenizer: Any, vocab_size: int) -> dict[int, str]:
    """The spelling of every id that has a row in a model of `vocab_size` rows."""
    return {i: token for token, i in tokenizer.get_vocab().items() if 0 <= i < vocab_size}


def added_ids(tokenizer: Any) -> set[int]:
    """Ids of special tokens and of those that were added to the vocabulary proper."""
    return set(getattr(tokenizer, "added_tokens_decoder", {})) | set(getattr(tokenizer, "all_special_ids", ()))


def ids_by_bytes(tokenizer: Any, vocab_size: int) -> dict[bytes | str, int]:
    """The id of everything that has a token: bytes of text, or the name (str) of a special token.

    vocab_size: ids from here on have no row in the model, and are left out; so are ids below it without a token.

    Of several ids for the same bytes the first counts, but an ordinary token before a byte token: SentencePiece uses `<0x61>`
    only where the vocabulary lacks `a`.
    """
    tokens = tokens_by_id(tokenizer, vocab_size)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {i for i, token in added.items() if token.special} | set(getattr(tokenizer, "all_special_ids", ()))
    spelling = spelling_of(tokenizer)
    ids: dict[bytes | str, int] = {}
    byte_tokens: list[tuple[bytes, int]] = []
    for i in sorted(tokens):
        token = tokens[i]
        if i in special:
            ids.setdefault(token, i)
        elif spelling.byte_tokens and (byte := BYTE_TOKEN.fullmatch(token)):
            byte_tokens.append((bytes.fromhex(byte[1]), i))
        elif text := spelling.text_of(token, i in added):
            ids.setdefault(text, i)
    for text, i in byte_tokens:
        ids.setdefault(text, i)
    return ids


def bytes_by_id(tokenizer: Any, ids: Iterable[int]) -> dict[int, bytes]:
    """The bytes of text that each of these ids stands for; of a special token its name. Ids without a token are left out."""
    wanted = set(ids)
    tokens = tokens_by_id(tokenizer, max(wanted, default=-1) + 1)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    spelling = spelling_of(tokenizer)
    texts = {}
    for i in sorted(wanted & tokens.keys()):
        byte = BYTE_TOKEN.fullmatch(tokens[i]) if spelling.byte_tokens else None
        texts[i] = bytes.fromhex(byte[1]) if byte else spelling.text_of(tokens[i], i in added)
    return texts


@dataclass(frozen=True)
class Spelling:
    """How a vocabulary writes text.

    byte_level: a character for every byte.
    replaced: pairs of (what is written, what it stands for).
    byte_tokens: `<0x0A>` is a byte.
    """

    byte_level: bool = False
    replaced: tuple[tuple[str, str], ...] = ()
    byte_tokens: bool = False

    def text_of(self, token: str, added: bool = False) -> bytes:
        """The bytes of an ordinary token. added: beside the vocabulary proper, which in a byte-level one means plain text."""
        if self.byte_level:
            if not added and all(character in BYTES for character in token):
                return bytes(BYTES[character] for character in token)
            return token.encode(errors="replace")
        for written, text in self.replaced:
            token = token.replace(written, text)
        return token.encode(errors="replace")


def spelling_of(tokenizer: Any) -> Spelling:
    """From the decoder and pre-tokenizer in the tokenizer's JSON; where these do not decide it, from how " a" is written, as in
    vLLM."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoders = _components(getattr(backend, "decoder", None))
    pre_tokenizers = _components(getattr(backend, "pre_tokenizer", None))
    if any(component["type"] == "ByteLevel" for component in [*decoders, *pre_tokenizers]):
        return Spelling(byte_level=True)
    replaced = [
        (component["pattern"]["String"], component["content"])
        for component in decoders
        if component["type"] == "Replace" and component["pattern"].get("String")
    ]
    # a Metaspace that only splits writes its mark all the same
    marks = [component["replacement"] for component in [*decoders, *pre_tokenizers] if component["type"] == "Metaspace"]
    replaced += [(mark, " ") for mark in marks]
    byte_tokens = any(component["type"] == "ByteFallback" for component in decoders)
    if replaced:
        return Spelling(False, tuple(dict.fromkeys(replaced)), byte_tokens)
    return _probed_spelling(tokenizer)


def _components(component: Any) -> list[dict[str, Any]]:
    """The JSON of a decoder or pre-tokenizer of the `tokenizers` library, as a list; of a sequence, of its components."""
    if component is None:
        return []
    state = json.loads(component.__getstate__())
    components: list[dict[str, Any]] = state.get("decoders") or state.get("pretokenizers") or [state]
    return components


def _probed_spelling(tokenizer: Any) -> Spelling:
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
