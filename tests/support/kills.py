"""Kills at random moments: what had finished is there, and what comes of it in the end is what an uninterrupted run gives.

    python tests/support/kills.py                                   # 20 of every kind, with the seed 0: `make kills`
    python tests/support/kills.py --kinds train share --kills 5 --seed 3

Seven kinds: a training run, the same while a checkpoint is evaluated, prepare, extract, eval/run, eval/load and share, all on
tiny models. Of three signals two are SIGKILL, one is SIGTERM or SIGINT; of the runs that are resumed a third is killed again.
A run under load is not resumed: there, its lines are readable, and a new run in another directory works. Prints a line for
every kind and for everything that is wrong, and ends with exit code 1 if anything is.

torch is imported once; every run is a fork of this process, so that a kill takes a second and not ten.
"""

from __future__ import annotations

from specdec import script

with script.one_line():
    import argparse
    import gc
    import json
    import math
    import os
    import random
    import runpy
    import shutil
    import signal
    import sys
    import tempfile
    import time
    import traceback
    from collections import Counter
    from collections.abc import Callable, Iterator
    from dataclasses import dataclass, field
    from pathlib import Path
    from typing import Any

    import torch
    from safetensors.torch import load_file

    from specdec import artifact, run_dir
    from specdec.checkpoint import native
    from specdec.config import CONF
    from specdec.measure import records
    from specdec.method import eagle3, ngram, suffix  # noqa: F401
    from specdec.model.target import CausalLM

ROOT = CONF.parent
CODES = {signal.SIGKILL: -signal.SIGKILL, signal.SIGINT: 130, signal.SIGTERM: 143}
LIMIT_S = 300
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "ran", "to", "see", "big", "red", "dogs", "in", "my", "old", "town"]


@dataclass
class Ended:
    """A process that ended. seconds: how long it ran."""

    code: int
    err: str
    seconds: float


def fork(path: str, arguments: list[str], log: Path) -> int:
    """A process that runs a script of the project. Returns its id when it begins to."""
    sys.stdout.flush()
    sys.stderr.flush()
    ready, begins = os.pipe()
    if process := os.fork():
        os.close(begins)
        os.read(ready, 1)  # on a busy machine a fork may need longer than the first kill waits
        os.close(ready)
        return process
    code: Any = 1
    try:  # whatever happens, nothing of the caller runs on in the child
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(out, stream)
        sys.argv = [str(ROOT / path), *arguments]
        os.write(begins, b"1")
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
            code = 0
        except SystemExit as ended:
            code = ended.code
            if isinstance(code, str):
                print(code, file=sys.stderr)
                code = 1
        except BaseException:  # what a script lets through
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code or 0)


def wait(process: int, until: Callable[[float], bool]) -> int | None:
    """The exit code, or None where `until` (of the seconds since now) came first."""
    started = time.monotonic()
    while True:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if until(time.monotonic() - started):
            return None
        time.sleep(0.002)


def run(path: str, arguments: list[str], log: Path, when: Callable[[float], bool] | None = None, number: int = 0) -> Ended:
    """Run a script to its end, or send it a signal at a moment and wait for what it does."""
    log.touch()
    process = fork(path, arguments, log)
    started = time.monotonic()
    code = wait(process, when or (lambda seconds: seconds > LIMIT_S))
    if code is None:
        os.kill(process, number or signal.SIGKILL)
        code = wait(process, lambda seconds: seconds > LIMIT_S)
        if code is None:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            raise AssertionError(f"{path} did not end within {LIMIT_S} s of {signal.Signals(number).name}")
    elif when is None:
        number = 0
    return Ended(code, log.read_text(errors="replace"), time.monotonic() - started)


# ------------------------------------------------------------------------------------------------------------- kinds


@dataclass
class Kind:
    """What is killed. command: script and arguments for an output; contents: what must be the same in the end; check: what must
    hold right after a kill; resumed: arguments to go on, or None where that is not possible or nothing has begun."""

    script: str
    arguments: list[str]
    out: str  # the key of the output
    name: str  # of the output
    contents: Callable[[Path], Any]
    check: Callable[[Path], None] = lambda out: None
    has_started: Callable[[Path], bool] = lambda out: (out / run_dir.MARKER).exists()
    resumes: bool = True
    evaluations: bool = False
    seconds: float = math.nan  # of an uninterrupted run
    evaluation_s: float = 0.0
    steps: list[int] = field(default_factory=list)
    amid: int = 0  # kills after which the last checkpoint was still to be evaluated

    def go(self, folder: Path, when: Callable[[float], bool] | None = None, number: int = 0, resume: bool = False) -> Ended:
        more = ["resume=true"] if resume else []
        return run(self.script, [*self.arguments, f"{self.out}={folder / self.name}", *more], folder / "log", when, number)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return list(records.rows_in(path))


