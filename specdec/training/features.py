"""What the frozen target thinks of training samples: its hidden states, computed when they are needed or read from artifacts.

An artifact is a directory of safetensors files with `hidden_states [tokens, layers, width]` and `token_ids [tokens]`, the
layout that vLLM's extraction writes per request. Our own files hold many samples end to end, say in their header where each
begins and what its bytes hash to, and stand beside a `manifest.json`; files that vLLM wrote are read as they are. Layer ids are
vLLM's: id i is what enters layer i, id num_layers what leaves the last one, before the final norm. Samples are found by their
tokens.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdec import __version__
from specdec.checked import first_line
from specdec.drafter.batch import Batch
from specdec.files import apply_umask, parse_json, read_json_object, writing
from specdec.model.target import CausalLM
from specdec.training.samples import Sample

CHUNK = 512  # tokens of one forward, and of one product with the output layer
FORMAT = "specdec-hidden-states"
PREFIX = "hidden-"


@dataclass
class Features:
    """Of one sample, n tokens.

    hidden_nTD: of the tapped layers, in ascending order of their ids; argmax_n int64 and logsumexp_n float32: of the target's
    logits after each token, where the next token is supervised (elsewhere -1 and 0), or None where nobody has asked yet.
    """

    hidden_nTD: Tensor
    argmax_n: Tensor | None = None
    logsumexp_n: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in (self.hidden_nTD, self.argmax_n, self.logsumexp_n) if x is not None)


def collate(
    samples: Sequence[Sample], features: Sequence[Features] | None, layers: tuple[int, ...], device: torch.device
) -> Batch:
    """One batch of samples and what the target thinks of them, if it was asked."""

    def join(parts: list[Any]) -> Tensor:
        return torch.cat(parts).to(device, non_blocking=True)

    return Batch(
        ids=[sample.id for sample in samples],
        length_B=np.array([len(sample.token_n) for sample in samples]),
        mask_N=np.concatenate([sample.mask_n for sample in samples]),
        layers=layers,
        token_N=join([torch.from_numpy(sample.token_n) for sample in samples]),
        hidden_NTD=None if features is None else join([own.hidden_nTD for own in features]),
        argmax_N=None if features is None else join([own.argmax_n for own in features]),
        logsumexp_N=None if features is None else join([own.logsumexp_n for own in features]),
    )


class TokenSource:
    """No features: for a drafter that learns from what the target said alone, and never runs it."""

    def __init__(self, device: torch.device):
        self.device = device

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        return collate(samples, None, (), self.device)


class OnlineFeatures:
    """Features by a forward of the target. keep_bytes: so much is kept in memory for the next epoch."""

    def __init__(self, target: CausalLM, layers: Iterable[int], keep_bytes: int = 0):
        self.target, self.layers = target, _checked(target, layers)
        self.keep_bytes, self.kept_bytes = keep_bytes, 0
        self.kept: dict[str, Features] = {}
        self.cache = target.new_cache()
        self.checked = False

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        return collate(samples, [self.of(sample) for sample in samples], self.layers, self.target.device)

    def of(self, sample: Sample) -> Features:
        """Features of one sample. One at a time: its numbers then do not depend on its company."""
        if sample.id in self.kept:
            return self.kept[sample.id]
        length = len(sample.token_n)
        if length > self.target.max_model_len:
            raise ValueError(
                f"sample {sample.id} has {length} tokens, and {self.target.name} can see {self.target.max_model_len}; "
                f"lower data.max_length{self.target.max_model_len_reason}"
            )
        self.cache.reserve(1, length)
        out = self.target.prefill(self.cache, 0, sample.token_n, 0, CHUNK, self.layers)
        assert out.hidden_NTD is not None
        # tensors made in inference mode cannot take part in training; copies can
        hidden_nTD = out.hidden_NTD.clone()
        if not self.checked:
            self._check(out.logits[-1], hidden_nTD[-1, -1])
        argmax_n, logsumexp_n = target_labels(self.target, hidden_nTD[:, -1], sample.mask_n)
        if not logsumexp_n.isfinite().all():
            raise ValueError(f"sample {sample.id}: {self.target.not_finite_message}")
        features = Features(hidden_nTD, argmax_n, logsumexp_n)
        if self.kept_bytes + features.num_bytes <= self.keep_bytes:
            self.kept_bytes += features.num_bytes
            self.kept[sample.id] = Features(hidden_nTD.cpu(), argmax_n.cpu(), logsumexp_n.cpu())
        return features

    def _check(self, logits_V: Tensor, hidden_D: Tensor) -> None:
        """The logits that training derives from the last state must be the model's own."""
        derived_V = self.target.logits_of(hidden_D.unsqueeze(0))[0].float()
        gap = (derived_V - logits_V.float()).abs().max().item()
        if gap > 0.02 * max(logits_V.float().abs().max().item(), 1.0):
            raise ValueError(
                f"{self.target.name}: logits are not the output layer of the final norm (they differ by {gap:.3g}); "
                "this architecture is not supported for training"
            )
        self.checked = True


