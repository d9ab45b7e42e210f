"""Colours, markers and dashes of figures; operator types differ without colour, too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from amo_dist.config import sort_operator_types

# Okabe and Ito's palette, which any colour vision can distinguish; markers; and dashes, so that
# both of two coincident lines, such as those of gate and up, are visible.
_LOOKS: dict[str, tuple[str, str, Any]] = {
    "attn_q": ("#0072B2", "o", "-"),
    "attn_k": ("#56B4E9", "s", "-"),
    "attn_v": ("#009E73", "^", "-"),
    "attn_o": ("#E69F00", "D", "-"),
    "mlp_gate": ("#D55E00", "o", (0, (5, 5))),
    "mlp_up": ("#CC79A7", "s", (5, (5, 5))),
    "mlp_down": ("#333333", "^", (0, (1.5, 1))),
}
_OTHERS = ("#8C6D31", "#7F7F7F", "#4B3F72", "#A6761D")
_RUN_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#333333")
_RUN_LINES = ("-", "--", "-.", ":")
SHALLOW, DEEP = "#0072B2", "#D55E00"
PHASES = {
    "uniform": "#FFFFFF",
    "observation": "#EAF2F8",
    "transition": "#FDF1DC",
    "locked": "#FFFFFF",
}
LAYERS = "cividis"
"""Colour map of depth and of step counts; even in grey."""

_RC: Any = {
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.labelsize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#555555",
    "axes.grid": True,
    "grid.color": "#E3E3E3",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "lines.linewidth": 1.7,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "legend.handlelength": 1.8,
    "legend.columnspacing": 1.2,
    "svg.fonttype": "path",
    "svg.hashsalt": "amo",
}


@contextlib.contextmanager
def applied() -> Iterator[None]:
    """Set the style of figures, whatever the user's own settings of matplotlib."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC)
        yield


def color(operator_type: str, operator_types: tuple[str, ...] = ()) -> str:
    """The colour of an operator type, the same in all figures."""
    if operator_type in _LOOKS:
        return _LOOKS[operator_type][0]
    others = [name for name in sort_operator_types(operator_types) if name not in _LOOKS]
    index = others.index(operator_type) if operator_type in others else 0
    return _OTHERS[index % len(_OTHERS)]


def line(operator_type: str, operator_types: tuple[str, ...] = ()) -> dict[str, Any]:
    """Options for the line of an operator type: attention solid, the feed-forward part dashed."""
    _, marker, dashes = _LOOKS.get(operator_type, ("", "x", "-"))
    return {
        "color": color(operator_type, operator_types),
        "linestyle": dashes,
        "marker": marker,
        "markersize": 3.6,
        "label": operator_type,
    }


def run_line(index: int) -> dict[str, Any]:
    """Options for the line of a run; two equal runs are both visible."""
    return {
        "color": _RUN_COLORS[index % len(_RUN_COLORS)],
        "linestyle": _RUN_LINES[index % len(_RUN_LINES)],
    }
