"""Write a drafter as an engine loads it, check it against the engine's rules, and describe it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.padding import Padding
from rich.text import Text

from specdec import checkpoint, lock, method
from specdec.checked import first_line
from specdec.checkpoint import causal_lm, hf_common, lint, native, speculators
from specdec.checkpoint.native import Checkpoint
from specdec.config.pages import Share
from specdec.files import read_json_object, writing
from specdec.measure.report import console
from specdec.model.target import CausalLM, choose_dtype
from specdec.sharing import measured
from specdec.sharing.card import HUB_ID, Shared, model_card
from specdec.sharing.measured import Measurement


def share(cfg: Share) -> None:
    """Share the drafter of `cfg.checkpoint`. Raises ValueError, one line, for what cannot be shared as asked."""
    for key in ("checkpoint", "out_dir"):
        if getattr(cfg, key) is None:
            raise ValueError(f"{key} is missing; give {key}=DIR, or lint=DIR to look at a directory alone")
    assert cfg.checkpoint is not None
    assert cfg.out_dir is not None
    if cfg.push is not None and not HUB_ID.fullmatch(cfg.push):
        raise ValueError(f"push={cfg.push!r} is no repository of the hub; give org/name")
    out = Path(cfg.out_dir)
    lock.acquire(out.with_name(f".{out.name}.lock"), f"out_dir={out}")
    if out.exists() or out.is_symlink():
        raise ValueError(f"out_dir={out} is there already; nothing is overwritten, so give another directory")

    source = native.find(cfg.checkpoint, cfg.revision).resolve()
    method_name = method.of_checkpoint(source)
    is_lm = method_name in causal_lm.WRITES
    measurement = measured.of_evaluation(Path(cfg.eval), source, method_name) if cfg.eval is not None else None
    drafter = causal_lm.load(source, None, method_name) if is_lm else checkpoint.load(source)
    target = _target(cfg, drafter, source, is_lm)
    if cfg.dtype is not None:
        dtype = choose_dtype(cfg.dtype, torch.device("cpu"))
        cast = {key: x.to(dtype) if x.is_floating_point() else x for key, x in (drafter.tensors or {}).items()}
        drafter = replace(drafter, tensors=cast)
    measurement = measurement or measured.of_training(source)
    note = None
    measured_on = measurement.conditions.get("target") if measurement is not None else None
    if measured_on is not None and drafter.target.get("name") not in (None, measured_on):
        if cfg.eval is not None or not is_lm:
            run = f"eval={cfg.eval}" if cfg.eval is not None else "its training run"
            trained_for = drafter.target["name"]
            raise ValueError(f"{run} measured on {measured_on}, and the drafter is for {trained_for}; give its own run")
        note = f"Its training run measured on {measured_on}, which says nothing about {drafter.target['name']}."
        measurement = None
    provenance = {**measured.read_provenance(source), "shared": native.provenance(checkpoint=cfg.checkpoint)}
    identity = provenance.get("identity") or {}
    if is_lm and "name" not in drafter.target and identity.get("target"):
        drafter.target["name"] = identity["target"]  # a causal LM itself does not record its target
    count = _num_speculative_tokens(cfg.num_speculative_tokens, drafter, measurement, identity, source)
    provenance = measured.without_directories(provenance)
    shared = Shared(drafter, cfg.format, count, str(out), cfg.push, cfg.serve_target)

    temporary = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process: only the holder of the lock is here
    temporary.mkdir()
    try:
        with writing(out):
            if cfg.format != native.NAME:
                checkpoint.write(drafter, temporary, cfg.format, target, cfg.serve_target, count)
                (temporary / "provenance.json").write_text(json.dumps(provenance, indent=1, default=str) + "\n")
                engine = checkpoint.lint_engine(method_name, cfg.format)
                if not show_lint(temporary, target.name if target is not None else None, engine, str(out)):
                    raise ValueError(f"{cfg.format} would not load this drafter, for the reasons above; nothing was written")
            elif is_lm:
                causal_lm.save(temporary, drafter, source, provenance, "")
            else:
                native.save(temporary, drafter, provenance, "")
            (temporary / "README.md").write_text(model_card(shared, temporary, measurement, provenance, note))
            temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    console.show(f"written to {out}; serve it with:")
    print(shared.serve_command(cfg.format, is_local=True))  # not wrapped, so that it can be copied
    if cfg.push is not None:
        console.show(f"uploaded: {upload(out, cfg.push, cfg.private)}")


def _target(cfg: Share, drafter: Checkpoint, source: Path, is_lm: bool) -> CausalLM | None:
    """The loaded target, if it is named or needed; its facts become the drafter's. Raises ValueError for another than the
    drafter's, and if it is needed and not known."""
    name = cfg.target
    if name is None and checkpoint.needs_target(drafter, cfg.format):
        name = drafter.target.get("name")
    if name is None:
        if drafter.copies:
            raise ValueError(f"{source} holds {min(drafter.copies)}, which must be the target's; give target= to compare them")
        return None
    target = CausalLM(name, "float32", "cpu")
    if not is_lm:
        drafter.check(drafter.method, target)
    drafter.target = native.facts(target) | {"name": drafter.target.get("name", target.name)}
    return target