def target_labels(target: CausalLM, last_nD: Tensor, mask_n: np.ndarray) -> tuple[Tensor, Tensor]:
    """argmax_n and logsumexp_n of `Features`, from the states that leave the last layer."""
    argmax_n = torch.full((len(mask_n),), -1, dtype=torch.int64, device=last_nD.device)
    logsumexp_n = torch.zeros(len(mask_n), device=last_nD.device)
    places = torch.from_numpy(np.flatnonzero(mask_n[1:])).to(last_nD.device)
    for place in places.split(CHUNK):
        logits = target.logits_of(last_nD[place])
        argmax_n[place] = logits.max(-1).indices  # the first of equals; argmax of bfloat16 is slow on a CPU
        logsumexp_n[place] = logits.float().logsumexp(-1)
    return argmax_n, logsumexp_n


def _checked(target: CausalLM, layers: Iterable[int]) -> tuple[int, ...]:
    """Ascending, without duplicates, and with the last layer's output, from which the target's law follows."""
    target.check_states()
    given = list(layers)
    if not all(type(layer) is int for layer in given):
        raise ValueError(f"layer ids {given!r} must be numbers, such as [2, 15, 27, 30]")
    if len(set(given)) < len(given):
        raise ValueError(f"layer ids {given} name a layer twice; each is written once")
    chosen = tuple(sorted({*given, target.num_layers}))
    for layer in chosen:
        if not 0 <= layer <= target.num_layers:
            raise ValueError(f"hidden layer {layer} is outside 0..{target.num_layers}, the layers of {target.name}")
    return chosen


# ---------------------------------------------------------------- artifacts


def identity(target: CausalLM, layers: tuple[int, ...], revision: str | None = None) -> dict[str, Any]:
    """What a manifest says about where its hidden states come from."""
    vocabulary: str | None
    template: str | None
    try:
        tokenizer: Any = target.tokenizer
        vocabulary = _sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
        template = _sha256((tokenizer.chat_template or "").encode())
    except ValueError:  # a target without a tokenizer takes token ids
        vocabulary = template = None
    return {
        "format": FORMAT,
        "version": 1,
        "target": target.name,
        "revision": revision,
        "dtype": str(target.dtype).removeprefix("torch."),
        "hidden_size": target.hidden_size,
        "num_layers": target.num_layers,
        "vocab_size": target.vocab_size,
        "layer_ids": list(layers),
        "layer_numbering": "vllm: id i enters layer i, id num_layers leaves the last one",
        "last_hidden_kind": "pre_norm",
        "tokenizer_sha256": vocabulary,
        "chat_template_sha256": template,
        "producer": f"specdec {__version__}",
    }


def num_bytes(target: CausalLM, layers: Sequence[int], samples: Iterable[Sample]) -> int:
    """What the artifacts of these samples take on disk: itemsize x width x layers per token, and what stands beside it."""
    per_token = target.dtype.itemsize * target.hidden_size * len(layers) + 8 + 1 + 8 + 4
    return sum(len(sample.token_n) for sample in samples) * per_token


