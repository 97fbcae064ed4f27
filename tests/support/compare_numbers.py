#!/usr/bin/env python
"""The numbers of a checkout, as one flat JSON of keys and values, to compare a refactored tree with the tree before it.

    python tests/support/compare_numbers.py TREE OUT.json  # everything
    python tests/support/compare_numbers.py TREE OUT.json --only decode  # or train, extract, share, prepare; may be repeated
    python tests/support/compare_numbers.py --diff BEFORE.json AFTER.json  # a line for each key that differs
    options: --keep DIR (work in this new directory, and keep it), --list (with --diff: print the values too)

TREE is run with the Python interpreter that runs this file, on the CPU (CUDA is hidden), on one thread, without a network, and
one process at a time. Only public interfaces are used: the scripts TREE/train/*.py and TREE/eval/*.py with their Hydra keys,
`from specdec import LLM, SamplingParams`, `specdec.hub.resolve`, the files that runs write, and what CONTRIBUTING.md shows of
the context that a custom_class gets (`tokens`, `max_draft_B`). The methods are those of TREE/conf/method/*.yaml.

The parent process makes a scratch directory and starts a worker in it, with PYTHONPATH=TREE and an empty model cache
(SPECDEC_CACHE). The worker imports torch and transformers but nothing of specdec, then forks a process for each script (run by
`runpy` as `__main__`, with the script's folder first in sys.path, as `python FILE` does) and for each part that uses LLM. Each
of these processes checks at its end that every `specdec*` module it imported lies in TREE. If one does not, which can happen
when another tree is installed in the environment, the whole run ends with exit code 2. Bytecode is written to the scratch
directory and nothing to TREE. Paths are given relative to the scratch directory, so that its name is in no number.

Small numbers and short texts are kept as they are; everything else is the first 24 digits of a sha256. `steps` are
"accepted/drafted" of every step with a draft, in order. Where a script or LLM refuses its input, the key `.../error` holds its
error line, which is compared as well. An unexpected failure (a traceback) is the key `.../FAILED`, and gives exit code 3.

Left out, because it is a time, a date, a path, a version or a commit, or depends on one:
- in metrics.jsonl and summaries: the keys that TIMES (below) matches, such as `tokens_per_s`, `speedup`, `draft_s`,
  `features_share` and `outside_share` (shares of time); of eval/run.py also verify_cost, efficiency, model and busy.
- in JSON files: the keys of NO_NUMBER (below), such as command, git_revision, versions, environment, made_by, producer, paths.
- config.yaml, *.png, lock files, and of a model card everything from "## Provenance" on (command, commit).
- the order of metadata in a safetensors header, which differs from run to run: the digest of such a file is that of all its
  tensors (dtype, shape, bytes) and its metadata.
- printed text (tables, notes), except error lines; of lint only the exit code is kept.
- measured costs (eval/profile_cost.py, choose.py, bench.py, and auto without a cost table), since the clock decides what comes
  of them. eval/load.py is run at temperature 0, with all requests at once, and only its tokens are kept.
- generated prompts (prepare.py without prompts=): the random bytes of the tiny model are never accepted as a user turn.
- tensor parallelism, more than one process, bfloat16 training, GPU, wandb, resume=true.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

GROUPS = ("decode", "share", "train", "extract", "prepare")  # in this order
TIMES = re.compile(
    r"_s_per_|(_s|_ms|_seconds|_time|_share_of_time|_bytes|_gb)$|per_s$|per_second|second|speedup|features_share|outside_share|efficien|busy|"
    r"cpu|memory|^model$|verify_cost|ideal|elapsed|wall|draft_cost|relative_cost|predicted|low_high"
)
NO_NUMBER = {
    "command", "git_revision", "git", "specdec_version", "torch", "transformers", "transformers_version", "environment",
    "made_by", "producer", "_name_or_path", "speculators_version", "date", "created", "time", "num_threads", "out_dir", "path",
    "python",
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- values


def sha(value) -> str:
    data = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(data).hexdigest()[:24]


def file_sha(path) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:24]


def rows(path) -> list:
    return [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]


def cleaned(value):
    """A JSON value without dates, versions, commits and paths. `specdec` is a version where it is text."""
    if isinstance(value, dict):
        return {
            key: cleaned(item)
            for key, item in value.items()
            if key not in NO_NUMBER and not (key == "specdec" and isinstance(item, str))
        }
    if isinstance(value, list):
        return [cleaned(item) for item in value]
    return pathless(value) if isinstance(value, str) else value


def pathless(text: str) -> str:
    return text.replace(os.getcwd(), "SCRATCH").replace(os.environ["NUMBERS_TREE"], "TREE")


def tensors_of(path) -> dict:
    """Digest of each tensor of a safetensors file (dtype, shape and bytes), and of its metadata."""
    data = Path(path).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    body = data[8 + size :]
    digests = {"__metadata__": sha(cleaned(header.pop("__metadata__", {})))}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        digests[name] = hashlib.sha256(f"{entry['dtype']} {entry['shape']} ".encode() + body[begin:end]).hexdigest()[:24]
    return digests


def directory(out: dict, prefix: str, folder, tensors: bool = False) -> None:
    """Digests of the files of a directory that hold numbers."""
    folder = Path(folder)
    for path in sorted(folder.rglob("*")):
        key = f"{prefix}/{path.relative_to(folder)}"
        if not path.is_file() or path.suffix in (".png", ".yaml", ".lock") or path.name.startswith("."):
            continue
        if path.suffix == ".safetensors":
            digests = tensors_of(path)  # not the file's bytes: safetensors writes several metadata in any order
            out[key] = sha(digests)
            if tensors:
                out.update({f"{key}:{name}": value for name, value in digests.items()})
        elif path.suffix == ".json":
            out[key] = sha(cleaned(json.loads(path.read_text())))
        elif path.suffix == ".jsonl":
            out[key] = sha([cleaned(row) for row in rows(path)])
        elif path.name == "README.md":
            out[key] = sha(pathless(path.read_text().partition("## Provenance")[0]).encode())
        else:
            out[key] = file_sha(path)


def flat(out: dict, prefix: str, value) -> None:
    """A JSON object whose numbers are wanted one by one, without times."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not TIMES.search(key):
                flat(out, f"{prefix}/{key}", item)
    elif isinstance(value, list) and len(value) > 12:
        out[prefix] = sha(value)
    else:
        out[prefix] = value


