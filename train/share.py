"""Share a drafter: write it as an engine loads it, hold it against the engines' rules, and say what it is and how to serve it.

    python train/share.py checkpoint=outputs/eagle3_demo-llama-demo format=vllm out=shared
    python train/share.py checkpoint=DIR format=speculators out=shared serve_target=meta-llama/Llama-3.1-8B-Instruct
    python train/share.py checkpoint=DIR out=shared eval=outputs/eagle3-demo push=org/name
    python train/share.py checkpoint=org/their-drafter format=native out=mine target=meta-llama/Llama-3.1-8B-Instruct
    python train/share.py lint=DIR target=meta-llama/Llama-3.1-8B-Instruct

Writes out/config.json, model.safetensors, provenance.json and README.md. Exit code 1 if the engine would not load it.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec import lock, script

if TYPE_CHECKING:
    from specdec.config.pages import Share

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
SHOWN = ("mean_acceptance_length", "tokens_per_step", "acceptance_rate_per_position", "speedup")


def run(cfg: Share) -> None:
    if cfg.lint is not None:
        for key in ("checkpoint", "out", "push", "eval"):
            if getattr(cfg, key) is not None:
                raise ValueError(f"lint={cfg.lint} writes nothing; leave {key}= out")
        from specdec.checkpoint import native

        if not linted(native.find(cfg.lint, cfg.revision), cfg.target):
            sys.exit(1)
        return
    for key in ("checkpoint", "out"):
        if getattr(cfg, key) is None:
            raise ValueError(f"{key} is missing; give {key}=DIR, or lint=DIR to look at a directory alone")
    if cfg.push is not None and not HUB_ID.fullmatch(cfg.push):
        raise ValueError(f"push={cfg.push!r} is no repository of the hub; give org/name")
    out = Path(cfg.out)
    lock.acquire(out.with_name(f".{out.name}.lock"), f"out={out}")
    if out.exists() or out.is_symlink():
        raise ValueError(f"out={out} is there already; nothing is overwritten, so give another directory")
    measured = evaluated(Path(cfg.eval)) if cfg.eval is not None else None

    from specdec import checkpoint, method
    from specdec.checkpoint import causal_lm, native
    from specdec.files import writing
    from specdec.measure.report import console
    from specdec.model.target import CausalLM, choose_dtype

    source = native.find(cfg.checkpoint, cfg.revision).resolve()
    kind = method.of_checkpoint(source)
    lm = kind in causal_lm.WRITES
    if measured is not None:
        must_be_of(measured, source, kind, cfg.eval)
    made = causal_lm.load(source, None, kind) if lm else checkpoint.load(source)
    target, given = None, cfg.target or (made.target.get("name") if checkpoint.needs_target(made, cfg.format) else None)
    if given is not None:
        target = CausalLM(given, "float32", "cpu")
        if not lm:
            made.check(made.method, target)
        made.target = native.facts(target) | {"name": made.target.get("name", target.name)}
    if made.copies and target is None:
        raise ValueError(f"{source} holds {min(made.copies)}, which must be the target's; give target= to compare them")
    if cfg.dtype is not None:
        import torch

        dtype = choose_dtype(cfg.dtype, torch.device("cpu"))
        cast = {key: x.to(dtype) if x.is_floating_point() else x for key, x in (made.tensors or {}).items()}
        made = replace(made, tensors=cast)
    measured = measured or trained(source)
    note = None
    if measured and (name := measured.get("target")) and made.target.get("name") not in (None, name):
        if cfg.eval is not None or not lm:
            what = f"eval={cfg.eval}" if cfg.eval is not None else "its training run"
            raise ValueError(f"{what} measured on {name}, and the drafter is for {made.target['name']}; give its own run")
        measured, note = None, f"Its training run measured on {name}, which says nothing about {made.target['name']}."
    before = provenance_of(source, cfg.checkpoint)
    if lm and "name" not in made.target and (name := (before.get("identity") or {}).get("target")):
        made.target["name"] = name  # a model that stands on its own does not say whom it drafts for
    told = public(before)
    count = drafted(made, cfg, measured or {}, before, source)

    temporary = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed: whoever has the lock is alone here
    temporary.mkdir()
    try:
        with writing(out):
            if cfg.format == "native" and lm:
                causal_lm.save(temporary, made, source, told, "")
            elif cfg.format == "native":
                native.save(temporary, made, told, "")
            else:
                checkpoint.write(made, temporary, cfg.format, target, cfg.serve_target, count)
                (temporary / "provenance.json").write_text(json.dumps(told, indent=1, default=str) + "\n")
                if not linted(temporary, given, checkpoint.lint_engine(made.method, cfg.format), str(out)):
                    raise ValueError(f"{cfg.format} would not load this drafter, for the reasons above; nothing was written")
            (temporary / "README.md").write_text(card(made, cfg, measured, told, temporary, count, note))
            temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    console.show(f"written to {out}; serve it with:")
    print(serve(made, cfg, count, cfg.push or str(cfg.out), here=True))  # not wrapped, so that it can be copied
    if cfg.push is not None:
        console.show(f"uploaded: {push(out, cfg.push, cfg.private)}")


# --------------------------------------------------------------------------------------------------------------- lint


def linted(directory: Path, target: str | None, engine: str | None = None, name: str | None = None) -> bool:
    """Show what the engines would make of a directory; whether the engine, or any of them, would load it."""
    from rich.table import Table

    from specdec.checkpoint import lint
    from specdec.measure.report import console

    findings = lint.check(directory, target)
    verdict = lint.loads(findings)
    grid = Table(title=f"{name or directory}", title_justify="left", header_style="bold")
    for column in ("engine", "", "rule", "why, and what to do"):
        grid.add_column(column, no_wrap=column != "why, and what to do")
    for key, label in lint.ENGINES.items():
        if key not in verdict:
            continue
        own = [found for found in findings if found.engine == key]
        grid.add_row(label, "loads" if verdict[key] else "does not", "", "", style="bold")
        for found in own:
            grid.add_row("", found.severity, found.rule, found.text.replace(str(directory), name or str(directory)))
    console.show(grid)
    return verdict.get(engine, False) if engine else any(verdict.values())


# -------------------------------------------------------------------------------------------------------- what is known


def evaluated(directory: Path) -> dict[str, Any]:
    """The numbers of an eval/run.py."""
    what = "give the out_dir of an eval/run.py that has finished"
    from specdec.measure import records

    summary = records.read_summary(directory, what)
    overall = summary["overall"]
    if "mean_acceptance_length" not in overall:
        raise ValueError(f"{directory / 'summary.json'} holds no acceptance; {what}")
    keys = (
        "target", "dtype", "rejection", "method", "speculative_config", "num_speculative_tokens", "sampling", "lossless_verdict",
        "environment",
    )  # fmt: skip
    return {
        "how": "eval/run.py",
        **{key: summary.get(key) for key in keys},
        "overall": {key: overall.get(key) for key in SHOWN},
        "categories": {name: {key: row.get(key) for key in SHOWN} for name, row in (summary.get("categories") or {}).items()},
    }


def must_be_of(measured: dict[str, Any], source: Path, kind: str, given: str) -> None:
    """Raise ValueError unless it was this drafter that was evaluated: by its own directory, a link to it, or its run's."""
    from specdec import method
    from specdec.checkpoint import native

    spec = measured["speculative_config"] if isinstance(measured["speculative_config"], dict) else {}
    if measured["method"] != kind:
        raise ValueError(f"eval={given} is of method {measured['method']!r}, and {source} is {kind!r}; give its own run")
    name = spec.get("model") or (measured["target"] if method.facts(kind).served_in_target else None)
    try:
        directory = Path(str(name)).expanduser().resolve()
        same = directory == source.parent.parent or native.find(str(name), spec.get("revision")).resolve() == source
    except ValueError:
        same = False
    if not same:
        raise ValueError(f"eval={given} is of the drafter {name}, and the checkpoint is {source}; give its own run")