def _num_speculative_tokens(
    requested: int | None, drafter: Checkpoint, measurement: Measurement | None, identity: dict[str, Any], source: Path
) -> int:
    """How many tokens to draft, the same in every format: as requested, as measured, as in training, as a drafter of the
    `speculators` package has it, or the default. Raises ValueError for more than the drafter can.

    requested: on the command line.
    measurement: of the drafter's acceptance.
    identity: of its training run.
    source: its directory.
    """
    facts = method.facts(drafter.method)
    key = facts.max_draft_key
    limit = hf_common.integer(drafter.config, key, drafter.name) if key and drafter.config.get(key) is not None else None
    if facts.max_draft_of is not None:
        limit = facts.max_draft_of(drafter.config)
    if limit == 1 and facts.reuses_one_module:
        limit = None
    if requested is not None and limit is not None and requested > limit:
        raise ValueError(
            f"num_speculative_tokens={requested} is over the {limit} of this drafter ({key or 'block_size'}); lower it"
        )
    candidates = (
        requested,
        measurement.conditions.get("num_speculative_tokens") if measurement is not None else None,
        (identity.get("eval") or {}).get("num_speculative_tokens"),
        speculators.proposals(read_json_object(source / "config.json")).get("speculative_tokens"),
        limit if facts.defaults_to_max else speculators.NUM_SPECULATIVE_TOKENS,
    )
    count = next(count for count in candidates if isinstance(count, int) and count >= 1)
    return min(count, limit or count)


def show_lint(directory: Path, target: str | None, engine: str | None = None, name: str | None = None) -> bool:
    """Print what the engines would make of a directory. Returns whether the engine, or any of them, would load it.

    target: directory or name of the target, to compare with.
    engine: of `lint.ENGINES`.
    name: the directory's name in what is printed.
    """
    findings = lint.check(directory, target)
    verdict = lint.loads(findings)
    console.show(f"{name or directory}")
    for key, does_load in verdict.items():
        console.show(Text(f"  {lint.ENGINES[key]}: {'loads' if does_load else 'does not load'}", style="bold"))
        for finding in findings:
            if finding.engine == key:
                text = finding.text.replace(str(directory), name or str(directory))
                console.show(Padding(f"{finding.severity} ({finding.rule}): {text}", (0, 0, 0, 4), expand=False))
    return verdict.get(engine, False) if engine else any(verdict.values())


def upload(directory: Path, repository: str, private: bool) -> str:
    """Upload a directory, making the repository if there is none; returns its address."""
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        address = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=directory, commit_message="A drafter, by specdec")
    except Exception as error:  # no network, no token, no permission: each has its own errors, of several lines
        raise ValueError(
            f"push={repository}: not uploaded ({first_line(error)}); {directory} is written: log in (hf auth login) and push it"
        ) from None
    return str(address)
