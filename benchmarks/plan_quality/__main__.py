"""Run and report: ``python -m benchmarks.plan_quality run``, ``report``.

``run`` runs what has no record yet, on one thread, and may be stopped at any time; several may run
side by side. ``report`` writes tables as Markdown and draws figures beside the records.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.plan_quality import data, jobs, report
from benchmarks.plan_quality.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "plan_quality"
SPECTRA = ROOT / "outputs" / "plan_quality"
STUDIES: Mapping[str, tuple[str, Callable[[], list[jobs.Job]], Callable[[Path], str] | None]] = {
    "plans": ("plan_quality", jobs.all_jobs, None),
    "dtypes": ("ns_dtype", jobs.dtype_jobs, report.dtype_text),
}
"""Folder of results, runs, and text of the report, if it is one text, for each study."""


def main(args: Sequence[str] | None = None) -> int:
    options = parser().parse_args(args)
    folder, all_jobs, text = STUDIES[options.study]
    options.output = options.output or RESULTS.with_name(folder)
    options.spectra = options.spectra or SPECTRA.with_name(options.output.name)
    if options.command == "report" and text is not None:
        print(text(options.output))
        return 0
    if options.command == "report":
        print(report.text(options.output))
        print(f"figure: {report.plot(options.output)}")
        return 0
    wanted = all_jobs()
    if options.list:
        for job in wanted:
            left = jobs.missing(options.output, job)
            print(f"{job.start.key}: {len(left)} of {len(job.rows)} to run")
        return 0
    corpus = data.load(data.standard_library())
    tell = lambda line: print(line, flush=True)  # noqa: E731
    jobs.work(wanted, options.output, options.spectra, corpus, Settings(), tell)
    return 0


def parser() -> argparse.ArgumentParser:
    parsers = argparse.ArgumentParser(
        prog="python -m benchmarks.plan_quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parsers.add_subparsers(dest="command", required=True)
    run, tables = (commands.add_parser(name) for name in ("run", "report"))
    for command in (run, tables):
        command.add_argument("--study", choices=tuple(STUDIES), default="plans")
        command.add_argument("--output", type=Path, help="folder of results")
        command.add_argument("--spectra", type=Path, help="folder of spectra and claims")
    run.add_argument("--list", action="store_true", help="what there is to run, and run nothing")
    return parsers


if __name__ == "__main__":
    raise SystemExit(main())