# ------------------------------------------------------------------------------------------------------------- processes


class Failed(Exception):
    pass


def check_origin() -> None:
    tree = Path(os.environ["NUMBERS_TREE"])
    for name, module in list(sys.modules.items()):
        origin = getattr(module, "__file__", None)
        if (name == "specdec" or name.startswith("specdec.")) and origin and tree not in Path(origin).resolve().parents:
            sys.stderr.write(f"WRONG TREE: {name} is {origin}, not of {tree}\n")
            sys.stderr.flush()
            os._exit(88)


COUNT = 0


def forked(label: str, action) -> dict:
    """What `action()` returns, a JSON object, in a process of its own."""
    global COUNT
    COUNT += 1
    began = time.time()
    log = Path(f"logs/{COUNT:03d}.log").resolve()
    result = Path(f"logs/{COUNT:03d}.json").resolve()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            handle = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            answer = action()
            check_origin()
            result.write_text(json.dumps(answer))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    output = log.read_text(errors="replace") if log.exists() else ""
    print(f"  {time.time() - began:6.1f}s {label}", file=sys.stderr, flush=True)
    if code == 88:
        sys.exit("\n".join(output.splitlines()[-1:]) or "wrong tree")
    if code or not result.exists():
        tail = "\n    ".join(output.strip().splitlines()[-12:])
        print(f"  FAILED {label} ({code}):\n    {tail}", file=sys.stderr, flush=True)
        raise Failed(pathless((output.strip().splitlines() or ["no output"])[-1])[:300])
    return json.loads(result.read_text())


def script(label: str, name: str, *arguments: str) -> dict:
    """`python TREE/NAME ARGUMENTS`: {"code": exit code, "error": the last line if it failed}."""
    path = Path(os.environ["NUMBERS_TREE"], name)

    def action() -> dict:
        sys.argv = [str(path), *arguments]
        sys.path.insert(0, str(path.parent))  # the worker runs with -P: its own folder is not in sys.path
        code = 0
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as ended:
            code = ended.code
            if isinstance(code, str):
                sys.stderr.write(f"{code}\n")
                code = 1
        sys.stderr.flush()
        code = int(code or 0)
        lines = Path(os.readlink("/proc/self/fd/2")).read_text(errors="replace").strip().splitlines() if code else []
        errors = [line for line in lines if line.startswith("error: ")] or lines[-1:]
        return {"code": code, "error": pathless(errors[-1]) if errors else None}

    return forked(label, action)


def guarded(out: dict, key: str, action) -> bool:
    """Run action(), a part of the numbers; whether it came to its end. A failure is a number too."""
    try:
        action()
    except Failed as error:
        out[f"{key}/FAILED"] = str(error)
        return False
    return True


def called(out: dict, key: str, name: str, *arguments: str) -> bool:
    """A script; whether it succeeded. A refusal is a number."""
    done = {}
    if not guarded(out, key, lambda: done.update(script(key, name, *arguments))):
        return False
    if done["code"]:
        out[f"{key}/error"] = f"{done['code']}: {done['error']}"
    return not done["code"]


# ------------------------------------------------------------------------------------------------------------- material

PROMPTS = [
    "one two three one two three one two",
    "to be or not to be, that is to be",
    "a b a b a b a",
    "Name three rivers.",
    "x",
    "the cat sat on the mat and the cat sat on the hat",
    "1, 2, 3, 4, 1, 2, 3,",
    "Write a function that adds two numbers, and a function that adds three numbers.",
]
TINY = ("model=tiny", "model.dtype=float32", "model.device=cpu")

CUSTOM = '''"""A proposer of the user's own."""


class Mine:
    """Says the token that came before the last one, and the last, in turn."""

    def __init__(self, num_speculative_tokens):
        self.most = num_speculative_tokens

    def propose(self, context):
        drafts = []
        for b, most in enumerate(context.max_draft_B):
            last = [int(token) for token in context.tokens(b)[-2:]]
            drafts.append([last[i % len(last)] for i in range(min(int(most), self.most))])
        return drafts
'''


