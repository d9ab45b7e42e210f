"""Plugs ``amo_dist`` into torchtitan 0.2.2.

With ``[experimental] custom_import = "torchtitan_ext"`` torchtitan imports this package before it
looks up the model, and finds the project's llama3 and qwen3 in place of its own. Where torchtitan
is not loaded yet, importing the package stays cheap and registers nothing; ``torchtitan_ext.train``
and ``torchtitan_ext.job_config`` then do so.
"""

from __future__ import annotations

import sys


def register() -> None:
    """Put the project's models in place of torchtitan's; a no-op when repeated.

    Raises:
        ValueError: If torchtitan was loaded for a device that this machine has not, or if another
            extension has taken one of the names.
    """
    from torchtitan_ext.plugin import cpu

    cpu.install()
    from torchtitan_ext.plugin import registration

    registration.register()


if "torchtitan.protocols.train_spec" in sys.modules:
    register()
