"""Run and report: ``python -m benchmarks.plan_quality run``, ``report``.

``run`` runs what has no record yet, on one thread, and may be stopped at any time; several may run
side by side. ``report`` writes tables as Markdown and draws figures beside the records.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.plan_quality import data, jobs, report
from benchmarks.plan_quality.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "plan_quality"
LADDER_RESULTS = RESULTS.with_name("ladder")
SPECTRA = ROOT / "outputs" / "plan_quality"


def main(args: Sequence[str] | None = None) -> int:
    options = parser().parse_args(args)
    is_ladder = options.study == "ladder"
    options.output = options.output or (LADDER_RESULTS if is_ladder else RESULTS)
    options.spectra = options.spectra or SPECTRA.with_name(options.output.name)
    if options.command == "report" and is_ladder:
        print(report.ladder_text(options.output))
        return 0
    if options.command == "report":
        print(report.text(options.output))
        for path in report.plot(options.output):
            print(f"figure: {path}")
        return 0
    wanted = jobs.ladder_jobs() if is_ladder else jobs.all_jobs()
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
        command.add_argument("--study", choices=("plans", "ladder"), default="plans")
        command.add_argument("--output", type=Path, help="folder of results")
        command.add_argument("--spectra", type=Path, help="folder of spectra and claims")
    run.add_argument("--list", action="store_true", help="what there is to run, and run nothing")
    return parsers


if __name__ == "__main__":
    raise SystemExit(main())
