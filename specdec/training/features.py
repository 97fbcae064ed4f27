"""Where training gets the target's features of its samples: computed when they are needed, or read from an artifact."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.artifact import MANIFEST, SampleLocation, Writer, locations, num_bytes, read, read_manifest, token_key
from specdec.drafter.batch import Batch, Features, Sample, collate
from specdec.model import distributed
from specdec.model.distributed import SharedCount
from specdec.model.target import CausalLM

CHUNK = 512  # tokens of one forward, and of one product with the output layer


class TokenSource:
    """No features: for a drafter that learns from the data's tokens alone."""

    def __init__(self, device: torch.device):
        self.device = device

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        return collate(samples, None, (), self.device)


class OnlineFeatures:
    """Features by a forward of the target.

    target: frozen.
    layers: ids of the layers to tap; the last one's output is always among them.
    keep_bytes: features of this many bytes are kept in memory for the next epoch.
    """

    def __init__(self, target: CausalLM, layers: Iterable[int], keep_bytes: int = 0):
        self.target = target
        self.layers = check_layers(target, layers)
        self.keep_bytes = keep_bytes
        self.cached_bytes = 0
        self.cached: dict[str, Features] = {}
        self.kv_cache = target.new_cache()
        self.checked = False

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        return collate(samples, [self.compute(sample) for sample in samples], self.layers, self.target.device)

    def compute(self, sample: Sample) -> Features:
        """Features of one sample. One at a time, so that its numbers do not depend on the batch."""
        if sample.id in self.cached:
            return self.cached[sample.id]
        length = len(sample.token_n)
        if length > self.target.max_model_len:
            raise ValueError(
                f"sample {sample.id} has {length} tokens, and {self.target.name} can see {self.target.max_model_len}; "
                f"lower data.max_length{self.target.max_model_len_reason}"
            )
        self.kv_cache.reserve(1, length)
        out = self.target.prefill(self.kv_cache, 0, sample.token_n, 0, CHUNK, self.layers)
        assert out.hidden_NTD is not None
        # tensors of inference mode cannot take part in training; copies can
        hidden_nTD = out.hidden_NTD.clone()
        if not self.checked:
            self._check_output_layer(out.logits[-1], hidden_nTD[-1, -1])
        argmax_n, logsumexp_n = target_labels(self.target, hidden_nTD[:, -1], sample.mask_n)
        if not logsumexp_n.isfinite().all():
            raise ValueError(f"sample {sample.id}: {self.target.not_finite_message}")
        features = Features(hidden_nTD, argmax_n, logsumexp_n)
        if self.cached_bytes + features.num_bytes <= self.keep_bytes:
            self.cached_bytes += features.num_bytes
            self.cached[sample.id] = Features(hidden_nTD.cpu(), argmax_n.cpu(), logsumexp_n.cpu())
        return features

    def _check_output_layer(self, logits_V: Tensor, hidden_D: Tensor) -> None:
        """The logits that training derives from the last state must be those of the model."""
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
    positions = torch.from_numpy(np.flatnonzero(mask_n[1:])).to(last_nD.device)
    for chunk in positions.split(CHUNK):
        logits = target.logits_of(last_nD[chunk])
        argmax_n[chunk] = logits.max(-1).indices  # the first of equals; argmax of bfloat16 is slow on a CPU
        logsumexp_n[chunk] = logits.float().logsumexp(-1)
    return argmax_n, logsumexp_n


def check_layers(target: CausalLM, layers: Iterable[int]) -> tuple[int, ...]:
    """Layer ids in ascending order, with that of the last layer's output, from which the target's logits follow."""
    target.check_states()
    layers = list(layers)
    if not all(type(layer) is int for layer in layers):
        raise ValueError(f"layer ids {layers!r} must be numbers, such as [2, 15, 27, 30]")
    if len(set(layers)) < len(layers):
        raise ValueError(f"layer ids {layers} name a layer twice; each is written once")
    tapped = tuple(sorted({*layers, target.num_layers}))
    for layer in tapped:
        if not 0 <= layer <= target.num_layers:
            raise ValueError(f"hidden layer {layer} is outside 0..{target.num_layers}, the layers of {target.name}")
    return tapped


