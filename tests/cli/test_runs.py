"""How a run holds its directory and how a script ends: one process per directory, one line, an exit code, nothing lost.

Kills at random moments are `tests/support/kills.py` (`make kills`).
"""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import platform
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from specdec import config, hub, lock, method, run_dir, script
from specdec.checkpoint import native
from specdec.config import CONF
from specdec.drafter.base import Init
from specdec.measure import records
from specdec.model import target
from specdec.model.target import CausalLM
from support.cli import OFFLINE, call, contents, outputs, rows_of
from support.processes import ended, start
from support.wandb_offline import FakeRun

ROOT = CONF.parent
FORK = multiprocessing.get_context("fork")
HYDRA = {  # every script that Hydra starts, what it needs, and the key of its output
    "train/eagle": (["model=tiny"], "out_dir"),
    "train/mtp": (["model=tiny"], "out_dir"),
    "train/mlp": (["model=tiny"], "out_dir"),
    "train/medusa": (["model=tiny"], "out_dir"),
    "train/dflash": (["model=tiny"], "out_dir"),
    "train/pard": (["model=tiny"], "out_dir"),
    "train/draft_model": (["model=tiny"], "out_dir"),
    "train/extract": (["model=tiny"], "out_dir"),
    "train/prepare": (["model=tiny"], "out"),
    "train/share": (["checkpoint=no/where"], "out_dir"),
    "eval/run": (["model=tiny"], "out_dir"),
    "eval/load": (["model=tiny"], "out_dir"),
    "eval/choose": (["model=tiny"], "out_dir"),
    "eval/profile_cost": (["model=tiny"], "out_dir"),
    "eval/bench": (["model=tiny"], "out_dir"),
}
SINGLE = ("eval/compare", "eval/report", "eval/prove", "eval/gpu", "train/bench")
RESUMES = (
    "train/eagle",
    "train/mtp",
    "train/mlp",
    "train/medusa",
    "train/dflash",
    "train/pard",
    "train/draft_model",
    "train/extract",
    "eval/run",
)
EVERY = pytest.mark.parametrize("name", HYDRA)
FEW = ("model=tiny", "limit=2", "sampling.max_tokens=8", "baseline=false")


def run(name: str, *arguments: object, cwd: Path) -> Any:
    return call(Path(name).name, *arguments, cwd=cwd, folder=ROOT / Path(name).parent)


def test_every_script_is_here() -> None:
    """What holds for each must hold for a new one too."""
    scripts = {f"{folder}/{path.stem}" for folder in ("train", "eval") for path in (ROOT / folder).glob("*.py")}
    assert scripts == {*HYDRA, *SINGLE}
    for name in scripts:
        assert "with script.one_line():" in (ROOT / f"{name}.py").read_text(), name


