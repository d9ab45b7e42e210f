"""``amo preflight``: what a config will do on many ranks, in seconds, without any of them."""

from __future__ import annotations

import argparse
import json
import sys

from torchtitan_ext.tools.command import (
    MOST_WORLD,
    Subparsers,
    positive,
    print_parts,
    print_text,
    whole,
)


def add_command(subparsers: Subparsers) -> None:
    """Register ``preflight``."""
    parser = subparsers.add_parser(
        "preflight",
        help="check a config and predict its run, without starting it",
        description="Predict the run of a config without starting it: which parameters Muon and "
        "AdamW train, each rank's work, traffic and memory, the tokens, the checkpoints, and the "
        "steps at which the schedule changes. It does not predict run time. Mistakes of the config "
        "are listed at the end, and the exit status is then 1.",
        epilog="example: amo preflight configs/qwen3_1.7b.toml --world 32; torchtitan's options "
        "follow the file, e.g. --training.steps 200",
    )
    parser.add_argument("config", metavar="FILE", help="TOML file, such as those in configs")
    size = whole(1, MOST_WORLD)
    parser.add_argument("--world", type=size, default=32, help="number of ranks (default 32)")
    parser.add_argument("--gpus-per-node", type=size, default=8, help="ranks per node (default 8)")
    parser.add_argument(
        "--plan",
        metavar="TYPE=STEPS,...",
        default="",
        help="Newton-Schulz steps by operator type after the lock, e.g. attn_q=6,mlp_down=4 "
        "(default: the AMO paper's plan if the config has planner = paper and the paper prints one "
        "for the model, else the uniform schedule)",
    )
    parser.add_argument(
        "--memory-gb",
        type=positive(1e6),
        help="memory of each rank's device, in 1e9 bytes (default: that of this machine's "
        "accelerator, or 80 with --elsewhere; without either, memory is not checked)",
    )
    parser.add_argument(
        "--elsewhere",
        action=argparse.BooleanOptionalAction,
        help="whether the run will start on other machines: a tokenizer, data, network or disk "
        "that this machine lacks is then a note and not a mistake (default: if --world is above "
        "the number of ranks that this machine has)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(run=run, overrides=[])


def run(args: argparse.Namespace) -> int:
    """Print the report, and mistakes of the config after it.

    Returns:
        0, or 1 where the config has mistakes.

    Raises:
        ValueError: The arguments or the file cannot be read.
    """
    print("loading PyTorch and torchtitan ...", file=sys.stderr, flush=True)
    from torchtitan_ext.config import settings
    from torchtitan_ext.plugin import machine
    from torchtitan_ext.tools import preflight_here, preflight_report
    from torchtitan_ext.tools.preflight_prediction import predict

    config = settings.load([f"--{settings.FILE}", args.config, *args.overrides])
    is_elsewhere = args.elsewhere
    if is_elsewhere is None:
        is_elsewhere = args.world > machine.most_ranks()
    memory_gb = args.memory_gb or (80.0 if is_elsewhere else machine.gpu_memory_gb())
    config, problems = preflight_here.validate_config(config, args.world, memory_gb)
    report = predict(config, args.world, args.gpus_per_node, args.plan, problems)
    if config.model_spec is not None:
        lacks = preflight_here.missing_on_this_machine(config)
        if is_elsewhere:
            report["notes"] += [f"on this machine: {problem}" for problem in lacks]
        else:
            problems += lacks
    report["problems"] = list(dict.fromkeys(problems))
    report["config"]["file"] = args.config
    report["world"]["memory_gb"] = memory_gb
    if args.json:
        print_text(json.dumps(report, indent=2))
    else:
        print_parts(preflight_report.parts_of(report))
    return 1 if problems else 0