def by_id(path: Path, *keys: str) -> dict[str, Any]:
    rows = rows_of(path)
    repeated = [name for name, count in Counter(row["id"] for row in rows).items() if count > 1]
    assert not repeated, f"{path.name}: {len(repeated)} rows are there twice, such as {repeated[0]}"
    return {row["id"]: [row[key] for key in keys] for row in rows}


def no_rests(folder: Path) -> None:
    rests = [str(path.relative_to(folder)) for path in folder.rglob(".*")]
    assert not rests, f"left behind: {', '.join(sorted(rests))}"


CLOCKS = ("tokens_per_s", "features_share", "outside_share")


def trained(out_dir: Path) -> Any:
    no_rests(out_dir)
    rows = [{key: value for key, value in row.items() if key not in CLOCKS} for row in rows_of(out_dir / "metrics.jsonl")]
    summary = json.loads((out_dir / "summary.json").read_text())
    kept = sorted(path.name for path in (out_dir / "checkpoints").iterdir())
    weights = {
        name: [tensor.tolist() for _, tensor in sorted(load_file(out_dir / name / "training" / "state.safetensors").items())]
        for name in ("best", "last")
    }
    links = {name: os.readlink(out_dir / name) for name in ("best", "last")}
    return {
        "rows": rows,
        "best": summary["best"],
        "interrupted": summary["interrupted"],
        "kept": kept,
        "links": links,
    } | weights


def checkpoints_are_complete(out_dir: Path) -> None:
    for path in out_dir.glob("checkpoints/step-*"):
        native.load(path)
        load_file(path / "training" / "state.safetensors")


def to_be_evaluated(out_dir: Path) -> bool:
    """Whether the last checkpoint waits for its evaluation."""
    states = sorted(out_dir.glob("checkpoints/step-*/training/state.json"))
    return bool(states) and ((json.loads(states[-1].read_text())["pending"] or {}).get("evaluate") is True)


def prepared(out: Path) -> Any:
    header = rows_of(out)[0]["header"]
    out.with_name("body").write_text("".join(out.read_text().splitlines(keepends=True)[1:]))
    return header, by_id(out.with_name("body"), "messages", "input_ids", "loss_mask", "temperature")


def extracted(out_dir: Path) -> Any:
    no_rests(out_dir)
    samples: dict[str, Any] = {}
    for path in sorted(out_dir.glob("*.safetensors")):
        for place, token_n in artifact.locations(path):
            assert place.id not in samples, f"sample {place.id} is stored twice"
            artifact.read(place)
            samples[place.id] = place.sha256, token_n.tolist()
    return samples


def evaluated(out_dir: Path) -> Any:
    no_rests(out_dir)
    summary = json.loads((out_dir / "summary.json").read_text())
    kept = summary["lossless_said"], summary["overall"]["num_requests"], summary["overall"]["mean_acceptance_length"]
    return kept, [by_id(out_dir / f"{name}.jsonl", "output_token_ids", "drafted", "seed") for name in ("requests", "baseline")]


def loaded(out_dir: Path) -> Any:
    no_rests(out_dir)
    assert rows_of(out_dir / "steps.jsonl")
    return by_id(out_dir / "requests.jsonl", "output_token_ids")


def shared(out: Path) -> Any:
    no_rests(out.parent)
    names = sorted(path.name for path in out.iterdir())
    return names, (out / "config.json").read_text(), (out / "model.safetensors").read_bytes()


def complete_or_absent(out: Path) -> None:
    if out.exists():
        assert {"config.json", "model.safetensors", "provenance.json", "README.md"} <= {path.name for path in out.iterdir()}
        load_file(out / "model.safetensors")


