"""What the target thinks of training samples: the right layers, the same bits online and from disk, files that are whole."""

from __future__ import annotations

import errno
import json
import re
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from specdec import artifact, hub, method, rejection
from specdec.artifact import Writer, manifest_of
from specdec.checkpoint import native
from specdec.core import Request, RequestStats
from specdec.drafter.base import Init
from specdec.drafter.batch import Batch, Sample
from specdec.engine import Engine
from specdec.measure import records
from specdec.method.eagle3 import Eagle3
from specdec.model.target import CausalLM
from specdec.params import SamplingParams
from specdec.training import data, features, prepare
from specdec.training.features import OnlineFeatures, StoredFeatures, extract
from support import cli
from support.all_pairs import all_pairs
from support.cli import TRAIN
from support.processes import ended, fork

LISTS = [(), (0,), (4,), (1, 3), (3, 1), (0, 1, 2, 3, 4)]


def samples_of(count: int, seed: int = 0, longest: int = 40) -> list[Sample]:
    """Random tokens, of which about half are supervised, in runs."""
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(count):
        length = int(rng.integers(4, longest))
        mask_n = np.repeat(rng.random(length // 3 + 1) < 0.5, 3)[:length]
        mask_n[-1] = True
        samples.append(Sample(f"s{i}", rng.integers(0, 256, length), mask_n))
    return samples


def write(source: OnlineFeatures, samples: list[Sample], directory: Path, shard_bytes: int = 20_000, **options: Any) -> Path:
    """StoredFeatures of these samples, in several files."""
    extract(source, samples, Writer(directory, manifest_of(source.target, source.layers), shard_bytes, **options), nothing)
    return directory


def nothing(num_done: int) -> None:
    pass


def same(a: Batch, b: Batch) -> None:
    """Every bit of two batches."""
    assert a.ids == b.ids
    assert a.layers == b.layers
    assert np.array_equal(a.length_B, b.length_B)
    assert np.array_equal(a.mask_N, b.mask_N)
    for key in ("token_N", "hidden_NTD", "argmax_N", "logsumexp_N"):
        left = getattr(a, key)
        right = getattr(b, key)
        assert left.dtype == right.dtype, key
        assert torch.equal(left, right), key


def contents(directory: Path) -> dict[str, dict[str, Tensor]]:
    """By sample id, everything that is stored of it; each is read against its hash."""
    layers = {}
    for path in sorted(directory.glob("*.safetensors")):
        for place, _ in artifact.locations(path):
            assert place.id not in layers, "no sample is there twice"
            layers[place.id] = artifact.read(place)
    return layers


def equal_contents(a: Path, b: Path) -> None:
    left = contents(a)
    right = contents(b)
    assert left.keys() == right.keys()
    for key, tensors in left.items():
        assert tensors.keys() == right[key].keys()
        assert all(torch.equal(tensor, right[key][name]) for name, tensor in tensors.items()), key


def line(error: pytest.ExceptionInfo[Any]) -> str:
    """What is said, which is one line."""
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return CausalLM("tiny-llama", "float32", "cpu")


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return samples_of(12)


@pytest.fixture(scope="module")
def stored_features(target: CausalLM, samples: list[Sample], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """StoredFeatures of layers 1, 3 and 4, never written to by a test."""
    return write(OnlineFeatures(target, (1, 3)), samples, tmp_path_factory.mktemp("artifacts") / "whole")


@pytest.fixture
def copied(stored_features: Path, tmp_path: Path) -> Path:
    return shutil.copytree(stored_features, tmp_path / "copied")


# ---------------------------------------------------------------------------------------------- alignment


class Add(torch.nn.Module):
    """A decoder layer that adds its number, so that a state tells which layers it went through."""

    def __init__(self, number: int):
        super().__init__()
        self.number = number

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states + 2.0**self.number


@pytest.fixture(scope="module")
def adding() -> CausalLM:
    """What enters layer 0 is the embedding; layer i adds 2 to the i."""
    model = CausalLM("tiny-llama", "float32", "cpu")
    decoder = model.model.get_decoder()
    model.contract.layers = decoder.layers = torch.nn.ModuleList([Add(i) for i in range(model.num_layers)])
    return model


def expected(model: CausalLM, token_n: np.ndarray, layers: tuple[int, ...]) -> Tensor:
    state_nD = model.embedding(torch.from_numpy(token_n))
    entering = {}
    for layer in range(model.num_layers + 1):
        entering[layer] = state_nD
        state_nD = state_nD + 2.0**layer
    return torch.stack([entering[layer] for layer in sorted({*layers, model.num_layers})], 1)


@pytest.mark.parametrize("layers", LISTS)
def test_id_i_is_what_enters_layer_i(adding: CausalLM, samples: list[Sample], layers: tuple[int, ...], tmp_path: Path) -> None:
    """Online, from our own files, and from files as vLLM writes them; the last id leaves the last layer, before the norm."""
    source = OnlineFeatures(adding, layers)
    assert source.layers == tuple(sorted({*layers, 4}))
    stored = StoredFeatures(write(source, samples, tmp_path / "own"), adding, layers)
    plain = StoredFeatures(write(source, samples, tmp_path / "plain", plain=True), adding, layers, source.layers)
    for sample in samples:
        want = expected(adding, sample.token_n, layers)
        for batch in (source([sample]), stored([sample]), plain([sample])):
            assert torch.equal(batch.hidden_NTD, want)
            for layer in source.layers:
                assert torch.equal(batch.hidden([layer])[:, 0], want[:, source.layers.index(layer)])


@pytest.mark.parametrize("wanted", [(), (0,), (2,), (0, 3), (1, 2, 3)])
def test_artifacts_of_more_layers_give_those_that_are_wanted(
    adding: CausalLM, samples: list[Sample], wanted: tuple[int, ...], tmp_path: Path
) -> None:
    every = write(OnlineFeatures(adding, range(5)), samples, tmp_path / "every")
    same(StoredFeatures(every, adding, wanted)(samples), OnlineFeatures(adding, wanted)(samples))


def test_a_batch_hands_out_layers_in_the_order_asked_for(adding: CausalLM, samples: list[Sample]) -> None:
    batch = OnlineFeatures(adding, range(5))(samples[:2])
    for layers in ((0, 1, 2), (4,), (3, 1), (0, 2, 4), (2, 2)):
        want = torch.stack([batch.hidden_NTD[:, layer] for layer in layers], 1)
        assert torch.equal(batch.hidden(layers), want)


@pytest.mark.parametrize("architecture", hub.TINY)
def test_states_and_probs_are_those_of_transformers(architecture: str) -> None:
    """Every layer, and what the logits say wherever the next token is supervised; also past the window and the chunk."""
    model = CausalLM(f"tiny-{architecture}", "float32", "cpu")
    reference = hub.load_model(model.path, dtype=torch.float32, attn_implementation="eager")
    pre_norm: list[Tensor] = []
    reference.model.norm.register_forward_pre_hook(lambda _, args: pre_norm.append(args[0]))
    source = OnlineFeatures(model, range(5))
    for sample in [*samples_of(3), *samples_of(1, 7, 60), long_one()]:
        with torch.no_grad():
            out = reference(torch.from_numpy(sample.token_n)[None], output_hidden_states=True)
        want = torch.stack([state[0] for state in [*out.hidden_states[:-1], pre_norm[-1]]], 1)
        batch = source.compute(sample)
        # as far from float64 as transformers' own float32 is: 1.8e-4 here
        torch.testing.assert_close(batch.hidden_nTD, want, rtol=1e-4, atol=1e-3 if len(sample.token_n) > 100 else 3e-4)
        assert batch.argmax_n is not None
        assert batch.logsumexp_n is not None
        labelled = torch.from_numpy(np.append(sample.mask_n[1:], False))
        assert torch.equal(batch.argmax_n[labelled], out.logits[0].argmax(-1)[labelled])
        torch.testing.assert_close(batch.logsumexp_n[labelled], out.logits[0].logsumexp(-1)[labelled], rtol=1e-4, atol=1e-3)
        assert (batch.argmax_n[~labelled] == -1).all()
        assert (batch.logsumexp_n[~labelled] == 0).all()


def long_one() -> Sample:
    """Longer than a chunk."""
    rng = np.random.default_rng(5)
    mask_n = np.ones(features.CHUNK + 30, dtype=bool)
    mask_n[: features.CHUNK - 20] = False
    return Sample("long", rng.integers(0, 256, len(mask_n)), mask_n)


@pytest.mark.parametrize("architecture", hub.TINY)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sample_has_the_same_bits_in_any_company(architecture: str, dtype: str) -> None:
    """Alone, again, after longer ones, in another order, and kept in memory."""
    model = CausalLM(f"tiny-{architecture}", dtype, "cpu")
    samples = samples_of(6)
    first = {sample.id: OnlineFeatures(model, (1, 2))([sample]) for sample in samples}
    source = OnlineFeatures(model, (1, 2))
    keeping = OnlineFeatures(model, (2, 1), keep_bytes=20_000)
    source([long_one()])
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4], [2, 2, 2]):
        for where in (source, keeping):
            together = where([samples[i] for i in order])
            edges = np.cumsum([0, *together.length_B])
            for i, a, b in zip(order, edges, edges[1:], strict=False):
                alone = first[samples[i].id]
                for key in ("token_N", "hidden_NTD", "argmax_N", "logsumexp_N"):
                    assert torch.equal(getattr(together, key)[a:b], getattr(alone, key)), key
    assert 0 < keeping.cached_bytes <= 20_000
    assert 0 < len(keeping.cached) < 6


def test_what_is_captured_can_take_part_in_training(target: CausalLM, samples: list[Sample], stored_features: Path) -> None:
    """Tensors of inference mode cannot be saved for a backward pass."""
    for source in (OnlineFeatures(target, (1, 3)), StoredFeatures(stored_features, target, (1, 3))):
        batch = source(samples[:2])
        weight = torch.ones(64, requires_grad=True)
        ((batch.hidden_NTD * weight).sum() + (batch.logsumexp_N * weight.sum()).sum()).backward()
        assert weight.grad is not None


def test_layers_outside_the_target_are_refused(target: CausalLM, stored_features: Path) -> None:
    for layer in (-1, 5, 99):
        with pytest.raises(ValueError, match=rf"hidden layer {layer} is outside 0\.\.4, the layers of tiny-llama"):
            OnlineFeatures(target, (1, layer))
        with pytest.raises(ValueError, match=rf"hidden layer {layer} is outside 0\.\.4"):
            StoredFeatures(stored_features, target, (1, layer))


def test_a_sample_longer_than_the_target_can_see_is_refused(target: CausalLM) -> None:
    long = Sample("x", np.zeros(4097, dtype=np.int64), np.ones(4097, dtype=bool))
    with pytest.raises(ValueError, match=r"sample x has 4097 tokens, and tiny-llama can see 4096; lower data.max_length"):
        OnlineFeatures(target, ())([long])


def test_a_target_whose_logits_do_not_follow_from_its_last_state_is_refused() -> None:
    """An architecture with something between norm and logits that training would not know."""
    model = CausalLM("tiny-llama", "float32", "cpu")
    model.scale_logits = lambda logits: logits * 0.5  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="not supported for training"):
        OnlineFeatures(model, ())(samples_of(1))