def make_material() -> None:
    """Files that everything reads. What the target says is made by transformers alone, so that a number which changed
    elsewhere does not change all that is trained on it."""
    Path("logs").mkdir(exist_ok=True)
    Path("mine").mkdir()
    Path("mine/numbers_custom.py").write_text(CUSTOM)
    sys.path.append(os.path.abspath("mine"))
    with open("tasks.jsonl", "w") as file:
        for i, prompt in enumerate(PROMPTS[:4]):
            texts = [prompt, PROMPTS[4 + i]] if i == 1 else [prompt]
            file.write(json.dumps({"id": f"t{i}", "category": "ab"[i % 2], "turns": texts}) + "\n")
    sizes = [0, 1, 2, 3, 5, 8, 16]
    table = {
        "format": "specdec-cost", "format_version": 1, "batch_sizes": [1, 2, 4], "draft_lengths": sizes,
        "verify_s": [[0.010 + 0.0004 * k * n for k in sizes] for n in (1, 2, 4)],
        "draft_s": [[0.0006 * k * (1 + 0.1 * n) for k in sizes] for n in (1, 2, 4)],
        "about": {}, "schedule": [[1, 1, 3], [2, 3, 2], [4, 8, 1]],
    }  # fmt: skip
    Path("cost.json").write_text(json.dumps(table))

    def data() -> dict:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from specdec import hub

        where = hub.resolve("tiny")
        digests: dict = {}
        for path in sorted(Path(where).iterdir()):
            digests[f"hub/tiny/{path.name}"] = (
                file_sha(path) if path.suffix != ".json" else sha(cleaned(json.loads(path.read_text())))
            )
        model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, trust_remote_code=False, use_safetensors=True)
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False)
        torch.manual_seed(0)
        start = torch.randint(0, 256, (24, 10))
        with torch.no_grad():
            sequences = model.generate(
                start, attention_mask=torch.ones_like(start), max_new_tokens=40, do_sample=False
            ).tolist()
        with open("data.jsonl", "w") as file:
            for i, ids in enumerate(sequences):
                ids = ids[: 30 + i % 5 * 5]
                file.write(
                    json.dumps({"id": f"g{i}", "input_ids": ids, "loss_mask": [int(j >= 10) for j in range(len(ids))]}) + "\n"
                )
        with open("text.jsonl", "w") as file:
            talk = lambda *texts: [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(texts)]
            for i in range(8):
                a = PROMPTS[i]
                b = PROMPTS[(i + 3) % 8]
                row = (
                    {"messages": talk(a, b)}, {"prompt": a, "response": b}, {"text": a + " " + b},
                    {"conversations": [{"from": "human", "value": a}, {"from": "gpt", "value": b}]},
                )[i % 4]  # fmt: skip
                file.write(json.dumps({"id": f"x{i}", **row}) + "\n")
        with open("prompts.jsonl", "w") as file:
            for i, prompt in enumerate(PROMPTS):
                row = (
                    {"turns": [prompt], "category": "ab"[i % 2]},
                    {"turns": [prompt, "And then?"]},
                    {"messages": [{"role": "system", "content": "Be brief."}, *talk(prompt)]},
                    {"conversations": [{"from": "human", "value": prompt}, {"from": "gpt", "value": "x"}]},
                )[i % 4]  # fmt: skip
                file.write(json.dumps({"id": f"p{i}", **row}) + "\n")
        digests["hub/tokenizer"] = sha([tokenizer(p)["input_ids"] for p in PROMPTS])
        return digests

    MATERIAL.update(forked("material", data))
    for name in ("data.jsonl", "text.jsonl"):
        MATERIAL[f"material/{name}"] = file_sha(name)


MATERIAL: dict = {}

# ------------------------------------------------------------------------------------------------------------- train