def trained(source: Path) -> dict[str, Any] | None:
    """The numbers that a training run measured for this checkpoint on its held-out prompts; None where there are none."""
    out_dir = source.parent.parent
    if not (out_dir / "metrics.jsonl").exists() or not (source / "provenance.json").exists():
        return None
    from specdec.measure import records

    told = provenance_in(source)
    rows = records.rows_in(out_dir / "metrics.jsonl")
    row = next((row for row in rows if row.get("step") == told.get("step") and "mean_acceptance_length" in row), None)
    if row is None:
        return None
    records.check_numbers(row, f"{out_dir / 'metrics.jsonl'}, step {told.get('step')}")
    identity = told.get("identity") or {}
    return {
        "how": f"train/, held-out prompts, step {told.get('step')}",
        "target": identity.get("target"),
        "dtype": identity.get("dtype"),
        "num_speculative_tokens": (identity.get("eval") or {}).get("num_speculative_tokens"),
        "overall": {key: row.get(key) for key in SHOWN},
        "categories": {},
    }


def provenance_of(source: Path, given: str) -> dict[str, Any]:
    """That of the checkpoint, and how it came here."""
    from specdec.checkpoint import native

    return {**provenance_in(source), "shared": native.provenance(checkpoint=given)}


def provenance_in(source: Path) -> dict[str, Any]:
    """What a checkpoint says of where it comes from; nothing where it says nothing."""
    from specdec.files import read_json_object

    path, fix = source / "provenance.json", "the checkpoint is not whole"
    told = read_json_object(path, fix) if path.exists() else {}
    identity = told.get("identity")
    if not isinstance(identity, dict | None) or not isinstance((identity or {}).get("eval"), dict | None):
        raise ValueError(f"{path}: identity is no object as training writes it; {fix}")
    return told