class StoredFeatures:
    """Features read from an artifact. Every sample is checked against its hash.

    directory: of the artifact.
    target: the one that the features were extracted from.
    layers: ids of the layers to read, which must be among the stored ones.
    layer_ids: ids of the stored layers, where no manifest has them.
    Raises ValueError, one line, for a directory that is not complete or not of this target.
    """

    def __init__(self, directory: str | Path, target: CausalLM, layers: Iterable[int], layer_ids: Sequence[int] | None = None):
        self.directory = Path(directory)
        self.target = target
        self.layers = check_layers(target, layers)
        if not self.directory.is_dir():
            raise ValueError(f"features.path={directory}: no such directory")
        manifest = read_manifest(self.directory) if (self.directory / MANIFEST).exists() else {}
        self.stored_layers = _stored_layers(directory, manifest, layer_ids)
        _check_same_target(directory, manifest, target)
        if missing := set(self.layers) - set(self.stored_layers):
            raise ValueError(f"{directory}: layer {min(missing)} is wanted, and layers {list(self.stored_layers)} are stored")
        self.columns = [self.stored_layers.index(layer) for layer in self.layers]
        self.locations: dict[str, SampleLocation] = {}
        for path in sorted(self.directory.glob("*.safetensors")):
            for location, token_n in locations(path):
                self.locations[token_key(token_n)] = location
        if not self.locations:
            raise ValueError(f"{directory}: no hidden states in there")
        self._check_argmax()

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        return collate(samples, [self.load(sample) for sample in samples], self.layers, self.target.device)

    def locate(self, sample: Sample) -> SampleLocation:
        """Where the sample is. What was recorded while decoding lacks the last token, which the target never processed."""
        for tokens in (sample.token_n, sample.token_n[:-1]):
            if (location := self.locations.get(token_key(tokens))) is not None:
                return location
        raise ValueError(
            f"{self.directory}: no hidden states of sample {sample.id} ({len(sample.token_n)} tokens); "
            "extract them with the same data settings (train/extract.py)"
        )

    def load(self, sample: Sample) -> Features:
        location = self.locate(sample)
        tensors = read(location)
        hidden_nTD = tensors["hidden_states"]
        self._check_shape(location, hidden_nTD)
        if self.columns != list(range(len(self.stored_layers))):
            hidden_nTD = hidden_nTD[:, self.columns]
        num_missing = len(sample.token_n) - location.length
        hidden_nTD = torch.nn.functional.pad(hidden_nTD, (0, 0, 0, 0, 0, num_missing)).to(self.target.device)
        labelled_n = torch.from_numpy(np.append(sample.mask_n[1:], False))
        if "argmax" in tensors and not num_missing and (tensors["argmax"][labelled_n] >= 0).all():
            argmax_n = torch.where(labelled_n, tensors["argmax"], -1)
            return Features(hidden_nTD, argmax_n, torch.where(labelled_n, tensors["logsumexp"], 0.0))
        last_nD = hidden_nTD[:, -1].to(self.target.dtype)
        return Features(hidden_nTD, *target_labels(self.target, last_nD, sample.mask_n))

    def _check_shape(self, location: SampleLocation, hidden_nTD: Tensor) -> None:
        if hidden_nTD.shape[1:] != (len(self.stored_layers), self.target.hidden_size):
            raise ValueError(
                f"{location.path}: hidden_states are {list(hidden_nTD.shape)}; [tokens, {len(self.stored_layers)} layers, "
                f"{self.target.hidden_size}] is expected"
            )

    def _check_argmax(self) -> None:
        """The stored last states of some samples, through the target's output layer, must give the stored argmax; where none
        is stored, that of a forward of the target."""
        online = OnlineFeatures(self.target, ())
        stored = list(self.locations.values())
        num_rows = 0
        num_hits = 0
        for location in stored[:: max(len(stored) // 4, 1)][:4]:
            tensors = read(location)
            hidden_nTD = tensors["hidden_states"]
            self._check_shape(location, hidden_nTD)
            last_nD = hidden_nTD[:, self.stored_layers.index(self.target.num_layers)]
            argmax_n = tensors.get("argmax")
            if argmax_n is None:
                token_n = tensors["token_ids"][:64].long().numpy()
                if not 0 <= token_n.min(initial=0) <= token_n.max(initial=0) < self.target.vocab_size or not len(token_n):
                    raise ValueError(
                        f"{location.path}: its token_ids are none of {self.target.name} (0..{self.target.vocab_size - 1})"
                    )
                argmax_n = online.compute(Sample(location.id, token_n, np.ones(len(token_n), dtype=bool))).argmax_n
                assert argmax_n is not None
                argmax_n = argmax_n.cpu()
            labelled = torch.nonzero(argmax_n >= 0).flatten()[:64]
            logits = self.target.logits_of(last_nD[labelled].to(self.target.device, self.target.dtype))
            num_hits += int((logits.max(-1).indices.cpu() == argmax_n[labelled]).sum())
            num_rows += len(labelled)
        if num_hits < 0.9 * num_rows:
            raise ValueError(
                f"{self.directory}: its last states, through the output layer of {self.target.name}, give the recorded token "
                f"in {num_hits} of {num_rows} rows; they are of another target"
            )


def _stored_layers(directory: str | Path, manifest: dict[str, Any], layer_ids: Sequence[int] | None) -> tuple[int, ...]:
    """Ids of the layers that an artifact holds, by its manifest, or by the setting. Raises ValueError if the two differ."""
    stored = manifest.get("layer_ids") if manifest else layer_ids
    for ids in (layer_ids, stored):
        if ids is not None and (not isinstance(ids, list | tuple) or not all(type(layer) is int for layer in ids)):
            raise ValueError(f"{directory}: layer ids {ids!r} must be a list of numbers, such as [2, 15, 27, 30]")
    if layer_ids is not None and sorted(set(layer_ids)) != sorted(set(stored or ())):
        raise ValueError(f"features.layer_ids={list(layer_ids)}, and the manifest of {directory} says {stored}; leave it out")
    if stored is None:
        raise ValueError(f"{directory}: no manifest.json, so say which layers its files hold: features.layer_ids=[...]")
    return tuple(sorted(set(stored)))


def _check_same_target(directory: str | Path, manifest: dict[str, Any], target: CausalLM) -> None:
    """Raises ValueError if the manifest is of another type of numbers or another shape of model."""
    dtype = str(target.dtype).removeprefix("torch.")
    stored_dtype = manifest.get("dtype")
    if stored_dtype not in (None, dtype):
        raise ValueError(
            f"{directory}: made in {stored_dtype}, and {target.name} runs in {dtype}; give model.dtype={stored_dtype}"
        )
    for key in ("hidden_size", "num_layers", "vocab_size"):
        expected = getattr(target, key)
        if manifest.get(key, expected) != expected:
            raise ValueError(
                f"{directory}: {key} is {manifest[key]} (of {manifest['target']}), and {target.name} has {expected}; "
                "use the target it was made with"
            )


def extract(source: OnlineFeatures, samples: Sequence[Sample], writer: Writer, advance: Callable[[int], object]) -> int:
    """Write the features of all samples that the directory does not hold yet; a damaged file is written again.

    source: computes the features.
    samples: those to write.
    writer: of the artifact.
    advance: called with the number of samples that are there, of all processes, whenever it may have grown.
    Returns how many samples were computed, by all processes of the target that share them.
    """
    processes = source.target.processes
    stored = processes.from_first(writer.stored_keys(samples) if processes.is_first else None)
    todo = []
    for sample in samples:
        key = token_key(sample.token_n)
        if key not in stored:
            stored.add(key)
            todo.append(sample)
    size = num_bytes(source.target, source.layers, todo)
    free = shutil.disk_usage(writer.directory).free
    if size > free:
        raise ValueError(
            f"{writer.directory}: the hidden states of {len(todo)} samples take {size / 2**30:.2f} GiB, and "
            f"{free / 2**30:.2f} GiB are free; lower data.limit or data.max_length, or use another disk"
        )
    count = SharedCount(processes, "samples")
    show = lambda new: advance(len(samples) - len(todo) + count.add(new))
    show(0)
    try:
        for sample in processes.share(todo):
            writer.add(sample, source.compute(sample))
            show(1)
    finally:  # what is computed is kept, whatever ends the run
        writer.flush()
    distributed.wait_for_all(processes, lambda: show(0))
    return len(todo)