COMMON = (
    *TINY, "data=jsonl", "data.path=data.jsonl", "data.held_out=4", "train.max_steps=20", "train.num_epochs=null",
    "train.global_batch_size=4", "train.micro_batch_size=2", "train.lr=1e-2", "train.mixed_precision=no", "train.log_every=1",
    "train.eval_every=10", "train.save_every=10", "eval.num_prompts=3", "eval.max_tokens=12", "eval.max_batch_size=2",
)  # fmt: skip
DRAFT_VOCAB = "train.drafter.draft_vocab_size=200"
FAMILIES = {  # the published recipe of each family
    "eagle": ("eagle", "method=eagle", "train=eagle"),
    "eagle3": ("eagle", "method=eagle3", "train=eagle3", DRAFT_VOCAB, "train.objective.ttt_steps=3"),
    "peagle": ("eagle", "method=peagle", "train=peagle", DRAFT_VOCAB, "train.drafter.num_hidden_layers=2"),
    "mtp": ("mtp", "train=mtp"),
    "mlp": ("mlp", "train=mlp"),
    "draft_model": ("draft_model", "train=draft_model"),
    "pard": ("pard", "train=pard", "train.objective.num_depths=4"),
}
VARIANTS = {
    "eagle3_features": (*FAMILIES["eagle3"], "features.path=hidden"),
    "eagle_features_vllm": (*FAMILIES["eagle"], "features.path=hidden-vllm", "features.layer_ids=[1,2,4]"),
    "eagle3_demo": ("eagle", "train.drafter.draft_vocab_size=200", "train.drafter.num_hidden_layers=2",
        "train.drafter.layer_type=qwen3", "train.objective.loss={ce: 0.5, kl: 0.5, tv: 0.5, nll: 0.5}",
        "train.loss_normalization=samples"),
    "mtp_demo": ("mtp", DRAFT_VOCAB),
    "mtp_modules": ("mtp", "train=mtp", "train.drafter.num_modules=2", "method.num_speculative_tokens=2",
        "train.drafter.hidden_feedback=target", "train.drafter.last_hidden_kind=pre_norm"),
    "mlp_demo": ("mlp", DRAFT_VOCAB),
    "eagle_demo": ("eagle", "method=eagle", "train=eagle_demo", "data.path=text.jsonl", "data.held_out=2"),
    "draft_model_kl": ("draft_model", "train=draft_model", "train.objective.loss={nll: 0.5, kl: 0.5}",
        "train.init.train_embedding=false", "data.path=text.jsonl", "data.held_out=2", "data.supervise=all"),
    "pard_from": ("pard", "train=pard", "checkpoint=train-draft_model", "train.objective.depth_warmup=0.3"),
    "eagle3_from": (*FAMILIES["eagle3"], "checkpoint=train-eagle3", "train.objective.ttt_warmup=0.5"),
    "peagle_demo": ("eagle", "method=peagle", "train=peagle_demo", DRAFT_VOCAB),
}  # fmt: skip
TRAINED: dict = {}  # the numbers of what was trained already


def trained(name: str) -> str:
    """The directory of a training run, made the first time."""
    out_dir = f"train-{name}"
    if name in TRAINED:
        return out_dir
    if "features.path=hidden" in str(VARIANTS.get(name)):
        extracted()
    out: dict = {}
    TRAINED[name] = out
    which, *more = (FAMILIES | VARIANTS)[name]
    arguments = [argument for argument in COMMON if argument.partition("=")[0] not in {m.partition("=")[0] for m in more}]
    key = f"train/{name}"
    if not called(out, key, f"train/{which}.py", *arguments, *more, f"out_dir={out_dir}"):
        return out_dir
    for row in rows(f"{out_dir}/metrics.jsonl"):
        flat(out, f"{key}/step{row.pop('step'):02d}", row)
    for path in sorted(Path(out_dir, "checkpoints").iterdir()):
        directory(out, f"{key}/{path.name}", path, tensors=path.name.endswith("20"))
    for link in ("best", "last"):
        out[f"{key}/{link}"] = Path(out_dir, link).resolve().name
    return out_dir


def group_train(out: dict) -> None:
    for name in FAMILIES | VARIANTS:
        trained(name)
        out.update(TRAINED[name])


# ------------------------------------------------------------------------------------------------------------- extract

EXTRACTED: dict = {}


def extracted() -> None:
    if EXTRACTED:
        return
    data = (*TINY, "data=jsonl")
    for name, more in {
        "hidden": ("data.path=data.jsonl",),
        "hidden-vllm": ("data.path=data.jsonl", "layout=vllm", "layer_ids=[1,2]"),
        "hidden-text": ("data.path=text.jsonl", "layer_ids=[0,3]", "shard_mb=0"),
        "hidden-bf16": ("data.path=text.jsonl", "model.dtype=bfloat16"),
    }.items():
        arguments = [argument for argument in data if argument.partition("=")[0] not in {m.partition("=")[0] for m in more}]
        if called(EXTRACTED, f"extract/{name}", "train/extract.py", *arguments, *more, f"out_dir={name}"):
            directory(EXTRACTED, f"extract/{name}", name)


def group_extract(out: dict) -> None:
    extracted()
    out.update(EXTRACTED)


# ------------------------------------------------------------------------------------------------------------- prepare


def group_prepare(out: dict) -> None:
    for name, more in {
        "float32": ("max_batch_size=4",),
        "one_by_one": ("max_batch_size=1", "seed=3", "answers.temperatures=[0.9]", "answers.top_k=20", "answers.top_p=0.9"),
    }.items():
        key = f"prepare/{name}"
        if not called(
            out,
            key,
            "train/prepare.py",
            *TINY,
            "prompts=prompts.jsonl",
            "answers.max_tokens=16",
            f"out=prepared-{name}.jsonl",
            *more,
        ):
            continue
        prepared = rows(f"prepared-{name}.jsonl")
        for row in prepared:
            if "header" in row:
                out[f"{key}/header"] = sha(cleaned(row))
                continue
            row_key = f"{key}/{row['id']}"
            out[f"{row_key}/input_ids"] = sha(row["input_ids"])
            out[f"{row_key}/loss_mask"] = sha(row["loss_mask"])
            out[f"{row_key}/supervised"] = sum(row["loss_mask"])
            out[f"{row_key}/finish"] = row["finish_reason"]
            out[f"{row_key}/all"] = sha(row)
        out[f"{key}/order"] = sha([row.get("id") for row in prepared])


# ------------------------------------------------------------------------------------------------------------- share

FORMATS = ("vllm", "sglang", "speculators", "native")