def public(value: Any) -> Any:
    """Without the directories of this machine: of an absolute path the last part stays."""
    if isinstance(value, dict):
        return {key: public(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [public(inner) for inner in value]
    return re.sub(r"(?<![\w.:/-])(~|/)[^\s,\]}'\"]*/", "", value) if isinstance(value, str) else value


# --------------------------------------------------------------------------------------------------------- model card


def target_name(made: Any, cfg: Share) -> str:
    """What people call the target."""
    from specdec.checkpoint import hf_common

    return cfg.serve_target or hf_common.public_name(made) or "TARGET"


def served(made: Any, cfg: Share, here: bool) -> str:
    """The target in a serve command: a hub id or a directory, since engines know nothing of our embedded names. here: as this
    machine has it; else, for a card, TARGET stands for what is no hub id."""
    from specdec import hub

    name = made.target.get("name") or ""
    if cfg.format == "native" or cfg.serve_target is not None:
        return target_name(made, cfg)
    directory = Path(name).expanduser() if name else None
    if directory is not None and not directory.is_dir():
        if HUB_ID.fullmatch(name):
            return str(name)
        made_here = name in hub.EMBEDDED and (hub.cache_dir() / name).is_dir()
        directory = hub.resolve(name) if made_here or name.startswith(("tiny", "random-")) else None
    return str(directory) if here and directory is not None else "TARGET"


def drafted(made: Any, cfg: Share, measured: dict[str, Any], before: dict[str, Any], source: Path) -> int:
    """How many tokens to draft, the same in every format: as given, as measured, as in training, as an imported drafter says,
    or as is usual. Raises ValueError for more than the drafter can."""
    from specdec import method
    from specdec.checkpoint import hf_common, speculators

    facts = method.facts(made.method)
    key = facts.max_draft_key or ""
    most = hf_common.integer(made.config, key, made.name) if made.config.get(key) is not None else None
    if most == 1 and facts.one_is_no_limit:
        most = None
    given = cfg.num_speculative_tokens
    if given is not None and most is not None and given > most:
        raise ValueError(f"num_speculative_tokens={given} is over the {most} of this drafter ({key}); lower it")
    in_training = ((before.get("identity") or {}).get("eval") or {}).get("num_speculative_tokens")
    usual = most if facts.drafts_max else speculators.NUM_SPECULATIVE_TOKENS
    candidates = (given, measured.get("num_speculative_tokens"), in_training, imported(source), usual)
    count = next(count for count in candidates if isinstance(count, int) and count >= 1)
    return min(count, most or count)


def imported(source: Path) -> int | None:
    """The number that a drafter in the `speculators` format comes with."""
    config = json.loads((source / "config.json").read_text())
    told = config.get("speculators_config")
    methods = told.get("proposal_methods") if isinstance(told, dict) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    return first.get("speculative_tokens") if isinstance(first, dict) else None


def serve(made: Any, cfg: Share, count: int, name: str, here: bool) -> str:
    """The command that serves the drafter, which is found under that name. here: on this machine."""
    from specdec import method

    facts = method.facts(made.method)
    model = shlex.quote(name)
    target = model if facts.served_in_target and cfg.format != "native" else shlex.quote(served(made, cfg, here))
    if cfg.format == "native":
        return f"python eval/run.py method={made.method} checkpoint={model} model.path={target}"
    if cfg.format == "sglang":
        command = f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {facts.serving['sglang']}"
        if facts.served_in_target:
            return command
        return (
            f"{command} --speculative-draft-model-path {model} --speculative-num-steps {count} --speculative-eagle-topk 1 "
            f"--speculative-num-draft-tokens {count + 1}"
        )
    spec: dict[str, Any] = {"method": facts.serving["vllm"]}
    if not facts.served_in_target:
        spec["model"] = name
    spec["num_speculative_tokens"] = count
    if facts.parallel_of is not None:
        spec["parallel_drafting"] = True
    return f"vllm serve {target} --speculative-config {shlex.quote(json.dumps(spec))}"


def card(
    made: Any,
    cfg: Share,
    measured: dict[str, Any] | None,
    told: dict[str, Any],
    directory: Path,
    count: int,
    note: str | None,
) -> str:
    """The README.md of what is shared."""
    from specdec import checkpoint, method
    from specdec.checkpoint import lint

    target = target_name(made, cfg)
    head = ["---", *([f"base_model: {target}"] if HUB_ID.fullmatch(target) else [])]
    head += ["tags:", "- speculative-decoding", f"- {made.method}", "---", ""]
    facts = {key: value for key, value in made.target.items() if key != "name"}
    shape = {key: value for key, value in made.config.items() if key not in ("geometry", "hf_config")}
    shape_said = f" ({', '.join(f'{key} {value}' for key, value in facts.items())})" if facts else ""
    parts = [
        *head,
        f"# {made.method} drafter for {target}",
        "",
        f"Drafts tokens that {target}{shape_said} verifies. "
        + ("Any target with this vocabulary will do." if "hf_config" in made.config else "It is right for that target alone."),
        "",
        "## Serve",
        "",
    ]
    engines = [cfg.format]
    if cfg.format in ("vllm", "sglang") and checkpoint.lint_engine(made.method, cfg.format) == cfg.format:
        verdict = lint.loads(lint.check(directory))
        engines = [engine for engine in ("vllm", "sglang") if verdict[engine]]
    for engine in engines:
        name = cfg.push or Path(cfg.out).name
        parts += ["```", serve(made, cfg.model_copy(update={"format": engine}), count, name, here=False), "```", ""]
    if cfg.format != "native" and served(made, cfg, here=False) == "TARGET" and not method.facts(made.method).served_in_target:
        parts += [f"TARGET: the directory or hub id of {target}." if target != "TARGET" else "TARGET: your target.", ""]
    if (note_on_engines := method.facts(made.method).serving_note) and cfg.format != "native":
        parts += [note_on_engines, ""]
    parts += ["## Acceptance", "", *acceptance(measured), *([note] if note else []), "", "## Drafter", ""]
    parts += [f"- {key}: {value}" for key, value in shape.items()]
    parts += [f"- {key}: {value}" for key, value in (made.config.get("geometry") or {}).items()]
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            parts.append(f"- {path.name}: sha256 {hashlib.file_digest(file, 'sha256').hexdigest()}")
    parts += ["", "## Provenance", ""]
    identity = told.get("identity") or {}
    listed = {
        "trained with": " ".join(told.get("command") or []) or "not told; imported",
        "step": told.get("step"),
        "data": identity.get("data"),
        "seed": identity.get("seed"),
        "code": told.get("git_revision"),
        "torch": told.get("torch"),
        "written with": " ".join(told["shared"]["command"]),
    }
    parts += [f"- {key}: {value}" for key, value in listed.items() if value is not None]
    return "\n".join([*parts, "", "More in provenance.json.", ""])


def acceptance(measured: dict[str, Any] | None) -> list[str]:
    """What was measured, as lines of a model card."""
    if measured is None:
        return ["Not measured. Measure it: `python eval/run.py`, and share again with `eval=` its directory."]
    known = ("target", "dtype", "rejection", "num_speculative_tokens", "sampling")
    how = ", ".join(f"{key} {measured[key]}" for key in known if measured.get(key) is not None)
    lines = [f"Measured by {measured['how']}: {how}.", ""]
    lines += [
        "| prompts | mean acceptance length | tokens per step | acceptance per position | speedup |",
        "|---|---|---|---|---|",
    ]
    for name, row in {**measured["categories"], "all": measured["overall"]}.items():
        rates = " ".join(f"{rate:.2f}" for rate in row.get("acceptance_rate_per_position") or [] if rate is not None)
        cells = [
            number(row.get("mean_acceptance_length")),
            number(row.get("tokens_per_step")),
            rates or "-",
            number(row.get("speedup")),
        ]
        lines.append(f"| {' | '.join([name, *cells])} |")
    lines += ["", "Mean acceptance length counts the bonus token, over steps with a draft."]
    if said := measured.get("lossless_verdict"):
        lines.append(f"Lossless: {said}.")
    return lines


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


# --------------------------------------------------------------------------------------------------------------- hub


def push(directory: Path, repository: str, private: bool) -> str:
    """Upload a directory, making the repository if there is none; returns its address."""
    from huggingface_hub import HfApi

    from specdec.checked import first_line

    try:
        api = HfApi()
        address = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=directory, commit_message="A drafter, by specdec")
    except Exception as error:  # no network, no token, no right: each has errors of its own, of several lines
        raise ValueError(
            f"push={repository}: not uploaded ({first_line(error)}); {directory} is whole: log in (hf auth login) and push it"
        ) from None
    return str(address)


if __name__ == "__main__":
    with script.one_line():
        from specdec import config

        config.launch("share", run)