@EVERY
def test_every_script_has_help(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = run(name, "--help", cwd=tmp_path)
    assert done.code == 0, done.err
    wide = [line for line in done.out.splitlines() if len(line) > 80]
    assert all("{" in line or len(line.split()) <= 2 for line in wide), "only what cannot be broken"
    assert all(f"{group}: " in done.out for group in ("model", "logger") if f"- {group}:" in page_of(name))
    assert "Keys:" in done.out


def page_of(name: str) -> str:
    stem = Path(name).name
    page = CONF / f"{'eval' if stem == 'run' else stem}.yaml"
    return (page if page.exists() else CONF / "train.yaml").read_text()


# ----------------------------------------------------------------------------------------- one process per directory


def lock_of(name: str, out: Path) -> Path:
    """Beside what is not there before it is complete."""
    return out.with_name(f".{out.name}.lock") if name in ("train/prepare", "train/share") else out / run_dir.LOCK


@contextlib.contextmanager
def held(path: Path) -> Iterator[Any]:
    """Another process has the lock."""
    ready = FORK.Event()

    def child() -> None:
        lock.acquire(path, "out_dir=x")
        ready.set()
        time.sleep(60)

    process = FORK.Process(target=child)
    process.start()
    assert ready.wait(30)
    try:
        yield process
    finally:
        process.kill()
        process.join()


@EVERY
def test_a_second_process_is_told_who_has_the_directory(name: str, tmp_path: Path) -> None:
    """In one line, before the weights, whether it wants to go on with the run or begins at the same time; nothing changes."""
    arguments, key = HYDRA[name]
    out = tmp_path / "new" / "run"
    with held(lock_of(name, out)) as process:
        if name in RESUMES:
            (out / run_dir.MARKER).write_text("{}")
        before = contents(tmp_path)
        for more in ([], ["resume=true"]) if name in RESUMES else ([],):
            error = run(name, *arguments, *more, f"{key}={out}", cwd=tmp_path).error
            assert f"{key}={out} is in use by process {process.pid} on {platform.node()} since 20" in error
            assert error.endswith("; wait until that ends, or give another")
        assert contents(tmp_path) == before


def test_a_link_to_a_file_is_that_file(tmp_path: Path) -> None:
    """Two processes that append to one file under two names are two on one file."""
    arguments, key = HYDRA["train/prepare"]
    link = tmp_path / "link.jsonl"
    real = tmp_path / "real.jsonl"
    real.write_text("")
    link.symlink_to(real)
    with held(tmp_path / ".real.jsonl.lock") as process:
        error = run("train/prepare", *arguments, "resume=true", f"{key}={link}", cwd=tmp_path).error
        assert f"{key}={link} is in use by process {process.pid}" in error


def test_a_directory_where_no_file_can_be_made_is_not_in_use() -> None:
    with pytest.raises(OSError, match="No such file or directory"):
        lock.acquire(Path("/proc/.x.lock"), "out=/proc/x")


def test_weights_that_changed_under_their_name_are_another_run(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(hub.tiny("llama"), model)
    what = (f"model.path={model}", "limit=2", "sampling.max_tokens=4", f"out_dir={tmp_path / 'run'}")
    assert run("eval/run", *what, cwd=tmp_path).code == 0
    assert run("eval/run", *what, "resume=true", cwd=tmp_path).code == 0
    shutil.rmtree(model)
    shutil.copytree(hub.tiny("llama", seed=1), model)
    assert "resume=true, but target_weights was" in run("eval/run", *what, "resume=true", cwd=tmp_path).error


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    """Nor does one that has ended, of which nothing is left at all."""
    path = tmp_path / "a" / "b" / run_dir.LOCK
    with held(path) as process:
        with pytest.raises(ValueError, match="in use by process"):
            lock.acquire(path, "out_dir=x")
        process.kill()
        process.join()
        assert path.exists()
        lock.acquire(path, "out_dir=x")
    assert json.loads(path.read_text())["pid"] == os.getpid()
    lock.acquire(path, "out_dir=x")  # who has it has it
    (tmp_path / "a" / "b" / "kept").write_text("")
    lock.release()
    assert list((tmp_path / "a" / "b").iterdir()) == [tmp_path / "a" / "b" / "kept"]
    lock.acquire(tmp_path / "c" / "d" / run_dir.LOCK, "out_dir=x")
    lock.release()
    assert not (tmp_path / "c").exists(), "directories that were made for nothing go"


def test_of_processes_that_begin_at_once_one_gets_the_directory(tmp_path: Path) -> None:
    """Whichever comes first; the others get an error, and end before they write."""
    out_dir = tmp_path / "outputs" / "run"
    count = 6
    barrier = FORK.Barrier(count)
    messages = FORK.SimpleQueue()
    over = FORK.Event()

    def child() -> None:
        barrier.wait(30)
        try:
            run_dir.reserve(out_dir, resume=False)
            time.sleep(0.05)
            run_dir.claim(out_dir, False, {"pid": os.getpid()})
            messages.put((os.getpid(), None))
            over.wait(30)
        except ValueError as error:
            messages.put((os.getpid(), str(error)))

    children = [FORK.Process(target=child) for _ in range(count)]
    for process in children:
        process.start()
    answers = [messages.get() for _ in children]
    over.set()
    for process in children:
        process.join(30)
    (winner,) = [pid for pid, error in answers if error is None]
    assert json.loads((out_dir / run_dir.MARKER).read_text()) == {"pid": winner}
    assert all(f"in use by process {winner} on" in error for pid, error in answers if pid != winner)


@pytest.mark.parametrize("error", [OSError(errno.ENOSYS, "no"), OSError(errno.ENOLCK, "no"), NotImplementedError("no flock")])
def test_a_file_system_without_locks_is_named(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the run goes on."""

    def refuse(*args: Any, **more: Any) -> None:
        raise error

    monkeypatch.setattr(lock.FileLock, "acquire", refuse)
    run_dir.claim(tmp_path / "run", False, {})
    lock.release()
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"note: {tmp_path / 'run'}: no locks on this file system; start no second process there"
    assert [path.name for path in (tmp_path / "run").iterdir()] == [run_dir.MARKER]


def test_a_file_system_that_is_read_only_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **more: Any) -> None:
        raise OSError(errno.EROFS, "no")

    monkeypatch.setattr(lock.FileLock, "acquire", refuse)
    error = run("eval/run", *FEW, f"out_dir={tmp_path / 'run'}", cwd=tmp_path).error
    assert error == f"error: {tmp_path / 'run' / run_dir.LOCK}: Read-only file system"
    assert list(tmp_path.iterdir()) == []


def test_other_ranks_leave_the_directory_to_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with held(tmp_path / "run" / run_dir.LOCK):
        run_dir.reserve(tmp_path / "run", resume=False)


def test_every_run_has_a_directory_of_its_own(tmp_path: Path) -> None:
    """outputs/NAME/START, and `latest` leads to the last one, where resume=true goes on."""
    name = "demo-tiny-llama-ngram-standard"
    for _ in range(2):
        done = run("eval/run", *FEW, cwd=tmp_path)
        assert done.code == 0, done.err
    link = tmp_path / "outputs" / name / "latest"
    first, second = sorted(path for path in link.parent.iterdir() if path != link)
    assert all(re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", path.name) for path in (first, second))
    assert link.resolve() == (second if f"written to outputs/{name}/{second.name}" in done.out else first).resolve()
    before = contents(link.resolve())
    again = run("eval/run", *FEW, "resume=true", cwd=tmp_path)
    assert again.code == 0, again.err
    assert again.out.splitlines()[-1] == f"written to outputs/{name}/{link.resolve().name}", "the directory, not the link"
    assert contents(link.resolve()).keys() == before.keys()
    done = run("eval/run", *FEW, "name=other", "resume=true", cwd=tmp_path)
    assert done.err.splitlines()[-1] == "error: resume=true, but out_dir=outputs/other/latest holds no run; leave resume out"


def test_a_checkpoint_brings_its_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the command line names none: the model.path, of its own formats and of others'."""
    directory = tmp_path / "drafter"
    directory.mkdir()
    qwen3 = CausalLM("tiny-qwen3", "float32", "cpu")
    native.save(directory, method.find("eagle3").init_checkpoint(qwen3, {}, Init()), {}, "")
    shared = tmp_path / "shared"
    done = run("train/share", f"checkpoint={directory}", "format=speculators", f"out_dir={shared}", cwd=tmp_path)
    assert done.code == 0, done.err
    for number, path in enumerate((directory, shared)):
        out_dir = tmp_path / str(number)
        done = run("eval/run", f"checkpoint={path}", "limit=1", "sampling.max_tokens=4", f"out_dir={out_dir}", cwd=tmp_path)
        assert done.code == 0, done.err
        assert json.loads((out_dir / "summary.json").read_text())["target"] == "tiny-qwen3"
    of_another = tmp_path / "another"
    of_another.mkdir()
    native.save(of_another, method.find("eagle3").init_checkpoint(tiny(), {}, Init()), {}, "")
    monkeypatch.setattr(sys, "argv", ["run.py", f"checkpoint={directory}", "model.dtype=bfloat16"])
    assert config.words_of_checkpoint() == ["method=eagle3", "model.path='tiny-qwen3'"]
    monkeypatch.setattr(sys, "argv", ["run.py", "-m", f"checkpoint={directory},{of_another}"])
    assert config.words_of_checkpoint() == ["method=eagle3"], "of two targets none is the sweep's"
    refused = run("eval/run", f"checkpoint={directory}", "model=tiny", "limit=1", cwd=tmp_path)
    assert "was trained for tiny-qwen3" in refused.err.splitlines()[-1]


@pytest.mark.parametrize(
    "words",
    [
        ("limt=3",),
        ("checkpoint=/nowhere",),
        ("checkpoint=outputs/nowhere",),
        ("model.path=/nowhere",),
        ("out_dir=taken",),
        ("out_dir=new", "resume=true"),
    ],
)
def test_a_typo_is_found_before_torch_is_imported(tmp_path: Path, words: tuple[str, ...]) -> None:
    """In less than the seconds that the import takes."""
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / run_dir.MARKER).write_text("{}")
    code = (
        "import runpy, sys; sys.modules['torch'] = None; sys.argv = sys.argv[1:]\n"
        "sys.path.insert(0, ''); runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    script_path = ROOT / "eval" / "run.py"
    command = [sys.executable, "-c", code, str(script_path), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "torch" not in done.stderr


def test_a_class_is_imported_before_the_target_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*_: Any, **__: Any) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(target.CausalLM, "__init__", loaded)
    for words, line in (
        (("method=custom_class", "method.model=nowhere.Mine"), "custom_class: cannot import 'nowhere'"),
        (("method=draft_model", "method.model=/nowhere"), "model '/nowhere': no such directory"),
    ):
        done = run("eval/run", "model=tiny", *words, cwd=tmp_path)
        assert line in done.err.splitlines()[-1]


def test_processes_of_one_torchrun_have_one_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in (("TORCHELASTIC_RUN_ID", "none"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(key, value)
    started = FORK.Queue()
    processes = [FORK.Process(target=lambda: started.put(run_dir.start())) for _ in range(2)]
    for process in processes:
        process.start()
    assert started.get(timeout=30) == started.get(timeout=30)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="several machines: give out_dir="):
        run_dir.start()


def test_a_sweep_has_one_directory_of_its_own(tmp_path: Path) -> None:
    sweep = ("-m", *FEW, "method=none,ngram")
    assert "holds no sweep; leave resume out" in run("eval/run", *sweep, "resume=true", cwd=tmp_path).error
    assert not (tmp_path / "outputs").exists()
    assert run("eval/run", *sweep, cwd=tmp_path).code == 0
    link = tmp_path / "outputs" / "demo-tiny-llama-sweep-method" / "latest"
    assert sorted(path.name for path in link.iterdir() if path.is_dir()) == ["0-none", "1-ngram"]
    (link / "1-ngram" / "summary.json").unlink()
    done = run("eval/run", *sweep, "resume=True", cwd=tmp_path)
    assert done.code == 0, done.err
    assert (link / "1-ngram" / "summary.json").exists()
    assert len(list(link.parent.iterdir())) == 2, "the sweep and the link"


def test_a_sweep_that_was_stopped_goes_on(tmp_path: Path) -> None:
    """A job that has a directory and no run in it begins; one that has ended is left as it is."""
    sweep = ("-m", *FEW, "method=none,ngram", f"out_dir={tmp_path / 'sweep'}")
    assert run("eval/run", *sweep, cwd=tmp_path).code == 0
    first, second = sorted(path for path in (tmp_path / "sweep").iterdir() if path.is_dir())
    kept = (first / "requests.jsonl").read_bytes()
    for path in second.iterdir():
        path.unlink()
    done = run("eval/run", *sweep, "resume=true", cwd=tmp_path)
    assert done.code == 0, done.err
    assert (first / "requests.jsonl").read_bytes() == kept
    assert len(rows_of(second / "requests.jsonl")) == len(rows_of(first / "requests.jsonl"))


def test_a_sweep_of_another_launcher(tmp_path: Path) -> None:
    """As on a Slurm cluster, with processes of this machine: every job is a run of its own, and one that fails says why."""
    for name in ("0-1", "1-2"):
        (tmp_path / "sweep" / name).mkdir(parents=True)
    (tmp_path / "sweep" / "1-2" / run_dir.MARKER).write_text("{}")
    sweep = ["-m", "hydra/launcher=submitit_local", *FEW, "seed=1,2", "out_dir=sweep", "baseline=false"]
    done = ended(start(ROOT / "eval" / "run.py", *sweep, cwd=tmp_path))
    assert done.code == 1
    first, *_, error = done.err.splitlines()
    assert first == "jobs are started by submitit_local, each with a log in sweep/.submitit"
    assert error == "error: out_dir=sweep/1-2 already holds a run; give another out_dir=, or resume=true to go on with it"
    assert json.loads((tmp_path / "sweep" / "0-1" / "summary.json").read_text())["seed"] == 1
    assert any("job 1 of 2" in path.read_text() for path in (tmp_path / "sweep" / ".submitit").rglob("*.err"))


# ------------------------------------------------------------------------------------------------ stopped by a signal


FAKE = """
import os, signal, time
os.kill(os.getpid(), signal.{name})
time.sleep(20)
"""


@pytest.mark.parametrize("name", [*HYDRA, *SINGLE])
def test_ctrl_c_while_torch_is_imported(name: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(FAKE.format(name="SIGINT"))
    env = {**os.environ, **OFFLINE, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    listen = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    command = [sys.executable, str(ROOT / f"{name}.py")]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, preexec_fn=listen, timeout=60)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


@EVERY
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_a_model_is_loaded(
    name: str, number: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, which promises nothing: nothing has begun, and nothing is left."""

    def stopped(*args: Any, **more: Any) -> Any:
        signal.raise_signal(number)
        time.sleep(5)
        raise AssertionError("the signal was not heard")

    monkeypatch.setattr(target.CausalLM, "__init__", stopped)
    monkeypatch.setattr(native, "find", stopped)
    arguments, key = HYDRA[name]
    handlers = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    try:
        done = run(name, *arguments, f"{key}={tmp_path / 'new' / 'run'}", cwd=tmp_path)
    finally:
        for one, handler in zip((signal.SIGINT, signal.SIGTERM), handlers, strict=True):
            signal.signal(one, handler)
    assert (done.code, done.err) == (code, "interrupted\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "resumes"), [("eval/run", True), ("train/extract", True), ("eval/load", False)])
def test_a_stopped_run_promises_what_it_can_do(
    name: str, resumes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*args: Any, **more: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("specdec.config.pages.save", stopped)  # what comes first when a directory is taken
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n")
    arguments = ("data=jsonl", f"data.path={data}") if name == "train/extract" else ()
    done = run(name, "model=tiny", *arguments, f"out_dir={tmp_path / 'run'}", cwd=tmp_path)
    go_on = ", and resume=true goes on with the rest" if resumes else ""
    assert done.code == 130
    assert done.err.splitlines()[-1] == f"interrupted; what had finished is kept in {tmp_path / 'run'}{go_on}"
    if not resumes:
        error = run(name, "model=tiny", f"out_dir={tmp_path / 'run'}", cwd=tmp_path).error
        assert error.endswith("already holds a run; give another out_dir=")


def half_done(number: signal.Signals, through_fail: bool) -> None:
    """A script whose library makes another error of a signal, as a cleanup does that finds its work half done."""
    with script.one_line():
        try:
            os.kill(os.getpid(), number)
            time.sleep(5)
        except KeyboardInterrupt:
            if through_fail:
                script.fail("half done")
            raise AttributeError("half done") from None


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("through_fail", [False, True])
def test_a_signal_stays_one_whatever_a_library_makes_of_it(
    number: signal.Signals, code: int, through_fail: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {each: signal.signal(each, handler) for each, handler in defaults.items()}
    try:
        with pytest.raises(SystemExit) as ended:
            half_done(number, through_fail)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert ended.value.code == code
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("times", [1, 2])
def test_a_run_under_load_ends_with_the_code_of_its_signal(
    number: int, code: int, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It listens itself, to summarise what had finished. The second signal ends it at once."""

    def stopped(*args: Any, **more: Any) -> Iterator[Any]:
        for _ in range(times):
            signal.raise_signal(number)
        yield []

    monkeypatch.setattr("specdec.measure.serving.run_open_loop", stopped)
    done = run("eval/load", "model=tiny", "limit=1", f"out_dir={tmp_path / 'run'}", cwd=tmp_path)
    last = "interrupted before any request had finished" if times == 1 else "interrupted; what had finished is kept in"
    assert done.code == code
    assert done.err.splitlines()[-1].startswith(last)


# -------------------------------------------------------------------------------------------------- what goes wrong


@contextlib.contextmanager
def full_after(num_bytes: int) -> Iterator[None]:
    """No file grows beyond this, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def prompts(path: Path) -> Path:
    path.write_text("".join(json.dumps({"turns": [f"Tell me about {i}."]}) + "\n" for i in range(8)))
    return path


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    """What had finished stays, and the run goes on once there is room."""
    path = prompts(tmp_path / "tasks.jsonl")
    arguments = ("model=tiny", "task=jsonl", f"task.path={path}", "sampling.max_tokens=8", "baseline=false")
    out_dir = tmp_path / "run"
    with full_after(5000):
        done = run("eval/run", *arguments, f"out_dir={out_dir}", cwd=tmp_path)
    assert done.code == 1
    assert done.err.splitlines()[-1] == (
        f"error: {out_dir / 'requests.jsonl'}: File too large; what had finished is kept in {out_dir}, and resume=true goes on "
        "with the rest"
    )
    kept = list(records.rows_in(out_dir / "requests.jsonl"))
    assert 0 < len(kept) < 8
    assert run("eval/run", *arguments, f"out_dir={out_dir}", "resume=true", cwd=tmp_path).code == 0
    assert rows_of(out_dir / "requests.jsonl")[: len(kept)] == kept
    assert run("eval/run", *arguments, f"out_dir={tmp_path / 'straight'}", cwd=tmp_path).code == 0
    assert outputs(out_dir) == outputs(tmp_path / "straight")


def test_a_full_disk_under_load_and_while_preparing(tmp_path: Path) -> None:
    path = prompts(tmp_path / "tasks.jsonl")
    arguments = ("model=tiny", "task=jsonl", f"task.path={path}", "sampling.max_tokens=8", "request_rate=inf")
    with full_after(3000):
        done = run("eval/load", *arguments, f"out_dir={tmp_path / 'load'}", cwd=tmp_path)
    line = f"error: {tmp_path / 'load' / 'requests.jsonl'}: File too large; what had finished is kept in {tmp_path / 'load'}"
    assert done.err.splitlines()[-1] == line
    out = tmp_path / "data.jsonl"
    what = ("model=tiny", f"prompts={path}", "answers.max_tokens=8", f"out={out}")
    with full_after(2500):
        done = run("train/prepare", *what, cwd=tmp_path)
    assert done.err.splitlines()[-1] == (
        f"error: {out}: File too large; what had finished is kept in {out}, and resume=true goes on with the rest"
    )
    assert run("train/prepare", *what, "resume=true", cwd=tmp_path).code == 0
    assert len(rows_of(out)) == 1 + 8


def test_no_room_is_said_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **more: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    error = run("eval/run", *FEW, f"out_dir={tmp_path / 'run'}", cwd=tmp_path).error
    assert error == f"error: {tmp_path / 'run' / run_dir.LOCK}: No space left on device; make room"


@EVERY
def test_what_nobody_foresaw_is_one_line_too(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **more: Any) -> Any:
        raise AttributeError("first line\nsecond line")

    monkeypatch.setattr(target.CausalLM, "__init__", broken)
    monkeypatch.setattr(native, "find", broken)
    overrides, key = HYDRA[name]
    arguments = (*overrides, f"{key}={tmp_path / 'run'}")
    assert run(name, *arguments, cwd=tmp_path).error == "error: AttributeError: first line; SPECDEC_DEBUG=1 shows where"
    monkeypatch.setenv(script.DEBUG, "1")
    done = run(name, *arguments, cwd=tmp_path)
    assert done.code == 1
    assert "in broken" in done.err
    assert done.err.splitlines()[-1] == "error: AttributeError: first line"


def test_a_script_of_its_own_ends_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "summary.json").write_text("[1]")
    assert run("eval/compare", tmp_path / "a", tmp_path, cwd=tmp_path).error.startswith("error: ")
    assert "no_such" in run("eval/prove", "--methods", "no_such", cwd=tmp_path).error


@pytest.mark.parametrize("page", [path.stem for path in sorted(CONF.glob("*.yaml")) if "\nname:" in path.read_text()])
def test_a_name_stays_below_outputs(page: str, tmp_path: Path) -> None:
    (name,) = [name for name in HYDRA if Path(name).name == {"train": "eagle", "eval": "run"}.get(page, page)]
    more = ("..", ".", "a/b", "/tmp/x", "", "a\\b", "n" * 300) if page == "eval" else ()
    for run_name in ("../../x", *more):
        error = run(name, "model=tiny", f"name='{run_name}'", cwd=tmp_path).error
        assert f"name={run_name!r} is no name of a directory" in error
    if page == "eval":  # which the name is made of
        assert "is no name of a directory" in run(name, "model=tiny", "task.name=../../x", cwd=tmp_path).error
    assert list(tmp_path.iterdir()) == []


WANDB = ("logger=wandb", "logger.mode=offline")


@pytest.mark.parametrize("name", ["train/eagle", "eval/run", "eval/load"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("logger.mode=banana",), "logger.mode='banana': input should be 'online' or 'offline'"),
        (("logger.tags=drafter",), "logger.tags='drafter'"),
        (("logger.tags=[1]",), "logger.tags[0]=1"),
        (("logger.tags=['']",), "logger.tags=['']: Value error, Tag at index 0 is empty"),
        (("logger.project=a/b",), "logger.project='a/b'"),
        (("logger.project=''",), "logger.project=''"),
        (("logger.entity=[a]",), "logger.entity=['a']"),
        (("logger.name=banana",), "logger.name='banana': input should be 'none' or 'wandb'"),
    ],
)
def test_the_logger_is_looked_at_before_the_run(name: str, arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    error = run(name, "model=tiny", *WANDB, *arguments, f"out_dir={tmp_path / 'run'}", cwd=tmp_path).error
    assert words in error
    assert list(tmp_path.iterdir()) == []


def test_what_is_read_last_is_looked_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the weights: what a finished run would have ended with."""

    def loaded(*args: Any, **more: Any) -> Any:
        raise AssertionError("the weights are read")

    monkeypatch.setattr(target.CausalLM, "__init__", loaded)
    for name, arguments, words in (
        ("train/eagle", ("model.name=x",), "model.name='x': no such choice"),
        ("eval/bench", ("dtypes=[float32,flot16]",), "did you mean 'float16'?"),
        ("eval/bench", ("suffix_tokens=[1000,many]",), "suffix_tokens=[1000, 'many']"),
        ("eval/bench", ("num_threads=[0]",), "num_threads=[0]"),
        ("eval/bench", ("resume=true",), "a benchmark is not resumed"),
        ("train/prepare", ("answers.temperatures=[0.0,-1]", f"out={tmp_path / 'out'}"), "temperatures=[0.0, -1]"),
        ("train/prepare", ("answers.top_p=2", f"out={tmp_path / 'out'}"), "top_p=2"),
        ("train/prepare", ("synthesize.top_p=2", f"out={tmp_path / 'out'}"), "top_p=2"),
        ("train/prepare", ("-m", "seed=1,2", f"out={tmp_path / 'out'}"), "call it once for every value"),
        ("train/share", ("-m", "format=vllm,native", f"out_dir={tmp_path / 'out'}"), "call it once for every value"),
    ):
        model = () if name == "train/share" else ("model=tiny",)
        assert words in run(name, *model, *arguments, cwd=tmp_path).error
    assert "model= is no group of this script; it has no groups" in run("train/share", "model=tiny", cwd=tmp_path).error
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------- W&B, and what is shared


def test_a_resumed_run_is_the_same_run_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inits: list[dict[str, Any]] = []
    monkeypatch.setattr("wandb.init", lambda **kwargs: inits.append(kwargs) or FakeRun())
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    where = (*FEW, *WANDB, f"out_dir={tmp_path / 'run'}")
    for more in ([], ["resume=true"]):
        done = run("eval/run", *where, *more, cwd=tmp_path)
        assert done.code == 0, done.err
    assert run("eval/run", *FEW, *WANDB, f"out_dir={tmp_path / 'other'}", cwd=tmp_path).code == 0
    first, second, other = inits
    assert (first["id"], first["resume"]) == (second["id"], second["resume"]) == (inits[0]["id"], "allow")
    assert json.loads((tmp_path / "run" / run_dir.WANDB_ID).read_text()) == {"id": first["id"]}
    assert other["id"] != first["id"]


def test_what_wandb_refuses_is_known_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    def refuse(**kwargs: Any) -> Any:
        raise wandb.errors.CommError("no such entity\nand more")

    monkeypatch.setattr(wandb, "init", refuse)
    done = run("eval/run", *FEW, *WANDB, f"out_dir={tmp_path / 'run'}", cwd=tmp_path)
    assert done.code == 1
    assert done.err.splitlines()[-1].startswith("error: logger=wandb: CommError: no such entity; fix that, or use ")
    assert not (tmp_path / "run" / "requests.jsonl").exists()


@cache
def tiny() -> CausalLM:
    return CausalLM("tiny", "float32", "cpu")


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("drafter") / "eagle3"
    directory.mkdir()
    native.save(directory, method.find("eagle3").init_checkpoint(tiny(), {}, Init()), {}, "")
    return directory


@pytest.fixture
def umask() -> Iterator[Callable[[int], None]]:
    before = os.umask(0o022)
    yield lambda value: os.umask(value) and None
    os.umask(before)


def modes(directory: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o002], ids=oct)
def test_permissions_are_what_the_umask_leaves(mask: int, drafter: Path, umask: Callable[[int], None], tmp_path: Path) -> None:
    umask(mask)
    done = run("train/share", f"checkpoint={drafter}", f"out_dir={tmp_path / 'shared'}", cwd=tmp_path)
    assert done.code == 0, done.err
    written = hub.make_once(tmp_path / "cache" / "model", lambda folder: native.write_weights(folder / "x.safetensors", {}))
    for directory in (tmp_path / "shared", written):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o777 & ~mask
        assert modes(directory) == {0o666 & ~mask}


def test_what_a_killed_share_leaves_goes_with_the_next_one(drafter: Path, tmp_path: Path) -> None:
    out = tmp_path / "shared"

    def child() -> None:
        written = native.write_weights

        def killed(*args: Any) -> None:
            written(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        for module in ("native", "hf_common"):
            vars(sys.modules[f"specdec.checkpoint.{module}"])["write_weights"] = killed
        run("train/share", f"checkpoint={drafter}", f"out_dir={out}", cwd=tmp_path)

    process = FORK.Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert {path.name for path in tmp_path.iterdir()} == {".shared.tmp", ".shared.lock"}
    done = run("train/share", f"checkpoint={drafter}", f"out_dir={out}", cwd=tmp_path)
    assert done.code == 0, done.err
    assert [path.name for path in tmp_path.iterdir()] == ["shared"]
    load_file(out / "model.safetensors")
