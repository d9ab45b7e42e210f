"""Run and report: ``python -m benchmarks.plan_quality run``, ``report``.

``run`` runs what has no record yet, on one thread, and may be stopped at any time. ``report``
prints tables as Markdown.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.plan_quality import data, jobs
from benchmarks.plan_quality.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
STUDIES = {"plans": "plan_quality", "dtypes": "ns_dtype"}
"""Folder of results of each study."""


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plan_quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=("run", "report"))
    parser.add_argument("--study", choices=tuple(STUDIES), default="plans")
    parser.add_argument("--output", type=Path, help="folder of results")
    parser.add_argument("--list", action="store_true", help="what there is to run; run nothing")
    options = parser.parse_args(args)
    is_of_dtypes = options.study == "dtypes"
    output = options.output or RESULTS / STUDIES[options.study]
    if options.command == "report":
        from benchmarks.plan_quality import report  # runs do without pandas

        print(report.dtype_text(output) if is_of_dtypes else report.text(output))
    else:
        wanted = jobs.dtype_jobs() if is_of_dtypes else jobs.all_jobs()
        for job in wanted:
            left = jobs.missing(output, job)
            print(f"{job.start.key}: {len(left)} of {len(job.rows)} to run")
        if not options.list:
            corpus = data.load(data.standard_library())
            jobs.work(wanted, output, corpus, Settings())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