class Writer:
    """Writes samples into shards of an artifact directory. A shard appears whole, under its name, or not at all.

    shard_bytes: a shard is closed when it holds so many; 0 writes a file per sample. plain: hidden_states and token_ids only,
    in a file per sample that is named after it, as vLLM writes them per request.
    """

    def __init__(self, directory: Path, manifest: dict[str, Any], shard_bytes: int = 1 << 28, plain: bool = False):
        self.directory, self.shard_bytes, self.plain = directory, 0 if plain else shard_bytes, plain
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "manifest.json"
        if path.exists():
            before = _read_manifest(directory)
            for key, value in manifest.items():
                if key != "producer" and before.get(key) != json.loads(json.dumps(value)):
                    raise ValueError(f"{path}: {key} is {before.get(key)!r}, not {value!r}; use another out_dir=")
        else:
            _write(path, json.dumps(manifest, indent=1))
        self.pending: list[tuple[Sample, Features]] = []
        self.pending_bytes = 0
        shards = [re.fullmatch(rf"{PREFIX}(\d+)", path.stem) for path in directory.glob(f"{PREFIX}*.safetensors")]
        self.number = max((int(shard[1]) for shard in shards if shard), default=-1) + 1

    def add(self, sample: Sample, features: Features) -> None:
        self.pending.append((sample, features))
        self.pending_bytes += features.num_bytes
        if self.pending_bytes >= self.shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Write what is pending as one shard."""
        if not self.pending:
            return
        entries, offset = [], 0
        tensors = [_tensors(sample, features) for sample, features in self.pending]
        for (sample, _), own in zip(self.pending, tensors, strict=True):
            length = len(sample.token_n)
            entries.append({"id": sample.id, "offset": offset, "length": length, "sha256": _digest(own)})
            offset += length
        joined = {key: torch.cat([own[key] for own in tensors]).contiguous() for key in tensors[0]}
        metadata: dict[str, str] | None = {"format": FORMAT, "samples": json.dumps(entries)}
        name = f"{PREFIX}{self.number:05d}.safetensors"
        if self.plain:
            joined, metadata = {key: joined[key] for key in ("hidden_states", "token_ids")}, None
            name = self.plain_name(self.pending[0][0])
        # a directory of its own: safetensors too writes under temporary names, which only it knows, beside the file
        temporary = self.directory / f".{PREFIX}{os.getpid()}.tmp" / name
        try:
            temporary.parent.mkdir(exist_ok=True)
            save_file(joined, temporary, metadata=metadata)
            apply_umask(temporary)
            if self.plain:
                temporary.replace(self.directory / name)
            else:
                self._place(temporary)
        except (SafetensorError, OSError) as error:
            raise OSError(f"{self.directory / name} could not be written ({first_line(error)}); is the disk full?") from None
        finally:
            shutil.rmtree(temporary.parent, ignore_errors=True)
        self.pending, self.pending_bytes = [], 0

    def _place(self, temporary: Path) -> None:
        """Give a shard the next number that is free, whoever else writes into the directory."""
        while True:
            final = self.directory / f"{PREFIX}{self.number:05d}.safetensors"
            self.number += 1
            if final.exists():
                continue
            try:
                os.link(temporary, final)
            except FileExistsError:
                continue
            except OSError:  # a file system without links
                temporary.replace(final)
            return

    def plain_name(self, sample: Sample) -> str:
        stem = re.sub(r"^\.|[^A-Za-z0-9._-]", "_", sample.id)[:100]
        if stem != sample.id:  # others may come to the same
            stem += f"-{_key(sample.token_n)[:8]}"
        return f"{stem}.safetensors"


def _tensors(sample: Sample, features: Features) -> dict[str, Tensor]:
    tensors = {
        "hidden_states": features.hidden_nTD.cpu(),
        "token_ids": torch.from_numpy(sample.token_n),
        "loss_mask": torch.from_numpy(sample.mask_n.astype(np.uint8)),
    }
    if features.argmax_n is not None and features.logsumexp_n is not None:
        tensors |= {"argmax": features.argmax_n.cpu(), "logsumexp": features.logsumexp_n.cpu()}
    return tensors


@dataclass(frozen=True)
class SampleLocation:
    """Where a sample stands."""

    path: Path
    offset: int
    length: int
    sha256: str | None
    id: str


class StoredFeatures:
    """Features read from a directory. Nothing is read that is not what was written: every sample is checked against its hash.

    layers: the ids that are wanted, which must be among the stored ones; layer_ids: the stored ones, where no manifest says so.
    Raises ValueError, one line, for a directory that is not whole or not of this target.
    """

    def __init__(self, directory: str | Path, target: CausalLM, layers: Iterable[int], layer_ids: Sequence[int] | None = None):
        self.directory, self.target, self.layers = Path(directory), target, _checked(target, layers)
        if not self.directory.is_dir():
            raise ValueError(f"features.path={directory}: no such directory")
        manifest = _read_manifest(self.directory) if (self.directory / "manifest.json").exists() else {}
        stored = layer_ids if not manifest else manifest.get("layer_ids")
        for ids in (layer_ids, stored):
            if ids is not None and (not isinstance(ids, list | tuple) or not all(type(layer) is int for layer in ids)):
                raise ValueError(f"{directory}: layer ids {ids!r} must be a list of numbers, such as [2, 15, 27, 30]")
        if layer_ids is not None and sorted(set(layer_ids)) != sorted(set(stored or ())):
            raise ValueError(
                f"features.layer_ids={list(layer_ids)}, and the manifest of {directory} says {stored}; leave it out"
            )
        if stored is None:
            raise ValueError(f"{directory}: no manifest.json, so say which layers its files hold: features.layer_ids=[...]")
        self.stored = tuple(sorted(set(stored)))
        made_in, runs_in = manifest.get("dtype"), str(target.dtype).removeprefix("torch.")
        if made_in not in (None, runs_in):
            raise ValueError(f"{directory}: made in {made_in}, and {target.name} runs in {runs_in}; give model.dtype={made_in}")
        for key in ("hidden_size", "num_layers", "vocab_size"):
            if manifest.get(key, getattr(target, key)) != getattr(target, key):
                theirs, own = f"{manifest[key]} (of {manifest['target']})", getattr(target, key)
                raise ValueError(
                    f"{directory}: {key} is {theirs}, and {target.name} has {own}; use the target it was made with"
                )
        if missing := set(self.layers) - set(self.stored):
            raise ValueError(f"{directory}: layer {min(missing)} is wanted, and layers {list(self.stored)} are stored")
        self.columns = [self.stored.index(layer) for layer in self.layers]
        self.places: dict[str, SampleLocation] = {}
        for path in sorted(self.directory.glob("*.safetensors")):
            for place, token_n in places(path):
                self.places[_key(token_n)] = place
        if not self.places:
            raise ValueError(f"{directory}: no hidden states in there")
        self._check()

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        return collate(samples, [self.of(sample) for sample in samples], self.layers, self.target.device)

    def place(self, sample: Sample) -> SampleLocation:
        """Where the sample is. What was recorded while decoding lacks the last token, which the target never processed."""
        for tokens in (sample.token_n, sample.token_n[:-1]):
            if (place := self.places.get(_key(tokens))) is not None:
                return place
        raise ValueError(
            f"{self.directory}: no hidden states of sample {sample.id} ({len(sample.token_n)} tokens); "
            "extract them with the same data settings (train/extract.py)"
        )

    def of(self, sample: Sample) -> Features:
        place, length = self.place(sample), len(sample.token_n)
        tensors = read(place)
        hidden_nTD = tensors["hidden_states"]
        self._check_shape(place, hidden_nTD)
        if self.columns != list(range(len(self.stored))):
            hidden_nTD = hidden_nTD[:, self.columns]
        lacking = length - place.length
        hidden_nTD = torch.nn.functional.pad(hidden_nTD, (0, 0, 0, 0, 0, lacking)).to(self.target.device)
        asked_n = torch.from_numpy(np.append(sample.mask_n[1:], False))
        if "argmax" in tensors and not lacking and (tensors["argmax"][asked_n] >= 0).all():
            argmax_n, logsumexp_n = tensors["argmax"], tensors["logsumexp"]
            return Features(hidden_nTD, torch.where(asked_n, argmax_n, -1), torch.where(asked_n, logsumexp_n, 0.0))
        last_nD = hidden_nTD[:, -1].to(self.target.dtype)
        return Features(hidden_nTD, *target_labels(self.target, last_nD, sample.mask_n))

    def _check_shape(self, place: SampleLocation, hidden_nTD: Tensor) -> None:
        if hidden_nTD.shape[1:] != (len(self.stored), self.target.hidden_size):
            raise ValueError(
                f"{place.path}: hidden_states are {list(hidden_nTD.shape)}; [tokens, {len(self.stored)} layers, "
                f"{self.target.hidden_size}] is expected"
            )

    def _check(self) -> None:
        """The stored last states of some samples, through the target's output layer, must give the stored argmax; where none
        is stored, that of a forward of the target."""
        every, online = list(self.places.values()), OnlineFeatures(self.target, ())
        rows = hits = 0
        for place in every[:: max(len(every) // 4, 1)][:4]:
            tensors = read(place)
            hidden_nTD = tensors["hidden_states"]
            self._check_shape(place, hidden_nTD)
            last_nD = hidden_nTD[:, self.stored.index(self.target.num_layers)]
            argmax_n = tensors.get("argmax")
            if argmax_n is None:
                token_n = tensors["token_ids"][:64].long().numpy()
                if not 0 <= token_n.min(initial=0) <= token_n.max(initial=0) < self.target.vocab_size or not len(token_n):
                    raise ValueError(
                        f"{place.path}: its token_ids are none of {self.target.name} (0..{self.target.vocab_size - 1})"
                    )
                argmax_n = online.of(Sample(place.id, token_n, np.ones(len(token_n), dtype=bool))).argmax_n
                assert argmax_n is not None
                argmax_n = argmax_n.cpu()
            told = torch.nonzero(argmax_n >= 0).flatten()[:64]
            logits = self.target.logits_of(last_nD[told].to(self.target.device, self.target.dtype))
            hits += int((logits.max(-1).indices.cpu() == argmax_n[told]).sum())
            rows += len(told)
        if hits < 0.9 * rows:
            raise ValueError(
                f"{self.directory}: its last states, through the output layer of {self.target.name}, give the recorded token "
                f"in {hits} of {rows} rows; they are of another target"
            )


def places(path: Path) -> Iterator[tuple[SampleLocation, np.ndarray]]:
    """The samples of a file and their tokens. Raises ValueError if the file is not whole."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            token_N = file.get_tensor("token_ids").numpy()
            shape = file.get_slice("hidden_states").get_shape()
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path}: cut short or not hidden states ({first_line(error)}); extract again with resume=true"
        ) from None
    if shape[0] != len(token_N):
        raise ValueError(f"{path}: {shape[0]} states for {len(token_N)} tokens; extract again with resume=true")
    if "samples" not in metadata and FORMAT not in metadata.values():
        yield SampleLocation(path, 0, len(token_N), None, path.stem), token_N
        return
    try:
        told = parse_json(metadata["samples"], str(path))
        entries = [(int(e["offset"]), int(e["length"]), e["sha256"], str(e["id"])) for e in told]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path}: its list of samples is damaged; extract again with resume=true") from None
    for offset, length, sha256, name in entries:
        yield SampleLocation(path, offset, length, sha256, name), token_N[offset : offset + length]