# ---------------------------------------------------------------------------------------------- artifacts


@pytest.mark.parametrize(("architecture", "dtype"), [("llama", "float32"), ("llama", "bfloat16"), ("gemma2", "bfloat16")])
def test_training_batches_are_those_of_an_online_target(architecture: str, dtype: str, tmp_path: Path) -> None:
    model = CausalLM(f"tiny-{architecture}", dtype, "cpu")
    samples = samples_of(8)
    source = OnlineFeatures(model, (1, 3))
    for plain in (False, True):
        stored = StoredFeatures(write(source, samples, tmp_path / f"{plain}", plain=plain), model, (3, 1))
        for order in ([0, 1], [7, 2, 5], [3]):
            same(stored([samples[i] for i in order]), source([samples[i] for i in order]))


def test_other_masks_of_the_same_tokens(target: CausalLM, samples: list[Sample], stored_features: Path, tmp_path: Path) -> None:
    """What was extracted with one mask serves another; a set may hold a text twice, with other turns supervised."""
    source = OnlineFeatures(target, (1, 3))
    twins = []
    for i, sample in enumerate(samples):
        for name, mask_n in (("all", np.ones_like(sample.mask_n)), ("none", ~sample.mask_n), ("tail", sample.mask_n.copy())):
            mask_n[: len(mask_n) // 2] &= name != "tail"
            twins.append(Sample(f"{name}{i}", sample.token_n, mask_n))
    same(StoredFeatures(stored_features, target, (1, 3))(twins), source(twins))
    both = [*samples, *twins]
    same(StoredFeatures(write(source, both, tmp_path / "both"), target, (1, 3))(both), source(both))
    assert len(contents(tmp_path / "both")) == len(samples), "the same tokens are stored once"


def test_the_manifest_says_where_states_come_from(target: CausalLM, stored_features: Path) -> None:
    manifest = json.loads((stored_features / "manifest.json").read_text())
    want = {
        "format": "specdec-hidden-states", "version": 1, "target": "tiny-llama", "revision": None, "dtype": "float32",
        "hidden_size": 64, "num_layers": 4, "vocab_size": 320, "layer_ids": [1, 3, 4], "last_hidden_kind": "pre_norm",
    }  # fmt: skip
    assert {key: manifest[key] for key in want} == want
    assert "vllm" in manifest["layer_numbering"]
    assert manifest["producer"].startswith("specdec ")
    assert len(manifest["tokenizer_sha256"]) == len(manifest["chat_template_sha256"]) == 64
    shards = sorted(path.name for path in stored_features.glob("*.safetensors"))
    assert len(shards) > 2
    assert {path.name for path in stored_features.iterdir()} == {"manifest.json", *shards}
    with safe_open(stored_features / shards[0], framework="pt") as file:
        entries = json.loads(file.metadata()["samples"])
    assert [set(entry) for entry in entries] == [{"id", "offset", "length", "sha256"}] * len(entries)


def test_the_bytes_that_are_said_are_those_on_disk(target: CausalLM, samples: list[Sample], stored_features: Path) -> None:
    num_bytes = artifact.num_bytes(target, (1, 3, 4), samples)
    stored = sum(tensor.nbytes for tensors in contents(stored_features).values() for tensor in tensors.values())
    assert num_bytes == stored
    tokens = sum(len(sample.token_n) for sample in samples)
    assert 4 * 64 * 3 * tokens < num_bytes < 4 * 64 * 3.2 * tokens


@pytest.mark.parametrize("after", [0, 1, 5, 11])
def test_extraction_that_is_interrupted_goes_on(
    target: CausalLM, samples: list[Sample], stored_features: Path, tmp_path: Path, after: int
) -> None:
    """What was there stays; what was under way is made again; the result is that of a run without interruption."""
    source = OnlineFeatures(target, (1, 3))

    def advance(num_done: int) -> None:
        if num_done > after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        extract(source, samples, Writer(tmp_path, manifest_of(target, source.layers), 20_000), advance)
    rest = tmp_path / ".hidden-99.tmp"  # as a process that was killed leaves it: safetensors has temporary names of its own
    rest.mkdir()
    (rest / ".tmp02EJKL").write_bytes(b"half")
    before = {path: path.read_bytes() for path in tmp_path.glob("*.safetensors")}
    stored = len(contents(tmp_path))
    num_extracted = extract(source, samples, Writer(tmp_path, manifest_of(target, source.layers), 20_000), nothing)
    assert num_extracted == len(samples) - stored
    assert all(path.read_bytes() == was for path, was in before.items())
    assert not list(tmp_path.glob(".*"))
    equal_contents(tmp_path, stored_features)
    assert extract(source, samples, Writer(tmp_path, manifest_of(target, source.layers), 20_000), nothing) == 0


def test_a_file_under_a_temporary_name_is_never_read(target: CausalLM, samples: list[Sample], tmp_path: Path) -> None:
    """A process killed while it writes leaves one; so does one that is writing just now."""
    real = artifact.save_file

    def killed(tensors: Any, path: Path, metadata: Any = None) -> None:
        real(tensors, path, metadata)
        path.write_bytes(path.read_bytes()[:-100])
        # an exception is cleaned up after; a kill is not
        shutil.copytree(path.parent, tmp_path / ".hidden-99.tmp", dirs_exist_ok=True)
        raise KeyboardInterrupt

    source = OnlineFeatures(target, (1, 3))
    write(source, samples[:4], tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(artifact, "save_file", killed)
        with pytest.raises(KeyboardInterrupt):
            write(source, samples, tmp_path)
    assert len([path for path in tmp_path.iterdir() if path.name.startswith(".")]) == 1
    same(StoredFeatures(tmp_path, target, (1, 3))(samples[:4]), source(samples[:4]))
    write(source, samples, tmp_path)
    assert not list(tmp_path.glob(".*"))
    same(StoredFeatures(tmp_path, target, (1, 3))(samples), source(samples))


def test_two_writers_of_one_directory_overwrite_nothing(target: CausalLM, samples: list[Sample], tmp_path: Path) -> None:
    """Both begin with the same number, and write in turn; what one has placed stays as it is."""
    source = OnlineFeatures(target, (1, 3))
    seen = dict[Path, bytes]()
    writers = [Writer(tmp_path, manifest_of(target, source.layers), 0) for _ in range(2)]
    for i, sample in enumerate(samples):
        writers[i % 2].add(sample, source.compute(sample))
        assert {path: path.read_bytes() for path in seen} == seen
        seen = {path: path.read_bytes() for path in tmp_path.glob("*.safetensors")}
        assert len(seen) == i + 1
    for writer in writers:
        writer.flush()
    assert not list(tmp_path.glob(".*"))
    assert contents(tmp_path).keys() == {sample.id for sample in samples}
    same(StoredFeatures(tmp_path, target, (1, 3))(samples), source(samples))


def data_offset(path: Path) -> int:
    """Where a safetensors file's data begins."""
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path, place: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[data_offset(path) + 1000 if place < 0 else place] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("damage", [shorten, halve, empty, flip])
def test_a_damaged_file_is_found_and_made_again(
    target: CausalLM, samples: list[Sample], stored_features: Path, copied: Path, damage: Callable[[Path], None]
) -> None:
    victim = sorted(copied.glob("*.safetensors"))[1]
    inside = len(list(artifact.locations(victim)))
    damage(victim)
    with pytest.raises(ValueError, match=victim.name) as error:
        StoredFeatures(copied, target, (1, 3))(samples)
    assert "extract again with resume=true" in line(error)
    source = OnlineFeatures(target, (1, 3))
    assert extract(source, samples, Writer(copied, manifest_of(target, source.layers), 20_000), nothing) == inside
    equal_contents(copied, stored_features)


def tried(get: Callable[[], Any]) -> tuple[Any, str]:
    """The result, or the one line that is said instead."""
    try:
        return get(), ""
    except ValueError as error:
        message = str(error)
    return None, message if len(message.splitlines()) == 1 else f"more than one line: {message}"


def test_no_flipped_byte_anywhere_is_read_as_if_it_were_whole(target: CausalLM, tmp_path: Path) -> None:
    """Also in the header, where it may change a name, a number, a hash or the grammar."""
    samples = samples_of(3, longest=12)
    source = OnlineFeatures(target, (3,))
    write(source, samples, tmp_path, 1 << 20)
    (path,) = tmp_path.glob("*.safetensors")
    good = path.read_bytes()
    want = source(samples)
    rng = np.random.default_rng(0)
    start = data_offset(path)
    places = [*rng.choice(start, 150, replace=False), *rng.integers(start, len(good), 50)]
    for place in map(int, places):
        for bit in (0, 4):
            bad = bytearray(good)
            bad[place] ^= 1 << bit
            path.write_bytes(bytes(bad))
            got, message = tried(lambda: StoredFeatures(tmp_path, target, (3,))(samples))
            assert message.startswith(str(tmp_path)) if message else same(got, want) is None, f"byte {place}: {message}"
            inside, message = tried(lambda: [artifact.read(where) for where, _ in artifact.locations(path)])
            assert message.startswith(str(path)) if message else len(inside) == 3, f"byte {place}: {message}"
    for place in map(int, rng.choice(len(good), 12, replace=False)):
        path.write_bytes(good)
        flip(path, place)
        extract(source, samples, Writer(tmp_path, manifest_of(target, source.layers)), nothing)
        same(StoredFeatures(tmp_path, target, (3,))(samples), want)
        for rest in tmp_path.glob("*.safetensors"):
            rest.unlink()


def test_another_target_is_refused(target: CausalLM, samples: list[Sample], stored_features: Path, tmp_path: Path) -> None:
    """Of other widths, by name and both numbers; with other weights, because the recorded tokens do not follow."""
    narrow = AutoConfig.for_model(
        "llama", vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4
    )
    AutoModelForCausalLM.from_config(narrow).save_pretrained(tmp_path / "narrow")
    with pytest.raises(ValueError, match=rf"hidden_size is 64 \(of tiny-llama\), and {tmp_path / 'narrow'} has 32"):
        StoredFeatures(stored_features, CausalLM(tmp_path / "narrow", "float32", "cpu"), (1, 3))
    shallow = hub.load_config(hub.resolve("tiny"))
    shallow.num_hidden_layers = 3
    AutoModelForCausalLM.from_config(shallow).save_pretrained(tmp_path / "shallow")
    with pytest.raises(ValueError, match=rf"num_layers is 4 \(of tiny-llama\), and {tmp_path / 'shallow'} has 3"):
        StoredFeatures(stored_features, CausalLM(tmp_path / "shallow", "float32", "cpu"), (1,))
    other = CausalLM(hub.tiny("llama", seed=1), "float32", "cpu")
    with pytest.raises(ValueError, match="they are of another target") as error:
        StoredFeatures(stored_features, other, (1, 3))
    assert other.name in line(error)
    source = OnlineFeatures(other, (1, 3))
    with pytest.raises(ValueError, match=r"manifest.json: target is 'tiny-llama', not .*; use another out_dir="):
        Writer(stored_features, manifest_of(other, source.layers))


def test_artifacts_of_another_dtype_are_refused(
    target: CausalLM, samples: list[Sample], stored_features: Path, tmp_path: Path
) -> None:
    """Either way round; both are named, and the setting that mends it."""
    low = CausalLM("tiny-llama", "bfloat16", "cpu")
    write(OnlineFeatures(low, (1, 3)), samples, tmp_path / "low")
    for directory, model, stored_dtype, runs_in in (
        (tmp_path / "low", target, "bfloat16", "float32"),
        (stored_features, low, "float32", "bfloat16"),
    ):
        with pytest.raises(ValueError, match=f"made in {stored_dtype}, and tiny-llama runs in {runs_in}") as error:
            StoredFeatures(directory, model, (1, 3))
        assert f"model.dtype={stored_dtype}" in line(error)


def test_files_without_a_manifest_of_another_target_are_refused(
    target: CausalLM, samples: list[Sample], tmp_path: Path
) -> None:
    """They hold no argmax to compare with; a forward of the target tells."""
    write(OnlineFeatures(target, (1, 3)), samples, tmp_path, plain=True)
    (tmp_path / "manifest.json").unlink()
    other = CausalLM(hub.tiny("llama", seed=1), "float32", "cpu")
    with pytest.raises(ValueError, match="they are of another target"):
        StoredFeatures(tmp_path, other, (1, 3), (1, 3, 4))


def test_a_directory_is_of_one_set_of_layers(target: CausalLM, copied: Path) -> None:
    with pytest.raises(ValueError, match=r"layer_ids is \[1, 3, 4\], not \[2, 4\]; use another out_dir="):
        Writer(copied, manifest_of(target, (2, 4)))
    for broken in ("{", '{"format": "x", "version": 1}', '{"format": "specdec-hidden-states", "version": 2}', "[]", ""):
        (copied / "manifest.json").write_text(broken)
        with pytest.raises(ValueError, match=r"manifest\.json") as error:
            StoredFeatures(copied, target, (1, 3))
        assert line(error)


def test_layer_ids_that_contradict_the_manifest_are_refused(target: CausalLM, stored_features: Path) -> None:
    """Those that say the same, in any order, are no contradiction."""
    for layer_ids in ([1, 4], [1, 2, 3, 4], [0], []):
        with pytest.raises(ValueError, match=r"the manifest of .* says \[1, 3, 4\]; leave it out") as error:
            StoredFeatures(stored_features, target, (1, 3), layer_ids)
        assert f"features.layer_ids={layer_ids}" in line(error)
    StoredFeatures(stored_features, target, (1, 3), [4, 3, 1, 1])


@pytest.mark.parametrize("manifest", [True, False], ids=["manifest", "no manifest"])
@pytest.mark.parametrize("layer_ids", [["a"], [1, "a"], [1, None], "134", 3], ids=str)
def test_layer_ids_that_are_no_numbers_are_refused(target: CausalLM, copied: Path, manifest: bool, layer_ids: Any) -> None:
    if not manifest:
        (copied / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"layer.ids") as error:
        StoredFeatures(copied, target, (1, 3), layer_ids)
    assert line(error)
    if not isinstance(layer_ids, int):
        with pytest.raises(ValueError, match=r"layer ids .* must be numbers"):
            OnlineFeatures(target, layer_ids)


def test_what_is_not_stored_is_said(target: CausalLM, samples: list[Sample], stored_features: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"layer 2 is wanted, and layers \[1, 3, 4\] are stored"):
        StoredFeatures(stored_features, target, (1, 2))
    with pytest.raises(ValueError, match=r"no hidden states of sample s0 \(\d+ tokens\); extract them with the same data"):
        StoredFeatures(stored_features, target, (1, 3))([samples[1], samples_of(1, seed=9)[0]])
    with pytest.raises(ValueError, match="no such directory"):
        StoredFeatures(tmp_path / "gone", target, ())
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"no manifest.json, so say which layers its files hold: features.layer_ids="):
        StoredFeatures(tmp_path / "none", target, ())
    with pytest.raises(ValueError, match="no hidden states in there"):
        StoredFeatures(tmp_path / "none", target, (), (4,))


def test_a_disk_that_is_too_small_is_said_before(
    target: CausalLM, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(ValueError, match=r"the hidden states of 12 samples take 0\.00 GiB, and 0\.00 GiB are free") as error:
        write(OnlineFeatures(target, (1, 3)), samples, tmp_path)
    assert "lower data.limit or data.max_length" in line(error)
    assert not list(tmp_path.glob("*.safetensors"))
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("plain", [False, True])
def test_a_disk_that_fills_up_leaves_whole_files_only(
    target: CausalLM, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: bool
) -> None:
    real = artifact.save_file
    source = OnlineFeatures(target, (1, 3))
    count = 0

    def full(tensors: Any, path: Path, metadata: Any = None) -> None:
        nonlocal count
        count += 1
        if count > 2:
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        real(tensors, path, metadata)

    monkeypatch.setattr(artifact, "save_file", full)
    with pytest.raises(OSError, match=r"could not be written \(.*No space left on device.*\); is the disk full\?") as error:
        write(source, samples, tmp_path, plain=plain)
    assert str(tmp_path) in line(error)
    assert not list(tmp_path.glob(".*"))
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == 2
    before = [path.read_bytes() for path in files]
    monkeypatch.setattr(artifact, "save_file", real)
    stored = StoredFeatures(write(source, samples, tmp_path, plain=plain), target, (1, 3))
    assert [path.read_bytes() for path in files] == before
    same(stored(samples), source(samples))


# -------------------------------------------------------------------------------------- vLLM's files


@pytest.mark.parametrize("lacking", [0, 1])
def test_files_as_vllm_writes_them_are_read(target: CausalLM, samples: list[Sample], tmp_path: Path, lacking: int) -> None:
    """A file per request, no manifest. What was recorded while decoding lacks the last token, which was never processed."""
    source = OnlineFeatures(target, (1, 3))
    for i, sample in enumerate(samples):
        keep = len(sample.token_n) - lacking
        states = source.compute(sample).hidden_nTD[:keep].contiguous()
        save_file(
            {"hidden_states": states, "token_ids": torch.from_numpy(sample.token_n[:keep])}, tmp_path / f"r{i}.safetensors"
        )
    stored = StoredFeatures(tmp_path, target, (3, 1), layer_ids=[1, 3, 4])
    got = stored(samples[::-1])
    want = source(samples[::-1])
    ends = torch.from_numpy(np.cumsum(want.length_B) - 1)
    if lacking:
        assert (got.hidden_NTD[ends] == 0).all()
        want.hidden_NTD[ends] = 0  # nothing is drafted or judged there
    same(got, want)
    same_less = StoredFeatures(tmp_path, target, (3,), layer_ids=[1, 3, 4])(samples)
    assert same_less.hidden_NTD.shape[1] == 2
    with pytest.raises(ValueError, match=r"\[tokens, 2 layers, 64\] is expected") as error:
        StoredFeatures(tmp_path, target, (3,), layer_ids=[3, 4])(samples)
    assert line(error)


def test_files_of_32_bit_tokens_are_read(target: CausalLM, samples: list[Sample], tmp_path: Path) -> None:
    source = OnlineFeatures(target, ())
    for sample in samples:
        tensors = {"hidden_states": source.compute(sample).hidden_nTD, "token_ids": torch.from_numpy(sample.token_n).int()}
        save_file(tensors, tmp_path / f"{sample.id}.safetensors")
    same(StoredFeatures(tmp_path, target, (), [4])(samples), source(samples))


def test_files_that_are_something_else_are_refused(target: CausalLM, tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors: cut short or not hidden states"):
        StoredFeatures(tmp_path, target, (), [4])
    save_file({"hidden_states": torch.zeros(3, 1, 64), "token_ids": torch.zeros(4).long()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors: 3 states for 4 tokens"):
        StoredFeatures(tmp_path, target, (), [4])
    for tokens in (torch.tensor([1, 2, 320]), torch.zeros(0).long()):
        save_file({"hidden_states": torch.zeros(len(tokens), 1, 64), "token_ids": tokens}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=r"model\.safetensors: its token_ids are none of tiny-llama \(0\.\.319\)"):
            StoredFeatures(tmp_path, target, (), [4])


@pytest.mark.parametrize("resume", [False, True])
def test_files_are_written_as_vllm_writes_them(target: CausalLM, tmp_path: Path, resume: bool) -> None:
    """One per sample, named after it; names that come to the same on disk stay apart, and resuming knows them."""
    samples = samples_of(8)
    names = ["a", "a/1", "a_1", "a 1", "hidden-x", "ü", "../b", "n" * 300]
    samples = [Sample(name, sample.token_n, sample.mask_n) for name, sample in zip(names, samples, strict=True)]
    source = OnlineFeatures(target, (2,))
    if resume:
        write(source, samples[:6], tmp_path / "out", plain=True)
    write(source, samples, tmp_path / "out", plain=True)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) == 8
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert {"a.safetensors", "a_1.safetensors"} <= {path.name for path in files}
    for path in files:
        tensors = load_file(path)
        assert set(tensors) == {"hidden_states", "token_ids"}
        assert tensors["hidden_states"].shape == (len(tensors["token_ids"]), 2, 64)
        with safe_open(path, framework="pt") as file:
            assert not file.metadata()
    same(StoredFeatures(tmp_path / "out", target, (2,))(samples), source(samples))
    (tmp_path / "out" / "manifest.json").unlink()
    same(StoredFeatures(tmp_path / "out", target, (2,), [2, 4])(samples), source(samples))


# ------------------------------------------------------------------------------------------- train/extract.py


call = partial(cli.call, folder=TRAIN)


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    rows = [{"id": f"c{i}", "messages": [user(f"What is {i}?"), {"role": "assistant", "content": f"{i}."}]} for i in range(6)]
    return jsonl(tmp_path / "texts.jsonl", rows)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_extract_writes_what_an_online_target_would_give(texts: Path, tmp_path: Path) -> None:
    again = ("model=tiny", "model.dtype=bfloat16", "data=jsonl", f"data.path={texts}", "out_dir=out")
    done = call("extract", *again, "layer_ids=[1,3]", cwd=tmp_path)
    assert done.code == 0, done.err
    assert {path.name for path in tmp_path.iterdir()} == {"texts.jsonl", "out"}
    names = {"run.json", "config.yaml", "manifest.json", "hidden-00000.safetensors"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    model = CausalLM("tiny-llama", "bfloat16", "cpu")
    samples = data.load(texts, model.tokenizer, model.vocab_size).samples
    same(StoredFeatures(tmp_path / "out", model, (1, 3))(samples), OnlineFeatures(model, (1, 3))(samples))
    tokens = sum(len(sample.token_n) for sample in samples)
    per_token = 2 * 64 * 3 + 21
    assert f"6 samples, {tokens} tokens, layers [1, 3, 4]" in done.out
    assert f"{per_token} bytes per token" in done.out
    assert "6 samples computed, 0 were there" in done.out

    refused = call("extract", *again, "layer_ids=[1,3]", cwd=tmp_path)
    assert "already holds a run; give another out_dir=, or resume=true" in refused.error
    done = call("extract", *again, "layer_ids=[1,3]", "resume=true", cwd=tmp_path)
    assert "0 samples computed, 6 were there" in done.out
    refused = call("extract", *again, "layer_ids=[2]", "resume=true", cwd=tmp_path)
    assert "resume=true, but layer_ids was [1, 3, 4] and is [2, 4]" in refused.error
    refused = call("extract", *again, "layer_ids=[1,3]", "resume=true", "data.limit=3", cwd=tmp_path)
    assert "resume=true, but data was" in refused.error


def test_extract_as_vllm_does(texts: Path, tmp_path: Path) -> None:
    arguments = ("model=tiny", "model.dtype=float32", "data=jsonl", f"data.path={texts}", "layer_ids=[1]", "layout=vllm")
    done = call("extract", *arguments, "out_dir=out", cwd=tmp_path)
    assert done.code == 0, done.err
    assert {path.name for path in (tmp_path / "out").glob("*.safetensors")} == {f"c{i}.safetensors" for i in range(6)}
    model = CausalLM("tiny-llama", "float32", "cpu")
    samples = data.load(texts, model.tokenizer, model.vocab_size).samples
    same(StoredFeatures(tmp_path / "out", model, (1,))(samples), OnlineFeatures(model, (1,))(samples))
    done = call("extract", *arguments, "out_dir=out", "resume=true", cwd=tmp_path)
    assert "0 samples computed, 6 were there" in done.out


def test_a_dry_run_says_the_bytes_and_writes_nothing(texts: Path, tmp_path: Path) -> None:
    done = call("extract", "model=tiny", "data=jsonl", f"data.path={texts}", "dry_run=true", "out_dir=out", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "layers [" in done.out
    assert re.search(r"\d+\.\d\d GiB \(\d+ bytes per token\)", done.out)
    assert [path.name for path in tmp_path.iterdir()] == ["texts.jsonl"]


def test_extract_says_what_is_wrong_in_a_line(texts: Path, tmp_path: Path) -> None:
    good = ("model=tiny", "data=jsonl", f"data.path={texts}", "out_dir=out")
    cases = {
        ("layers_ids=[1]",): "unknown key 'layers_ids'; did you mean 'layer_ids'?",
        ("layout=shard",): "layout='shard': input should be 'shards' or 'vllm'",
        ("layer_ids=[a]",): "layer_ids=['a'] must be a list of numbers, such as [2,15,27], or null",
        ("layer_ids=[7]",): "hidden layer 7 is outside 0..4, the layers of tiny-llama",
        ("shard_mb=many",): "shard_mb='many' must be the size of a file",
        ("resume=true",): "resume=true, but out_dir=out holds no run",
        ("data.path=gone.jsonl",): "data.path=gone.jsonl: no such file",
    }
    for arguments, words in cases.items():
        assert words in call("extract", *good, *arguments, cwd=tmp_path).error
    assert not (tmp_path / "out").exists()


def bytes_in(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def weights() -> bytes:
    """A valid file of somebody's model."""
    return save({"weight": torch.arange(6.0)})


OTHER_FILES = {
    "model.safetensors": weights(),
    "hidden-00000.safetensors": weights(),
    "c0.safetensors": b"garbage",
    "config.yaml": b"mine: true\n",
    "manifest.json": b"{}",
}


@pytest.mark.parametrize(
    ("name", "content", "layout"),
    all_pairs(
        list(OTHER_FILES),
        [pytest.param(None, id="its-own"), pytest.param(b"garbage", id="garbage"), pytest.param(b"", id="empty")],
        ["shards", "vllm"],
    ),
)
def test_extract_leaves_the_files_of_others_alone(
    texts: Path, tmp_path: Path, name: str, content: bytes | None, layout: str
) -> None:
    """A directory that holds what a run would write, or weights, is refused as it is."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_bytes(b"mine")
    arguments = ("model=tiny", "data=jsonl", f"data.path={texts}", "layer_ids=[1]", f"layout={layout}", "out_dir=out")
    (tmp_path / "out" / name).write_bytes(OTHER_FILES[name] if content is None else content)
    before = bytes_in(tmp_path / "out")
    assert f"out_dir=out holds {name}, which is of no run of ours" in call("extract", *arguments, cwd=tmp_path).error
    assert "holds no run" in call("extract", *arguments, "resume=true", cwd=tmp_path).error
    assert bytes_in(tmp_path / "out") == before


@pytest.mark.parametrize("layout", ["shards", "vllm"])
def test_resumed_extraction_leaves_the_files_of_others_alone(texts: Path, tmp_path: Path, layout: str) -> None:
    """Put there after the run: weights and garbage are named and stay; notes disturb nobody, whatever they are called."""
    out = tmp_path / "out"
    out.mkdir()
    (out / ".hidden-note").write_bytes(b"mine")
    arguments = ("model=tiny", "data=jsonl", f"data.path={texts}", "layer_ids=[1]", f"layout={layout}", "out_dir=out")
    done = call("extract", *arguments, cwd=tmp_path)
    assert done.code == 0, done.err
    (out / "hidden-note").write_bytes(b"mine too")
    before = bytes_in(out)
    assert call("extract", *arguments, "resume=true", cwd=tmp_path).code == 0
    config_bytes = bytes_in(out)["config.yaml"]  # says resume: true now
    assert bytes_in(out) == before | {"config.yaml": config_bytes}
    assert (out / ".hidden-note").read_bytes() == b"mine"
    for content in (weights(), b"garbage", b""):
        (out / "model.safetensors").write_bytes(content)
        before = bytes_in(out)
        done = call("extract", *arguments, "resume=true", cwd=tmp_path)
        assert done.code == 1
        (message,) = [text for text in done.err.splitlines() if text.startswith("error: ")]
        assert "model.safetensors holds no hidden states; use a directory of its own" in message
        assert "Traceback" not in done.err
        assert bytes_in(out) == before


def test_extract_cuts_what_the_target_cannot_see(tmp_path: Path) -> None:
    """Without data.max_length too."""
    ids = np.random.default_rng(0).integers(0, 256, 4200).tolist()
    file = jsonl(tmp_path / "long.jsonl", [{"input_ids": ids, "loss_mask": [int(i > 4000) for i in range(4200)]}])
    arguments = ("model=tiny", "data=jsonl", f"data.path={file}", "layer_ids=[1]", "out_dir=out", "dry_run=true")
    for length, tokens in (("null", 4096), (5000, 4096), (4090, 4090)):
        done = call("extract", *arguments, f"data.max_length={length}", cwd=tmp_path)
        assert done.code == 0, done.err
        assert f"1 samples, {tokens} tokens" in done.out


def test_extract_that_is_killed_goes_on(tmp_path: Path) -> None:
    """A process of its own, ended by SIGKILL while it writes files; then resumed."""
    rng = np.random.default_rng(0)
    rows = []
    for i in range(250):
        ids = rng.integers(0, 256, int(rng.integers(60, 160))).tolist()
        rows.append({"id": f"t{i}", "input_ids": ids, "loss_mask": [int(n > 50) for n in range(len(ids))]})
    file = jsonl(tmp_path / "tokens.jsonl", rows)
    arguments = ["model=tiny", "data=jsonl", f"data.path={file}", "layer_ids=[1,3]", "shard_mb=0"]
    process = fork(TRAIN / "extract.py", *arguments, "out_dir=killed", cwd=tmp_path)
    deadline = time.monotonic() + 90
    while len(list((tmp_path / "killed").glob("hidden-*.safetensors"))) < 5:
        assert process.poll() is None, ended(process).err
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    assert ended(process).code == -signal.SIGKILL
    there = {path: path.read_bytes() for path in (tmp_path / "killed").glob("hidden-*.safetensors")}
    assert 5 <= len(there) < 250
    done = call("extract", *arguments, "out_dir=killed", "resume=true", cwd=tmp_path)
    assert f"{250 - len(there)} samples computed, {len(there)} were there" in done.out
    assert all(path.read_bytes() == was for path, was in there.items())
    assert call("extract", *arguments, "out_dir=whole", cwd=tmp_path).code == 0
    equal_contents(tmp_path / "killed", tmp_path / "whole")
    names = {path.name for path in (tmp_path / "whole").iterdir()}
    assert {path.name for path in (tmp_path / "killed").iterdir()} == names


# ------------------------------------------------------------------------------------------- train/prepare.py

PROMPTS = [
    {"id": "one", "turns": ["Hello?"]},
    {"id": "two", "category": "chat", "turns": ["Hello?", "And again, hello?"]},
    {"id": "three", "messages": [user("What?"), {"role": "assistant", "content": "This is dropped."}, user("Why?")]},
    {"id": "four", "conversations": [{"from": "human", "value": "How?"}]},
    {"turns": ["Who?"]},
]
SETTINGS = (
    "model=tiny", "model.dtype=bfloat16", "answers.max_tokens=10", "prompts=prompts.jsonl", "out=out.jsonl",
    "max_batch_size=3",
)  # fmt: skip


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("prepared")
    jsonl(directory / "prompts.jsonl", PROMPTS)
    done = call("prepare", *SETTINGS, cwd=directory)
    assert done.code == 0, done.err
    assert "5 conversations" in done.out
    return directory


def test_prepared_rows_supervise_exactly_the_generated_tokens(prepared: Path) -> None:
    model = CausalLM("tiny-llama", "bfloat16", "cpu")
    _, *rows = lines_of(prepared / "out.jsonl")
    turns = {"one": 1, "two": 2, "three": 2, "four": 1, "line 5": 1}
    assert {row["id"]: len(row["messages"]) // 2 for row in rows} == turns
    for row in rows:
        users = row["messages"][::2]
        answers = row["messages"][1::2]
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"] * len(users)
        ids = row["input_ids"]
        mask = row["loss_mask"]
        assert len(ids) == len(mask)
        # the last answer: what follows the prompt that evaluation would make of the conversation before it
        prompt = model.tokenizer.apply_chat_template(
            row["messages"][:-1], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        assert ids[: len(prompt)] == prompt
        last = ids[len(prompt) :]
        assert mask[len(prompt) :] == [1] * len(last)
        assert model.tokenizer.decode(last, skip_special_tokens=True) == answers[-1]["content"]
        assert len(last) == 10 or (row["finish_reason"] == "stop" and last[-1] in model.eos_token_ids)
        if len(users) == 1:
            assert not any(mask[: len(prompt)])
    (three,) = [row for row in rows if row["id"] == "three"]
    assert [message["content"] for message in three["messages"][::2]] == ["What?", "Why?"]
    assert "This is dropped." not in json.dumps(three)


def test_greedy_answers_are_what_the_target_says(prepared: Path) -> None:
    """Every supervised token is the target's own choice, by a forward over the whole row."""
    model = CausalLM("tiny-llama", "bfloat16", "cpu")
    greedy = [row for row in lines_of(prepared / "out.jsonl")[1:] if row["temperature"] == 0.0]
    assert {row["id"] for row in greedy} == {"one", "three", "line 5"}
    for row in greedy:
        sample = Sample(row["id"], np.array(row["input_ids"]), np.array(row["loss_mask"], dtype=bool))
        chosen = OnlineFeatures(model, ()).compute(sample).argmax_n
        assert chosen is not None
        assert sample.token_n[1:][sample.mask_n[1:]].tolist() == chosen[:-1][torch.from_numpy(sample.mask_n[1:])].tolist()


def test_the_header_says_how_it_was_made(prepared: Path) -> None:
    header = lines_of(prepared / "out.jsonl")[0]["header"]
    assert header["target"] == "tiny-llama"
    assert header["dtype"] == "bfloat16"
    assert header["prompts"]["file"] == "prompts.jsonl"
    assert header["prompts"]["count"] == 5
    assert header["answers"] == {"max_tokens": 10, "temperatures": [0.0, 0.7], "top_p": 1.0, "top_k": 0}
    assert header["synthesize"] is None
    assert header["seed"] == 0
    assert len(header["chat_template_sha256"]) == 64


def test_what_was_prepared_can_be_loaded(prepared: Path) -> None:
    model = CausalLM("tiny-llama", "bfloat16", "cpu")
    loaded = data.load(prepared / "out.jsonl", model.tokenizer, model.vocab_size)
    rows = lines_of(prepared / "out.jsonl")[1:]
    assert not loaded.skipped
    assert loaded.header is not None
    assert [s.token_n.tolist() for s in loaded.samples] == [row["input_ids"] for row in rows]
    assert [s.mask_n.astype(int).tolist() for s in loaded.samples] == [row["loss_mask"] for row in rows]


def test_rejections_are_where_the_target_overruled_a_draft() -> None:
    """Step by step: all accepted; the second of three rejected; nothing drafted; a stop inside an accepted draft; the first."""
    stats = RequestStats()
    for drafted, accepted, emitted in ((2, 2, 3), (3, 1, 2), (0, 0, 1), (3, 2, 2), (1, 0, 1)):
        stats.add(drafted, accepted, emitted, 0.0, 0.0, 1)
    assert stats.rejections == [1 + 3 + 1, 1 + 3 + 2 + 1 + 2]
    tree = RequestStats()  # a root with two children, one of which goes on: the path ends above its height, then at a leaf
    tree.add(3, 1, 2, 0.0, 0.0, 1, draft_token_ids=[7, 8, 9], draft_parents=[-1, -1, 0], accepted_nodes=[0])
    tree.add(3, 2, 3, 0.0, 0.0, 1, draft_token_ids=[7, 8, 9], draft_parents=[-1, -1, 0], accepted_nodes=[0, 2])
    assert tree.rejections == [2]


def test_a_drafter_that_prepares_leaves_marks(tmp_path: Path) -> None:
    """The greedy answers are those without it; every mark is a token that its draft had wrong, and no other token is."""
    target = CausalLM("tiny-llama", "float32", "cpu")
    drafter = Eagle3.init_checkpoint(target, {}, Init())
    (tmp_path / "drafter").mkdir()
    native.save(tmp_path / "drafter", drafter, {}, "")
    jsonl(tmp_path / "prompts.jsonl", PROMPTS)
    settings = ("model=tiny", "answers.max_tokens=12", "answers.temperatures=[0.0]", "prompts=prompts.jsonl")
    assert call("prepare", *settings, "out=plain.jsonl", cwd=tmp_path).code == 0
    done = call("prepare", *settings, "drafter=drafter", "num_speculative_tokens=2", "out=marked.jsonl", cwd=tmp_path)
    assert done.code == 0, done.err
    header, *rows = lines_of(tmp_path / "marked.jsonl")
    assert header["header"]["drafter"] == ["eagle3", "drafter", 2]
    masks = {row["id"]: row.pop("rejected_mask") for row in rows}
    by_id = {row["id"]: row for row in rows}
    assert by_id == {row["id"]: row for row in lines_of(tmp_path / "plain.jsonl")[1:]}
    loaded_data = data.load(tmp_path / "marked.jsonl", target.tokenizer, target.vocab_size)
    assert not loaded_data.unused
    marked = 0
    for sample in loaded_data.samples:
        assert sample.rejected_n is not None
        assert sample.rejected_n.astype(int).tolist() == masks[sample.id]
        assert not (sample.rejected_n & ~sample.mask_n).any()
        if len(by_id[sample.id]["messages"]) > 2:
            continue
        first = int(sample.mask_n.argmax())
        place = first + 1  # the first answer token is the prefill's
        proposer = method.build("eagle3", target, model=str(tmp_path / "drafter"), num_speculative_tokens=2)
        engine = Engine(target, proposer, rejection.build("standard"), 1)
        request = Request("0", sample.token_n[:first].tolist(), SamplingParams(temperature=0, max_tokens=12))
        list(engine.run([request]))
        wrong = set()
        for ids, emitted in zip(request.stats.draft_token_ids, request.stats.emitted, strict=True):
            pairs = list(zip(ids, sample.token_n[place:].tolist(), strict=False))
            first_wrong = next((i for i, (drafted, token) in enumerate(pairs) if drafted != token), None)
            if first_wrong is not None:
                wrong.add(place + first_wrong)
            place += emitted
        assert set(np.flatnonzero(sample.rejected_n)) == wrong
        marked += len(wrong)
    assert marked > 3


@pytest.mark.parametrize("keep", [0.0, 0.02, 0.5, 0.8, 1.0])
def test_preparing_goes_on_after_it_was_cut_off(prepared: Path, tmp_path: Path, keep: float) -> None:
    """In the middle of a line, of the header, at the very beginning, or at the end."""
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    out = tmp_path / "out.jsonl"
    good = (prepared / "out.jsonl").read_bytes()
    out.write_bytes(good[: int(len(good) * keep)])
    done = call("prepare", *SETTINGS, "resume=true", cwd=tmp_path)
    assert done.code == 0, done.err
    got = lines_of(out)
    want = lines_of(prepared / "out.jsonl")
    assert got[0] == want[0]
    assert {row["id"]: row for row in got[1:]} == {row["id"]: row for row in want[1:]}
    assert len(got) == len(want)


def test_prepare_says_what_is_wrong_in_a_line(prepared: Path, tmp_path: Path) -> None:
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    before = (tmp_path / "out.jsonl").read_bytes()
    jsonl(tmp_path / "bad.jsonl", [{"text": "x"}, 3])
    cases = {
        (): "out=out.jsonl exists; give another name, or resume=true",
        ("resume=true", "seed=1"): "out.jsonl was begun with other settings",
        ("resume=true", "limit=2"): "out.jsonl was begun with other settings",
        ("out=new.jsonl", "prompts=gone.jsonl"): "prompts=gone.jsonl: no such file",
        ("out=new.jsonl", "answers.temperatures=[]"): "answers.temperatures=[] must be a list of temperatures",
        ("out=new.jsonl", "temperature=1"): "unknown key 'temperature'; did you mean",
        ("out=new.jsonl", "prompts=bad.jsonl"): "no row with user turns",
    }
    for arguments, words in cases.items():
        assert words in call("prepare", *SETTINGS, *arguments, cwd=tmp_path).err.splitlines()[-1]
    assert (tmp_path / "out.jsonl").read_bytes() == before
    assert not (tmp_path / "new.jsonl").exists()


def test_prompts_that_cannot_be_answered_are_left_out(tmp_path: Path) -> None:
    """Texts for turns, turns that are no text, no user turn; ids that occur twice are made different."""
    bad = [{"turns": "Hello?"}, {"turns": [1]}, {"turns": [""]}, {"messages": [{"role": "assistant", "content": "x"}]}, 7]
    good = [{"id": "a", "turns": ["Hello?"]}, {"id": "a", "turns": ["Who?"]}]
    jsonl(tmp_path / "prompts.jsonl", [*bad, *good])
    done = call("prepare", *SETTINGS, cwd=tmp_path)
    assert done.code == 0, done.err
    rows = lines_of(tmp_path / "out.jsonl")[1:]
    assert [row["messages"][0]["content"] for row in rows] == ["Hello?", "Who?"]
    assert len({row["id"] for row in rows}) == 2
    assert "5 rows" in done.out
    assert call("prepare", *SETTINGS, "resume=true", cwd=tmp_path).code == 0
    assert lines_of(tmp_path / "out.jsonl")[1:] == rows


def test_prompts_are_read_as_tasks_are(tmp_path: Path) -> None:
    rows = [
        {"prompt": "Hello?", "system": "Be brief."}, {"question": "Who?"}, {"instruction": "Add.", "input": "1 2"},
        {"instruction": "Add.", "input": "1 2", "output": None}, {"instruction": "Sing.", "output": "La."},
    ]  # fmt: skip
    jsonl(tmp_path / "prompts.jsonl", rows)
    done = call("prepare", *SETTINGS, cwd=tmp_path)
    assert done.code == 0, done.err
    turns = [[each["content"] for each in row["messages"][:-1]] for row in lines_of(tmp_path / "out.jsonl")[1:]]
    assert sorted(turns) == sorted(
        [["Be brief.", "Hello?"], ["Who?"], ["Add.\n\nInput:\n1 2"], ["Add.\n\nInput:\n1 2"], ["Sing."]]
    )
    assert "left out" not in done.out


def test_a_leading_system_message_is_kept(tmp_path: Path) -> None:
    """It is part of the prompt of every turn, and of the row's messages; it is never supervised."""
    system = {"role": "system", "content": "Be brief."}
    rows = [
        {"id": "with", "messages": [system, user("Hello?"), {"role": "assistant", "content": "Dropped."}, user("Who?")]},
        {"id": "shared", "conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Hello?"}]},
        {"id": "without", "messages": [user("Hello?")]},
    ]
    jsonl(tmp_path / "prompts.jsonl", rows)
    done = call("prepare", *SETTINGS, "answers.temperatures=[0.0]", cwd=tmp_path)
    assert done.code == 0, done.err
    model = CausalLM("tiny-llama", "bfloat16", "cpu")
    prepared_rows = {row["id"]: row for row in lines_of(tmp_path / "out.jsonl")[1:]}
    assert prepared_rows.keys() == {"with", "shared", "without"}
    roles = {name: [message["role"] for message in row["messages"]] for name, row in prepared_rows.items()}
    assert roles == {
        "with": ["system", "user", "assistant", "user", "assistant"],
        "shared": ["system", "user", "assistant"],
        "without": ["user", "assistant"],
    }
    for name, row in prepared_rows.items():
        turn = row["messages"][:-1]
        prompt = model.tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=True, return_dict=False)
        assert row["input_ids"][: len(prompt)] == prompt, name
        assert all(row["loss_mask"][len(prompt) :])
        first = model.tokenizer.apply_chat_template(
            turn[: roles[name].index("user") + 1], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        assert not any(row["loss_mask"][: len(first)])
        assert (turn[0] == system) == (name != "without")
        assert ("Be brief." in model.tokenizer.decode(row["input_ids"])) == (name != "without")


def test_rows_whose_messages_would_be_lost_are_left_out(tmp_path: Path) -> None:
    """Tools, and a system message in the middle; the reason is said."""
    system = {"role": "system", "content": "Be brief."}
    tool = {"role": "tool", "content": "42"}
    rows = [
        {"id": "tool", "messages": [user("Hello?"), {"role": "assistant", "content": "x"}, tool, user("And?")]},
        {"id": "tool last", "messages": [system, user("Hello?"), tool]},
        {"id": "system later", "messages": [user("Hello?"), system, user("Who?")]},
        {"id": "good", "messages": [user("Hello?")]},
    ]
    jsonl(tmp_path / "prompts.jsonl", rows)
    done = call("prepare", *SETTINGS, cwd=tmp_path)
    assert done.code == 0, done.err
    assert [row["id"] for row in lines_of(tmp_path / "out.jsonl")[1:]] == ["good"]
    assert "3 rows of prompts.jsonl were left out" in done.out
    assert "role 'tool'" in done.out
    assert "role 'system'" in done.out


SCHEMA = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def tooled(tmp_path: Path) -> Path:
    """The tiny model with a chat template that shows tools and calls, and no system message."""
    directory = tmp_path / "model"
    shutil.copytree(hub.tiny(), directory)
    (directory / "chat_template.jinja").write_text(
        "{% if tools %}<s>tools\n{{ tools | tojson }}</s>\n{% endif %}{% for m in messages if m.role != 'system' %}"
        "<s>{{ m.role }}\n{{ m.content or '' }}{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
        "</s>\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
    )
    return directory


def test_the_tools_of_prompts_reach_the_template(tooled: Path, tmp_path: Path) -> None:
    """In every turn, whether they are given as a list or as JSON text; the row keeps them."""
    two = [user("Hello?"), {"role": "assistant", "content": "Dropped."}, user("Warm?")]
    rows = [
        {"id": "list", "messages": two, "tools": [SCHEMA]},
        {"id": "text", "turns": ["Hello?", "Warm?"], "tools": json.dumps([SCHEMA["function"]])},
        {"id": "none", "turns": ["Hello?"], "tools": []},
    ]
    jsonl(tmp_path / "prompts.jsonl", rows)
    done = call("prepare", *SETTINGS, f"model.path={tooled}", "answers.temperatures=[0.0]", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "not used" not in done.out
    tokenizer = CausalLM(str(tooled), "float32", "cpu").tokenizer
    prepared_rows = {row["id"]: row for row in lines_of(tmp_path / "out.jsonl")[1:]}
    assert prepared_rows["list"]["tools"] == prepared_rows["text"]["tools"] == [SCHEMA]
    assert "tools" not in prepared_rows["none"]
    assert prepared_rows["list"]["input_ids"] == prepared_rows["text"]["input_ids"]
    for name, row in prepared_rows.items():
        prompt = tokenizer.apply_chat_template(
            row["messages"][:-1], tools=row.get("tools"), add_generation_prompt=True, tokenize=True, return_dict=False
        )
        assert row["input_ids"][: len(prompt)] == prompt, name
        assert ("weather" in tokenizer.decode(row["input_ids"])) == (name != "none")


def test_the_tools_and_calls_of_training_data_reach_the_template(tooled: Path, tmp_path: Path) -> None:
    call_ = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn"}}}
    row = {"messages": [user("Warm?"), {"role": "assistant", "content": None, "tool_calls": [call_]}], "source": "web"}
    lost = {"messages": [{"role": "system", "content": "Be brief."}, *row["messages"]]}
    jsonl(tmp_path / "data.jsonl", [row | {"tools": json.dumps([SCHEMA])}, row | {"tools": [SCHEMA]}, lost])
    arguments = (f"model.path={tooled}", "data=jsonl", "data.path=data.jsonl", "layer_ids=[1]", "out_dir=out")
    done = call("extract", "model=tiny", *arguments, cwd=tmp_path)
    assert done.code == 0, done.err
    tokenizer = CausalLM(str(tooled), "float32", "cpu").tokenizer
    wanted = tokenizer.apply_chat_template(row["messages"], tools=[SCHEMA], tokenize=True, return_dict=False)
    assert f"2 samples, {2 * len(wanted) - 2} tokens" in done.out, "all but the line feed at the end"
    assert "note: 1 rows were left out: 1 a message of role 'system' that the chat template does not show" in done.out
    assert "note: fields that are not used: source (2 rows)" in done.out


def test_what_prepare_does_not_use_is_said(tooled: Path, tmp_path: Path) -> None:
    """Fields that nothing reads, tools that the template does not show; a row whose message would be lost is left out."""
    named = {"role": "user", "content": "Who?", "name": "Ann"}
    rows = [
        {"id": "a", "turns": ["Hello?"], "reference": ["Hi."], "messages": [user("Never.")]},
        {"id": "b", "messages": [named], "source": "web"},
        {"id": "c", "turns": ["Hello?"], "system": "Be brief."},
        {"id": "d", "conversations": [{"from": "human", "value": "Hello?"}, {"from": "observation", "value": "42"}]},
    ]
    jsonl(tmp_path / "prompts.jsonl", rows)
    done = call("prepare", *SETTINGS, f"model.path={tooled}", cwd=tmp_path)
    assert done.code == 0, done.err
    assert {row["id"] for row in lines_of(tmp_path / "out.jsonl")[1:]} == {"a", "b"}
    (left_out,) = [line for line in done.out.splitlines() if "left out" in line]
    assert "2 rows" in left_out
    assert "'system' that the chat template does not show" in left_out
    assert "'tool' between the turns" in left_out
    (unused,) = [line for line in done.out.splitlines() if "not used" in line]
    for field in ("reference", "messages", "messages.name", "source"):
        assert f" {field} (1 rows)" in unused
    jsonl(tmp_path / "prompts.jsonl", [{"turns": ["Hello?"], "tools": [SCHEMA], "system": "Be brief."}])
    done = call("prepare", *SETTINGS, "out=plain.jsonl", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "fields that are not used: tools (1 rows)" in done.out, "the template of the tiny model has no tools"
    assert lines_of(tmp_path / "plain.jsonl")[1]["messages"][0] == {"role": "system", "content": "Be brief."}


def test_of_an_earlier_answer_the_text_as_generated_is_supervised() -> None:
    """The last prompt may have the end of an earlier answer in other tokens."""
    task = SimpleNamespace(id="a", category="c", turns=("one", "two"), system=None, tools=None)
    params = SimpleNamespace(temperature=0.0)
    tokenizer: Any = SimpleNamespace(decode=lambda ids, skip_special_tokens: str(ids))
    stats = RequestStats()
    stats.add(2, 1, 2, 0.0, 0.0, 1)  # of the three tokens of the first answer, the last was no draft's
    for second, mask, rejected in (
        ([1, 2, 10, 11, 12, 3, 4], [0, 0, 1, 1, 1, 0, 0, 1], [4]),  # whole
        ([1, 2, 10, 11, 99, 4], [0, 0, 1, 1, 0, 0, 1], []),  # its last token joined what follows
        ([1, 98, 11, 12, 3], [0, 0, 0, 0, 0, 1], []),  # its first joined the prompt: what came after was generated after others
    ):
        more = {"params": params, "finish_reason": "stop"}
        requests: list[Any] = [
            SimpleNamespace(prompt_token_ids=[1, 2], output_token_ids=[10, 11, 12], stats=stats, **more),
            SimpleNamespace(prompt_token_ids=second, output_token_ids=[20], stats=RequestStats(), **more),
        ]
        row = prepare.conversation_row(task, requests, tokenizer)
        assert row["input_ids"] == [*second, 20]
        assert row["loss_mask"] == mask
        assert np.flatnonzero(row["rejected_mask"]).tolist() == rejected


BAD_OPENINGS = {
    "weight": (
        {"text": "A", "category": "a", "weight": 10**12},
        "weight=1000000000000 is not a whole number from 0 to 1000000",
    ),
    "fraction": ({"text": "A", "category": "a", "weight": 1.5}, "weight=1.5 is not a whole number"),
    "negative": ({"text": "A", "category": "a", "weight": -1}, "weight=-1 is not a whole number"),
    "text": ({"text": 3, "category": "a"}, "needs text and category"),
    "category": ({"text": "A"}, "needs text and category"),
    "ends": ({"text": "A", "category": "a", "ends": 3}, "needs text and category"),
    "list": ([1], "needs text and category"),
    "none": ({"text": "A", "category": "a", "weight": 0}, "no line has a weight above 0"),
}


@pytest.mark.parametrize("kind", BAD_OPENINGS)
def test_openings_are_checked_line_by_line(kind: str, tmp_path: Path) -> None:
    row, reason = BAD_OPENINGS[kind]
    good = [] if kind == "none" else [{"text": "B", "category": "b", "weight": 3}]
    jsonl(tmp_path / "openings.jsonl", [*good, row])
    arguments = ("prompts=null", "synthesize.count=1", "synthesize.openings=openings.jsonl")
    error = call("prepare", *SETTINGS, *arguments, cwd=tmp_path).error
    assert reason in error
    assert "synthesize.openings=openings.jsonl" in error
    assert kind == "none" or "line 2" in error
    assert not (tmp_path / "out.jsonl").exists()
    gone = call("prepare", *SETTINGS, *arguments[:2], "synthesize.openings=gone.jsonl", cwd=tmp_path).error
    assert "synthesize.openings=gone.jsonl: cannot be read" in gone


OTHERS = {
    "text": b"My notes.\nMore of them.\n",
    "a line": b"My notes.\n",
    "no line end": b"My notes.",
    "an empty line": b"\nMy notes.\n",
    "rows": b'{"id": "a", "turns": ["Hello?"]}\n{"id": "b", "turns": ["Who?"]}\n',
    "a row": b'{"turns": ["Hello?"]}',
    "a number": b"7\n",
    "another header": b'{"header": {"mine": 1}}\n{"id": "a"}\n',
    "a header of text": b'{"header": My notes}\n',
    "bytes": b"\xff\xfe\x00\n\x80",
}


@pytest.mark.parametrize("name", OTHERS)
def test_prepare_leaves_the_files_of_others_alone(tmp_path: Path, name: str) -> None:
    """Neither the file nor that of made-up prompts is taken for one that was begun."""
    jsonl(tmp_path / "prompts.jsonl", PROMPTS[:1])
    mine = tmp_path / "mine.jsonl"
    mine.write_bytes(OTHERS[name])
    assert "mine.jsonl exists" in call("prepare", *SETTINGS, "out=mine.jsonl", cwd=tmp_path).error
    assert "mine.jsonl" in call("prepare", *SETTINGS, "out=mine.jsonl", "resume=true", cwd=tmp_path).error
    assert mine.read_bytes() == OTHERS[name]
    prompts = mine.rename(tmp_path / "made.jsonl.prompts.jsonl")
    synthesized = (*SETTINGS, "prompts=null", "synthesize.count=1", "out=made.jsonl")
    assert "made.jsonl.prompts.jsonl exists" in call("prepare", *synthesized, cwd=tmp_path).error
    assert "made.jsonl.prompts.jsonl" in call("prepare", *synthesized, "resume=true", cwd=tmp_path).error
    assert prompts.read_bytes() == OTHERS[name]
    assert {path.name for path in tmp_path.iterdir()} == {"prompts.jsonl", prompts.name}


def test_a_bad_line_of_prepared_rows_is_named(prepared: Path, tmp_path: Path) -> None:
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    lines = (prepared / "out.jsonl").read_bytes().splitlines(keepends=True)
    lines[2] = lines[2][:20] + b"\n"
    (tmp_path / "out.jsonl").write_bytes(b"".join(lines))
    assert "out.jsonl, line 3: not a row of ours" in call("prepare", *SETTINGS, "resume=true", cwd=tmp_path).error
    assert (tmp_path / "out.jsonl").read_bytes() == b"".join(lines)


GOOD = b'{"id": "a"}\n'


@pytest.mark.parametrize("bad", [b"notes\n", b'{"id": \n', b"[1]\n", b"3\n", b"\xff\n"], ids=repr)
@pytest.mark.parametrize("place", [1, 2, 3])
def test_rows_with_a_line_that_is_not_theirs_are_not_touched(tmp_path: Path, bad: bytes, place: int) -> None:
    """At the beginning, in the middle, or as a whole line at the end."""
    lines = [GOOD, GOOD]
    lines.insert(place - 1, bad)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(lines))
    with pytest.raises(ValueError, match=rf"rows\.jsonl, line {place}: not a row of ours") as error:
        records.JsonlFile(path)
    assert line(error)
    assert path.read_bytes() == b"".join(lines)


@pytest.mark.parametrize("rest", [b"", b'{"id": "b"', b'{"id": "b"}', b"{", b'{"id": "\xc3'], ids=repr)
def test_only_a_last_line_that_was_cut_short_is_dropped(tmp_path: Path, rest: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD * 2 + rest)
    rows = records.JsonlFile(path)
    assert rows.rows == [{"id": "a"}, {"id": "a"}]
    rows.add({"id": "c"})
    rows.close()
    assert path.read_bytes() == GOOD * 2 + b'{"id": "c"}\n'