def group_share(out: dict) -> None:
    exports = {}
    for name in (*FAMILIES, "mtp_modules"):
        source = trained(name)
        for format in FORMATS:
            for dtype in (None, "bfloat16") if (name, format) in (("eagle3", "vllm"), ("draft_model", "native")) else (None,):
                label = f"{name}-{format}" + (f"-{dtype}" if dtype else "")
                more = [f"dtype={dtype}"] if dtype else []
                arguments = (
                    f"checkpoint={source}",
                    f"format={format}",
                    f"out_dir=shared-{label}",
                    "target=tiny",
                    "num_speculative_tokens=2",
                )
                if called(out, f"share/{label}", "train/share.py", *arguments, *more):
                    directory(out, f"share/{label}", f"shared-{label}", tensors=True)
                    exports[label] = f"shared-{label}"
    for label in ("eagle3-vllm", "pard-vllm", "mlp-vllm"):
        if label in exports:
            done: dict = {}
            guarded(
                out,
                f"share/lint/{label}",
                lambda done=done, label=label: done.update(
                    script(f"lint {label}", "train/share.py", f"lint={exports[label]}", "target=tiny")
                ),
            )
            out[f"share/lint/{label}"] = done.get("code")

    def read_back() -> dict:
        results: dict = {}
        for label, path in exports.items():
            # without a method, so that it is recognised by its own config; merged MTP is a target as well
            config = {"model": path, "num_speculative_tokens": 2}
            decoded(results, f"share/decoded/{label}", config, batches=(4,), temperatures=(0,))
        return results

    guarded(out, "share/decoded", lambda: out.update(forked("share: decoding with what was exported", read_back)))


# ------------------------------------------------------------------------------------------------------------- decode


def requests(tokenizer, temperature: float, drafts: bool) -> list:
    """A request of each kind. Narrow ones may say a few tokens only, so that drafts stand now and then."""
    from specdec import SamplingParams

    four = dict.fromkeys((97, 98, 99, 100), 30.0)
    two = dict.fromkeys((97, 98), 30.0)
    stop = tokenizer.decode([97, 97, 97])
    kinds = [
        {},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3,
            "logit_bias": dict.fromkeys(range(64, 80), 20.0)},
        {"logit_bias": four, "max_tokens": 18},
        {"logit_bias": two, "min_tokens": 6, "stop": [stop, "no such"]},
        {"logit_bias": four, "min_tokens": 4, "stop_token_ids": [98], "include_stop_str_in_output": True},
        {"logit_bias": four, "speculative_config": {"num_speculative_tokens": 1}},
        {"logit_bias": four, "speculative_config": {"method": "none"}, "max_tokens": 6},
        {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 123, "ignore_eos": True,
            "speculative_config": {"num_speculative_tokens": 2}},
    ]  # fmt: skip
    if not drafts:  # a request may ask for no more than the engine's K
        kinds = [{key: value for key, value in kind.items() if key != "speculative_config"} for kind in kinds]
    return [SamplingParams(**{"temperature": temperature, "max_tokens": 14, **kind}) for kind in kinds]


def decoded(
    out: dict, prefix: str, config, batches=(1, 4), temperatures=(0, 1.0), model: str = "tiny", dtype: str = "float32"
) -> None:
    """The requests, at each batch size and temperature, by LLM."""
    from specdec import LLM

    for batch in batches:
        key = f"{prefix}/b{batch}"
        settings = dict(config) if config else None
        if settings and settings.get("method") == "extract_hidden_states":
            settings["shared_storage_path"] = key.replace("/", "_")
        try:
            llm = LLM(
                model, dtype=dtype, device="cpu", max_batch_size=batch, speculative_config=settings, seed=5, num_threads=1
            )
            for temperature in temperatures:
                drafts = bool(settings) and settings.get("method") != "extract_hidden_states"
                params = requests(llm.get_tokenizer(), temperature, drafts)
                few = slice(None) if batch > 1 else slice(1, 6)  # row by row takes the time
                answers = llm.generate(PROMPTS[few], params[few], use_tqdm=False)
                for place, answer in enumerate(answers):
                    completion = answer.outputs[0]
                    where = f"{key}/T{temperature:g}/r{place}"
                    out[f"{where}/tokens"] = sha([int(token) for token in completion.token_ids])
                    reasons = f"{completion.finish_reason} {completion.stop_reason}"
                    out[f"{where}/end"] = f"{len(completion.token_ids)} {reasons} {sha(completion.text)[:8]}"
                    if (metrics := completion.spec_decode_metrics) is not None:
                        pairs = zip(metrics.per_step_accepted, metrics.per_step_drafted, strict=True)
                        out[f"{where}/steps"] = " ".join(f"{a}/{d}" for a, d in pairs)
                        out[f"{where}/mean_acceptance_length"] = metrics.mean_acceptance_length
                for metric in llm.get_metrics():
                    name = ",".join(
                        [metric.name, *(f"{k}={v}" for k, v in sorted(metric.labels.items()) if k == "finished_reason")]
                    )
                    out[f"{key}/T{temperature:g}/metrics/{name}"] = getattr(metric, "value", None) or getattr(
                        metric, "values", 0
                    )
            if settings and "shared_storage_path" in settings:
                directory(out, f"{key}/files", settings["shared_storage_path"])
        except ValueError as error:
            out[f"{key}/error"] = pathless(str(error))


