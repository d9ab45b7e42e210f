"""Environment variables of each process of a training, whichever way it was started.

``python -m torchtitan_ext.environment RANKS`` prints it for scripts, a ``NAME=value`` a line.
"""

from __future__ import annotations

import os
import sys


def variables(ranks: int) -> dict[str, str]:
    """The variables by name, without those that somebody has set.

    Args:
        ranks: Processes of this node.
    """
    cpus = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    values = {
        # Segments that grow leave less memory unused between tensors of many sizes.
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        # NCCL finds the network by itself on most clusters; launch/README.md lists what helps.
        "NCCL_DEBUG": "WARN",
        # torchrun would keep one store for all restarts, with the addresses of dead ranks.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": str(max(cpus // ranks, 1)),
    }
    if "PYTORCH_CUDA_ALLOC_CONF" in os.environ:  # its name before PyTorch 2.9
        del values["PYTORCH_ALLOC_CONF"]
    return {name: value for name, value in values.items() if name not in os.environ}


def set_variables(ranks: int) -> None:
    """Set the variables in this process, for itself and for all that it starts."""
    os.environ.update(variables(ranks))


def main(ranks: str) -> None:
    """Print the variables; ``auto`` is torchrun's number of ranks.

    Ends with an error where PyTorch does not see the GPUs of the machine.
    """
    import torch

    from torchtitan_ext.plugin import machine

    try:
        machine.device_type()
    except ValueError as error:
        sys.exit(f"error: {error}")
    if ranks == "auto":
        ranks = str(torch.accelerator.device_count() or os.cpu_count())
    print("\n".join(f"{name}={value}" for name, value in variables(int(ranks)).items()))


if __name__ == "__main__":
    main(sys.argv[1])
