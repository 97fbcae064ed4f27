"""The page of a run, or of several runs side by side, from their records.

    python eval/report.py outputs/demo-llama-suffix-standard/latest
    python eval/report.py outputs/demo-llama-ngram-standard/latest outputs/demo-llama-suffix-standard/latest --out outputs/both
    python eval/report.py outputs/eagle3_demo-llama-demo/latest            # a training run

Every run of eval/run.py and train/*.py writes report.html into its out_dir at its end, and eval/compare.py one of the runs that
it compares; this script makes it again, also of a run by an earlier version. It needs no network to be read.
"""

from __future__ import annotations

from specdec import script

with script.one_line():
    from pathlib import Path

    from specdec import config, hub, run_dir
    from specdec.config import pages
    from specdec.measure import tasks
    from specdec.measure.report import compare as compare_report
    from specdec.measure.report import console, page


def main() -> None:
    parser = script.Parser(__doc__)
    parser.add_argument("directory", nargs="+", type=Path, help="out_dir of a finished run of eval/run.py, or of train/*.py")
    parser.add_argument("--out", type=Path, help="where the page of several runs goes (default: outputs/report/START)")
    arguments = parser.parse_args()
    report(list(dict.fromkeys(arguments.directory)), arguments.out)


def report(directories: list[Path], out: Path | None) -> None:
    for directory in directories:
        if not (directory / "summary.json").is_file():
            raise ValueError(f"{directory}: no summary.json; give the out_dir of a finished run of eval/run.py or train/*.py")
    is_training = [(directory / "checkpoints").exists() for directory in directories]
    if len(directories) == 1:
        if out is not None:
            raise ValueError(f"--out={out} is for several runs; the page of one run is written to its own directory")
        (directory,) = directories
        path = (
            page.write_training(directory) if is_training[0] else page.write_run(directory, texts_of(page.read_run(directory)))
        )
    else:
        if any(is_training):
            raise ValueError(f"{directories[is_training.index(True)]}: a training run has a page of its own; give it alone")
        out = Path(run_dir.default("report")) if out is None else out
        run_dir.check_report(out)
        out.mkdir(parents=True, exist_ok=True)
        short = compare_report.short_names(map(str, directories))
        runs = {short[str(directory)]: page.read_run(directory) for directory in directories}
        path = page.write_runs(runs, [texts_of(run) for run in runs.values()], out)
        run_dir.link_latest(out)
    console.show(f"written to {path}")


def texts_of(run: page.RunRecords) -> page.Texts:
    """Of the run's page, if it has one; else by the tokenizer and prompts that its config names, with a note for what cannot
    be read."""
    saved = page.saved_texts(run.directory / page.FILE)
    if saved is not None and saved.tokens:
        return saved
    tokenizer = None
    prompts: list[tasks.Task] = []
    try:
        values = config.read(run.directory / "config.yaml")
        model = pages.Model(**values["model"])
        tokenizer = hub.load_tokenizer(hub.resolve(model.source, model.revision))
        prompts = pages.Task(**values["task"]).load(values["limit"])
    except (OSError, ValueError, KeyError) as error:
        missing = "text of the tokens" if tokenizer is None else "prompts"
        console.show(f"note: {run.directory}: the page lacks the {missing} ({str(error).splitlines()[0]})")
    if prompts and tasks.fingerprint(prompts) != run.summary["prompts"]:
        console.show(f"note: {run.directory}: the page lacks the prompts (those of its task have changed)")
        prompts = []
    return page.collect_texts(run.rows, tokenizer, prompts)


if __name__ == "__main__":
    with script.one_line():
        main()