def method_configs(names: list) -> dict:
    """Of each method the configurations that are decoded with."""
    three = {"num_speculative_tokens": 3}
    plain = {
        "none": {"": None},
        "ngram": {"": {**three, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
            "latest": {"num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 5,
                "prompt_lookup_latest": True}},
        "ngram_gpu": {"": {**three, "prompt_lookup_min": 1, "prompt_lookup_max": 3}},
        "suffix": {"": {}, "few": {"num_speculative_tokens": 4, "suffix_decoding_max_tree_depth": 8,
            "suffix_decoding_max_cached_requests": 2, "suffix_decoding_max_spec_factor": 2.0, "min_score": 0.5}},
        "custom_class": {"": {**three, "model": "numbers_custom.Mine"},
            "theirs": {**three, "model": "specdec.method.ngram.Ngram"}},
        "extract_hidden_states": {"": {"num_speculative_tokens": 1, "include_output_tokens": True,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1, 4]}}}},
        "hybrid": {
            "": {"num_speculative_tokens": 4, "proposers": [{"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4},
                {"method": "eagle3", "model": trained("eagle3")}]},
            "suffix_mlp": {"num_speculative_tokens": 3, "proposers": [{"method": "suffix", "min_score": 1.0},
                {"method": "mlp", "model": trained("mlp"), "draft_sample_method": "probabilistic"}]}},
    }  # fmt: skip
    configs = {}
    for name in names:
        if name in FAMILIES:
            configs[name] = {"": {**three, "model": trained(name)},
                "prob": {**three, "model": trained(name), "draft_sample_method": "probabilistic"}}  # fmt: skip
        elif name in plain:
            configs[name] = plain[name]
    if "draft_model" in configs:  # the target itself: everything stands
        configs["draft_model"]["self"] = {"num_speculative_tokens": 4, "model": "tiny", "draft_sample_method": "probabilistic"}
        configs["draft_model"]["vocab"] = {**three, "model": "tiny-qwen3", "use_heterogeneous_vocab": True}
    return configs