def kinds(folder: Path) -> dict[str, Kind]:
    rng = random.Random(0)
    data = folder / "data.jsonl"
    prompts = folder / "prompts.jsonl"
    say = lambda count: " ".join(rng.choices(WORDS, k=count))
    rows = [[("user", say(3)), ("assistant", say(6))] for _ in range(40)]
    data.write_text("".join(json.dumps({"messages": [{"role": r, "content": c} for r, c in row]}) + "\n" for row in rows))
    prompts.write_text("".join(json.dumps({"turns": [say(4), say(3)][: 1 + i % 2]}) + "\n" for i in range(30)))
    tiny = ["model=tiny", "model.dtype=float32", "model.device=cpu"]
    source = [*tiny, "data=jsonl", f"data.path={data}", "data.held_out=4"]
    training = [
        *source, "train.max_steps=14", "train.global_batch_size=4", "train.micro_batch_size=2", "train.log_every=3",
        "train.eval_every=3", "train.save_every=4", "train.keep=2", "eval.num_prompts=4", "eval.max_tokens=24",
        "train.lr=3e-3", "train.drafter.draft_vocab_size=100",
    ]  # fmt: skip
    tasks = ["task=jsonl", f"task.path={prompts}"]
    drafter = folder / "drafter"
    train = Kind("train/eagle.py", training, "out_dir", "run", trained, checkpoints_are_complete)
    training_run = run("train/eagle.py", [*training, "train.max_steps=2", f"out_dir={drafter}"], folder / "log")
    assert training_run.code == 0, training_run.err
    return {
        "train": train,
        "evaluation": Kind("train/eagle.py", training, "out_dir", "run", trained, checkpoints_are_complete, evaluations=True),
        "prepare": Kind(
            "train/prepare.py", [*tiny, f"prompts={prompts}", "answers.max_tokens=24", "max_batch_size=4"], "out", "data.jsonl",
            prepared, has_started=lambda out: out.exists(),
        ),
        "extract": Kind("train/extract.py", [*source, "shard_mb=0", "layer_ids=[1,2,3]"], "out_dir", "run", extracted),
        "eval": Kind(
            "eval/run.py", [*tiny, *tasks, "method=ngram", "sampling.max_tokens=24", "sampling.temperature=0.8",
            "max_batch_size=3"], "out_dir", "run", evaluated,
        ),
        "load": Kind(
            "eval/load.py", [*tiny, *tasks, "method=ngram", "sampling.max_tokens=24", "request_rate=20", "max_batch_size=3"],
            "out_dir", "run", loaded, resumes=False,
        ),
        "share": Kind(
            "train/share.py", [f"checkpoint={drafter}", "format=vllm"], "out_dir", "shared", shared, complete_or_absent,
            has_started=lambda out: False, resumes=False,
        ),
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- kills


def moment(kind: Kind, out: Path, rng: random.Random) -> Callable[[float], bool]:
    """When to kill: anywhere in the run; or within an evaluation, whose checkpoint has just appeared."""
    if not kind.evaluations:
        at_s = rng.uniform(0.02, kind.seconds)  # the script has begun to listen then
        return lambda seconds: seconds > at_s
    step = rng.choice(kind.steps)
    after_s = rng.uniform(0, kind.evaluation_s)
    since = math.inf

    def in_evaluation(seconds: float) -> bool:
        nonlocal since
        if since == math.inf and (out / "checkpoints" / f"step-{step:08d}").exists():
            since = seconds
        return seconds - since > after_s

    return in_evaluation


def wrong_with(ended: Ended, number: int) -> Iterator[str]:
    """How a process ended that got a signal."""
    name = signal.Signals(number).name
    if ended.code not in (CODES[number], -number, 0):
        yield f"{name}: exit code {ended.code}"
    if "Traceback" in ended.err:
        yield f"{name}: a traceback ({ended.err.strip().splitlines()[-1][:100]})"
    if number != signal.SIGKILL and ended.code not in (0, -number) and not ended.err.count("interrupted"):
        stopped = "stopped after step" in ended.err
        if not stopped:
            yield f"{name}: nothing but {ended.err[-300:]!r}"


MIX = ["SIGKILL"] * 4 + ["SIGTERM", "SIGINT"]


def killed_once(
    kind: Kind, straight: Any, folder: Path, rng: random.Random, signals: list[str]
) -> tuple[list[str], Counter[str]]:
    """One run with a kill in it, or two, and then its end. Returns what is wrong, and which signals hit."""
    out = folder / kind.name
    wrong = list[str]()
    counts = Counter[str]()
    kills = 2 if kind.resumes and rng.random() < 1 / 3 else 1
    while True:
        number = signal.Signals[rng.choice(signals)] if kills else 0
        when = moment(kind, out, rng) if kills else None
        if kills and not kind.resumes and out.exists():
            break
        ended = kind.go(folder, when, number, resume=kind.resumes and kind.has_started(out))
        if not kills:
            if ended.code:
                wrong.append(f"did not go on: {ended.err.strip().splitlines()[-1][:200]}")
            break
        hit = ended.code != 0
        if hit:
            counts[signal.Signals(number).name] += 1
            wrong += wrong_with(ended, number)
            kind.amid += kind.evaluations and to_be_evaluated(out)
            try:
                kind.check(out)
            except Exception as error:
                wrong.append(f"after {signal.Signals(number).name}: {type(error).__name__}: {str(error)[:200]}")
        elif not kind.resumes or kind.has_started(out):  # it was faster than the kill
            break
        kills -= 1
        if not kind.resumes:
            break
    if not kind.resumes:
        return wrong + ended_for_good(kind, straight, folder), counts
    try:
        result = kind.contents(out)
        if result != straight:
            wrong.append(f"differs from an uninterrupted run: {difference(result, straight)}")
    except Exception as error:
        wrong.append(f"in the end: {type(error).__name__}: {str(error)[:200]}")
    return wrong, counts


def ended_for_good(kind: Kind, straight: Any, folder: Path) -> list[str]:
    """What is not resumed: what is there is readable, and as in an uninterrupted run; and it can be done anew."""
    out = folder / kind.name
    wrong = []
    try:
        if kind.script.endswith("load.py"):
            path = out / "requests.jsonl"
            rows = by_id(path, "output_token_ids") if path.exists() else {}
            assert all(straight[name] == row for name, row in rows.items()), "a row differs"
            out = (folder / "again") / kind.name
            out.parent.mkdir()
            if (folder / kind.name / run_dir.MARKER).exists():
                refused = kind.go(folder)
                assert refused.code == 1, "its directory is taken again"
                assert "resume=true" not in refused.err, f"it advises what it refuses: {refused.err}"
        if not out.exists():
            again = kind.go(out.parent)
            assert again.code == 0, again.err.strip().splitlines()[-1]
        assert kind.contents(out) == straight, "differs from an uninterrupted run"
    except Exception as error:
        wrong.append(f"in the end: {type(error).__name__}: {str(error)[:200]}")
    return wrong


def difference(result: Any, straight: Any, path: str = "") -> str:
    """Where two nested values differ first."""
    if isinstance(result, dict) and isinstance(straight, dict) and result.keys() == straight.keys():
        return next(difference(result[key], straight[key], f"{path}.{key}") for key in result if result[key] != straight[key])
    if isinstance(result, list | tuple) and isinstance(straight, list | tuple) and len(result) == len(straight):
        return next(difference(a, b, f"{path}.{i}") for i, (a, b) in enumerate(zip(result, straight, strict=True)) if a != b)
    return f"{path.lstrip('.')}: {str(result)[:80]} and not {str(straight)[:80]}"


def measure(kind: Kind, folder: Path) -> Any:
    """An uninterrupted run: what comes of it; how long it takes, and an evaluation in it."""
    folder.mkdir()
    ended = kind.go(folder)
    assert ended.code == 0, ended.err
    kind.seconds = ended.seconds
    if kind.evaluations:
        kind.steps = [row["step"] for row in rows_of(folder / "run" / "metrics.jsonl") if "val_loss" in row]
        kind.evaluation_s = 0.5 * ended.seconds / len(kind.steps)
    return kind.contents(folder / kind.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("train", "evaluation", "prepare", "extract", "eval", "load", "share")
    parser.add_argument("--kinds", nargs="*", choices=names, default=list(names))
    parser.add_argument("--kills", type=int, default=20, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--signals", nargs="*", choices=sorted(set(MIX)), default=MIX, help="drawn from these")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    CausalLM("tiny", "float32", "cpu")
    gc.collect()
    gc.freeze()
    failures = 0
    with tempfile.TemporaryDirectory() as scratch:
        kind_of = kinds(Path(scratch))
        for name in arguments.kinds:
            kind = kind_of[name]
            folder = Path(scratch) / name
            folder.mkdir()
            straight = measure(kind, folder / "straight")
            counts = Counter[str]()
            number = 0
            wrong_runs = 0
            started = time.monotonic()
            while counts.total() < arguments.kills:
                seed = f"{arguments.seed} {name} {number}"
                place = folder / str(number)
                place.mkdir()
                wrong, counts_of_kill = killed_once(kind, straight, place, random.Random(seed), arguments.signals)
                counts = counts + counts_of_kill
                number = number + 1
                wrong_runs = wrong_runs + bool(wrong)
                for line in wrong:
                    print(f"  {name}, seed {seed!r}: {line}", flush=True)
                shutil.rmtree(place)
            failures += wrong_runs
            signals = ", ".join(f"{count} {which}" for which, count in sorted(counts.items()))
            amid = f", {kind.amid} of them with an evaluation open" if kind.evaluations else ""
            print(
                f"{name}: {counts.total()} kills ({signals}){amid}, in {number} runs of {kind.seconds:.1f} s; {wrong_runs} "
                f"wrong ({time.monotonic() - started:.0f} s)",
                flush=True,
            )
    print(f"seed {arguments.seed}: {'nothing lost' if not failures else f'{failures} runs are wrong'}")
    sys.exit(failures > 0)


if __name__ == "__main__":
    with script.one_line():
        main()
