"""Several runs of eval/run.py in one table, one plot and one page.

    python eval/compare.py outputs/demo-llama-ngram-standard/latest outputs/demo-llama-suffix-standard/latest
    python eval/compare.py outputs/demo-llama-sweep-method/latest/*/ --out outputs/comparison --anyway

Refuses to compare runs whose target, prompts, sampling or rejection differ, except with `--anyway`.
"""

from __future__ import annotations

from specdec import script

with script.one_line():
    from pathlib import Path
    from typing import Any

    from specdec import run_dir
    from specdec.measure import records
    from specdec.measure.report import compare as compare_report
    from specdec.measure.report import console, page

NUMBERS = (
    "mean_acceptance_length", "acceptance_rate_per_position", "tokens_per_step", "decode_tokens_per_s", "draft_s_per_step",
    "verify_s_per_step", "speedup", "speedup_interval", "speedup_cpu", "speedup_model", "efficiency",
)  # fmt: skip


def main() -> None:
    parser = script.Parser(__doc__)
    parser.add_argument("directory", nargs="+", type=Path, help="out_dir of a finished run")
    parser.add_argument("--out", type=Path, help="where compare.png and report.html go (default: outputs/compare/START)")
    parser.add_argument("--anyway", action="store_true", help="compare runs that differ in what should be equal")
    arguments = parser.parse_args()
    compare(arguments.directory, arguments.out or Path(run_dir.default("compare")), arguments.anyway)


def compare(directories: list[Path], out: Path, anyway: bool) -> None:
    runs = {str(path): read(path) for path in {path.resolve(): path for path in directories}.values()}
    if len(runs) < 2:
        raise ValueError(f"only {directories[0]} to compare; give two or more different directories")
    run_dir.check_report(out)
    for differing in compare_report.differences(runs):
        if not anyway:
            raise ValueError(f"{differing}; such runs do not compare; --anyway compares them nevertheless")
        console.show(f"warning: {differing}")
    short = compare_report.short_names(runs)
    labelled = {short[name]: summary for name, summary in runs.items()}
    console.show(*compare_report.compare_tables(labelled), *compare_report.verdicts(labelled))
    console.show(*compare_report.notes(labelled))
    out.mkdir(parents=True, exist_ok=True)
    plot = compare_report.plot_compare(labelled, out / "compare.png")
    console.show(f"plot: {plot}")
    with_rows = {
        label: page.RunRecords(Path(name), runs[name], page.read_rows(Path(name)))  # a summary alone can be compared too
        for name, label in short.items()
    }
    for label, run in with_rows.items():
        if not run.rows:
            console.show(f"note: {label} has no {page.ROWS}, so its answers are not in the report")
    texts = [page.saved_texts(run.directory / page.FILE) or page.Texts() for run in with_rows.values()]
    console.show(f"report: {page.write_runs(with_rows, texts, out, plot)}")
    run_dir.link_latest(out)


def read(directory: Path) -> dict[str, Any]:
    if not (directory / "summary.json").exists():
        raise ValueError(f"{directory}: no summary.json; give the out_dir of a finished run of eval/run.py")
    if (directory / "checkpoints").exists():
        raise ValueError(f"{directory}: a training run; decode with it first: python eval/run.py checkpoint={directory}")
    keys = (
        *compare_report.MUST_AGREE,
        *compare_report.SPEED_DEPENDS_ON,
        "method",
        "num_speculative_tokens",
        "lossless_short",
        "lossless_said",
        "environment",
        "busy",
        "overall",
    )
    fix = "it was not written by this version of eval/run.py: run it again"
    return records.read_summary(directory, fix, (*keys, "categories"), NUMBERS)


if __name__ == "__main__":
    with script.one_line():
        main()