def read(place: SampleLocation) -> dict[str, Tensor]:
    """Everything stored of a sample. Raises ValueError if it is not what was written."""
    try:
        with safe_open(place.path, framework="pt") as file:
            tensors = {key: file.get_slice(key)[place.offset : place.offset + place.length] for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{place.path}: cannot be read ({first_line(error)}); extract again with resume=true") from None
    if place.sha256 is not None and _digest(tensors) != place.sha256:
        raise ValueError(f"{place.path}: sample {place.id} is not what was written; extract again with resume=true")
    return tensors


def extract(source: OnlineFeatures, samples: Sequence[Sample], writer: Writer, advance: Any) -> int:
    """Write the features of all samples that the directory does not hold yet; a file that is damaged is made again.

    advance: called after every sample. Returns how many samples were computed.
    """
    have: set[str] = set()
    for rest in writer.directory.glob(f".{PREFIX}*.tmp"):  # what a run that was killed was about to write
        shutil.rmtree(rest)
    ours = {writer.plain_name(sample) for sample in samples} if writer.plain else set()
    for path in sorted(writer.directory.glob("*.safetensors")):
        try:
            inside = list(places(path))
            for place, _ in inside:
                read(place)
        except ValueError:
            if path.name not in ours and not re.fullmatch(rf"{PREFIX}\d+", path.stem):
                raise ValueError(f"{path} holds no hidden states; use a directory of its own") from None
            path.unlink()
            continue
        have |= {_key(token_n) for _, token_n in inside}
    todo = []
    for sample in samples:
        if _key(sample.token_n) in have:
            advance()
        else:
            have.add(_key(sample.token_n))
            todo.append(sample)
    need, free = num_bytes(source.target, source.layers, todo), shutil.disk_usage(writer.directory).free
    if need > free:
        raise ValueError(
            f"{writer.directory}: the hidden states of {len(todo)} samples take {need / 2**30:.2f} GiB, and "
            f"{free / 2**30:.2f} GiB are free; lower data.limit or data.max_length, or use another disk"
        )
    try:
        for sample in todo:
            writer.add(sample, source.of(sample))
            advance()
    finally:  # what is computed is kept, whatever ended it
        writer.flush()
    return len(todo)


def _read_manifest(directory: Path) -> dict[str, Any]:
    path = directory / "manifest.json"
    manifest = read_json_object(path, "the directory cannot be used")
    if manifest.get("format") != FORMAT or manifest.get("version") != 1:
        raise ValueError(f"{path}: format {manifest.get('format')!r} version {manifest.get('version')!r} is not {FORMAT!r} 1")
    return dict(manifest)


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path):
        temporary.write_text(text + "\n")
        temporary.replace(path)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _key(token_n: np.ndarray) -> str:
    return _sha256(np.ascontiguousarray(token_n, dtype=np.int64).tobytes())


def _digest(tensors: dict[str, Tensor]) -> str:
    """A hash of names, shapes, types and bytes."""
    digest = hashlib.sha256()
    for key in sorted(tensors):
        tensor = tensors[key].contiguous()
        digest.update(f"{key} {list(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.view(torch.uint8).numpy().data if tensor.ndim else b"")
    return digest.hexdigest()