SCHEMES = {
    "standard": {},
    "match": {"rejection_sample_method": "match"},
    "block": {"rejection_sample_method": "block"},
    "synthetic": {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 1.7},
}
# scheme, batch sizes, temperatures. At temperature 0 all lossless schemes come to the same; one row at a time takes the time
PLAN = {
    "": [
        ("standard", (1,), (0,)),
        ("standard", (4,), (0, 1.0)),
        ("match", (1, 4), (1.0,)),
        ("block", (4,), (1.0,)),
        ("synthetic", (4,), (0, 1.0)),
    ],
    "prob": [("standard", (4,), (1.0,)), ("match", (4,), (1.0,)), ("block", (4,), (1.0,))],
}
SHORT = [("standard", (4,), (0, 1.0)), ("block", (4,), (1.0,))]
ADAPTIVE = {
    "auto": {"num_speculative_tokens": "auto", "cost_table": "cost.json"},
    "verify": {"enable_adaptive_verification": True, "cost_table": "cost.json"},
    "both": {"num_speculative_tokens": "auto", "enable_adaptive_verification": True, "cost_table": "cost.json"},
    "schedule": {"num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 3, 2], [4, 8, 1]]},
    "schedule_file": {"num_speculative_tokens_per_batch_size": "cost.json"},
}
ROW = (
    "id", "prompt_id", "category", "method", "rejection", "lossless", "num_speculative_tokens", "seed", "finish_reason",
    "stop_reason", "text", "num_prompt_tokens", "num_output_tokens",
)  # fmt: skip


def method_names() -> list:
    tree = Path(os.environ["NUMBERS_TREE"])
    paths = sorted(tree.glob("conf/method/*.yaml")) or sorted(tree.rglob("conf/method/*.yaml"))
    return [path.stem for path in paths]


def group_decode(out: dict) -> None:
    names = method_names()
    out["decode/methods"] = " ".join(names)
    configs = method_configs(names)
    for name in names:
        if name not in configs:
            out[f"decode/{name}/FAILED"] = "a method that this script does not know; add it to method_configs"

    def of_method(name: str) -> dict:
        results: dict = {}
        for variant, settings in configs[name].items():
            for scheme, batches, temperatures in PLAN.get(variant, SHORT):
                config = None if settings is None else {"method": name, **settings, **SCHEMES[scheme]}
                if config is None and scheme != "standard":
                    continue
                decoded(results, f"decode/{name}{'-' if variant else ''}{variant}/{scheme}", config, batches, temperatures)
        return results

    for name in configs:
        guarded(out, f"decode/{name}", lambda name=name: out.update(forked(f"decode/{name}", lambda: of_method(name))))

    def adaptive() -> dict:
        results: dict = {}
        for label in ("ngram", "suffix", "eagle3", "mlp-prob", "peagle-prob", "draft_model-self", "hybrid"):
            name, _, variant = label.partition("-")
            if name not in configs:
                continue
            for how, more in ADAPTIVE.items():
                scheme = "match" if how in ("auto", "schedule") else "standard"
                config = {"method": name, **configs[name][variant], **more, **SCHEMES[scheme]}
                batches = (1, 4) if label in ("ngram", "mlp-prob") and how in ("auto", "verify") else (4,)
                decoded(
                    results,
                    f"decode/adaptive/{label}/{how}-{scheme}",
                    config,
                    batches,
                    (0,) if how in ("both", "schedule_file") else (1.0,),
                )
        return results

    guarded(out, "decode/adaptive", lambda: out.update(forked("decode/adaptive", adaptive)))

    def architectures() -> dict:
        from specdec import LLM, SamplingParams, hub

        results: dict = {}
        for arch in ("qwen2", "qwen3", "mistral", "gemma2", "gemma3"):
            hub.resolve(f"tiny-{arch}")
            for label, config in {
                "none": None,
                "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
                "self": {"method": "draft_model", "model": f"tiny-{arch}", "num_speculative_tokens": 3},
            }.items():
                decoded(
                    results,
                    f"decode/arch/{arch}/{label}",
                    config,
                    batches=(4,),
                    temperatures=(0,) if config else (0, 1.0),
                    model=f"tiny-{arch}",
                )
        for label, config in {
            "none": None,
            "eagle3": {"method": "eagle3", "model": "train-eagle3", "num_speculative_tokens": 3},
        }.items():
            decoded(results, f"decode/bfloat16/{label}", config, batches=(4,), dtype="bfloat16")
        llm = LLM(
            "tiny",
            dtype="float32",
            device="cpu",
            speculative_config={"method": "suffix"},
            seed=1,
            prefill_chunk_size=7,
            max_model_len=96,
        )
        talks = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": prompt}] for prompt in PROMPTS[:4]]
        for place, answer in enumerate(llm.chat(talks, SamplingParams(temperature=0.8, max_tokens=20), use_tqdm=False)):
            results[f"decode/chat/r{place}/prompt"] = sha([int(token) for token in answer.prompt_token_ids])
            results[f"decode/chat/r{place}/tokens"] = sha([int(token) for token in answer.outputs[0].token_ids])
        return results

    guarded(out, "decode/arch", lambda: out.update(forked("decode/architectures, bfloat16, chat", architectures)))

    # the command line: complete records, of every step
    hidden = "method.draft_model_config={hf_config: {eagle_aux_hidden_state_layer_ids: [1, 4]}}"
    lines = {name: (f"method={name}",) for name in names}
    lines |= {name: (f"checkpoint=train-{name}",) for name in FAMILIES if name in lines}
    lines["custom_class"] = ("method=custom_class", "method.model=numbers_custom.Mine")
    lines["extract_hidden_states"] = ("method=extract_hidden_states", hidden, "method.shared_storage_path=run-states")
    lines["hybrid"] = ("method=hybrid", "checkpoint=train-eagle3", "method.proposers.0.prompt_lookup_min=1")
    lines["ngram"] += ("sampling.temperature=0.8", "rejection=match", "method.prompt_lookup_min=1")
    lines["suffix"] += ("sampling.temperature=0.8", "rejection=block", "sampling.top_p=0.9")
    lines["eagle3"] += ("sampling.temperature=0.8", "method.draft_sample_method=probabilistic")
    lines["synthetic"] = ("method=ngram", "rejection=synthetic", "rejection.synthetic_acceptance_rates=[0.8,0.5,0.3,0.2,0.1]")
    lines["auto"] = ("checkpoint=train-mlp", "method.num_speculative_tokens=auto", "cost_table=cost.json")
    lines["json"] = ('speculative_config={"method": "draft_model", "model": "tiny", "num_speculative_tokens": 3}',)
    lines["scheduled"] = ("checkpoint=train-mtp", "num_speculative_tokens_per_batch_size=[[1,1,3],[2,32,1]]")
    for name, more in lines.items():
        key = f"decode/run/{name}"
        out_dir = f"run-{name}"
        arguments = (
            *TINY,
            "task=jsonl",
            "task.path=tasks.jsonl",
            "max_batch_size=2",
            "sampling.max_tokens=12",
            f"out_dir={out_dir}",
        )
        if not called(out, key, "eval/run.py", *arguments, "sampling.logit_bias={97: 30.0, 98: 30.0, 99: 30.0}", *more):
            continue
        for file in ("requests", "baseline"):
            path = Path(out_dir, f"{file}.jsonl")
            for row in rows(path) if path.exists() else ():
                where = f"{key}/{file}/{row['id']}"
                out[f"{where}/tokens"] = sha(row["output_token_ids"])
                out[f"{where}/row"] = sha({name: row.get(name) for name in ROW})
                out[f"{where}/steps"] = " ".join(map("{}/{}+{}".format, row["accepted"], row["drafted"], row["emitted"]))
                out[f"{where}/who"] = sha([row.get("batch_size"), row.get("proposer")])
        summary = json.loads(Path(out_dir, "summary.json").read_text())
        for part in ("overall", "categories"):
            flat(out, f"{key}/summary/{part}", summary.get(part))
        for part in ("lossless", "lossless_short", "lossless_said", "num_speculative_tokens"):
            out[f"{key}/summary/{part}"] = summary.get(part)
    if Path("run-states").exists():
        directory(out, "decode/run/extract_hidden_states/files", "run-states")
    arguments = (
        *TINY,
        "task=jsonl",
        "task.path=tasks.jsonl",
        "max_batch_size=2",
        "sampling.max_tokens=12",
        "request_rate=inf",
        "out_dir=load",
    )
    if called(out, "decode/load", "eval/load.py", *arguments, "method=ngram"):
        for row in rows("load/requests.jsonl"):
            out[f"decode/load/{row['id']}/tokens"] = sha(row["output_token_ids"])


# ------------------------------------------------------------------------------------------------------------- doors


def work(tree: str, out: str, only: list) -> None:
    import accelerate  # noqa: F401  what every process would import, and nothing of the tree
    import hydra  # noqa: F401
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401

    assert not [name for name in sys.modules if name == "specdec" or name.startswith("specdec.")]
    torch.set_num_threads(1)
    sys.pycache_prefix = os.path.abspath("pycache")  # nothing is written into the tree
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {tree}", file=sys.stderr, flush=True)
    make_material()
    results: dict = dict(MATERIAL)
    for name in GROUPS:
        if name in only:
            began = time.time()
            before = len(results)
            globals()[f"group_{name}"](results)
            print(f"{name}: {len(results) - before} keys, {time.time() - began:.0f} s", file=sys.stderr, flush=True)
            results["groups"] = " ".join(sorted({*results.get("groups", "").split(), name}))
            Path(out).write_text(json.dumps(dict(sorted(results.items())), indent=0) + "\n")  # what is there, group by group
    bad = [key for key in results if key.endswith("/FAILED")]
    if bad:
        print(f"{len(bad)} FAILED: {', '.join(bad)}", file=sys.stderr)
        sys.exit(3)


def differ(a: str, b: str, values: bool) -> int:
    """Keys that are not the same: `-` only before, `+` only after, `!` other value. A group that one of the files was not made
    with (--only) is not compared, and said to be so on stderr."""
    before = json.loads(Path(a).read_text())
    after = json.loads(Path(b).read_text())
    groups_before, groups_after = (set(side.pop("groups", "").split()) for side in (before, after))
    for name in sorted(groups_before ^ groups_after):
        print(f"note: {name} is in one file only, and not compared", file=sys.stderr)
        for side in (before, after):
            for key in [key for key in side if key.startswith(f"{name}/")]:
                del side[key]
    if not groups_before & groups_after:
        print("nothing to compare: no group is in both files", file=sys.stderr)
        return 1
    count = 0
    for key in sorted(before.keys() | after.keys()):
        mark = "-" if key not in after else "+" if key not in before else "!"
        if mark == "!" and json.dumps(before[key]) == json.dumps(after[key]):
            continue
        count += 1
        print(f"{mark} {key}" + (f": {before.get(key)!r} -> {after.get(key)!r}" if values else ""))
    print(f"{count} keys differ of {len(before)} and {len(after)}", file=sys.stderr)
    return int(count > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description="The numbers of a checkout; see the top of this file.")
    parser.add_argument("paths", nargs=2, metavar="TREE OUT.json | A.json B.json")
    parser.add_argument("--diff", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--only", action="append", choices=GROUPS)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.diff:
        return differ(*args.paths, args.list)
    only = args.only or list(GROUPS)
    if args.work:
        work(*args.paths, only)
        return 0
    tree = Path(args.paths[0]).resolve()
    out = Path(args.paths[1]).resolve()
    if not (tree / "train" / "eagle.py").exists() or not (tree / "eval" / "run.py").exists():
        parser.error(f"{tree} is no tree of the project: no train/eagle.py, eval/run.py")
    if not out.parent.is_dir():
        parser.error(f"{out.parent}: no such directory")
    scratch = Path(tempfile.mkdtemp(prefix="numbers-")).resolve()
    if args.keep:
        scratch.rmdir()
        scratch = args.keep.resolve()
        scratch.mkdir(parents=True)
    drop = (
        "SPECDEC_",
        "HYDRA_",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "TORCHELASTIC",
        "ACCELERATE_",
        "ATEN_",
        "MKL_",
        "DNNL_",
        "ONEDNN_",
    )
    env = {key: value for key, value in os.environ.items() if not key.startswith(drop)}
    env |= {
        "PYTHONPATH": str(tree), "NUMBERS_TREE": str(tree), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "COLUMNS": "120",
        "SPECDEC_CACHE": str(scratch / "cache"), "HF_HOME": str(scratch / "hf"), "MPLCONFIGDIR": str(scratch / "mpl"),
        "TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    began = time.time()
    command = [sys.executable, "-P", str(Path(__file__).resolve()), str(tree), str(out), "--work"]
    command += [word for name in only for word in ("--only", name)]
    try:
        code = subprocess.run(command, cwd=scratch, env=env).returncode
    finally:
        if not args.keep:
            shutil.rmtree(scratch, ignore_errors=True)
    print(f"{'written to ' + str(out) if out.exists() else 'nothing written'}; {time.time() - began:.0f} s", file=sys.stderr)
    return 2 if code == 1 else code


if __name__ == "__main__":
    sys.exit(main())
