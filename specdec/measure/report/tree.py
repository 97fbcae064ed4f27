"""A picture of one tree: its nodes, their probabilities, and the accepted path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

ACCEPTED = "#2ca02c"
OTHER = "#8a8a8a"


def draw(
    axis: Any, root: str, labels: Sequence[str], parents: Sequence[int], probabilities: Sequence[float], accepted: Sequence[int]
) -> None:
    """Draw a tree from left to right, a column for each depth and a line for each leaf.

    axis: of matplotlib.
    root: label of the last committed token.
    labels, probabilities: of each node; the probability is that of the node after its parent.
    parents: as in `Draft`.
    accepted: nodes of the accepted path.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    place: dict[int, tuple[float, float]] = {}
    num_leaves = 0

    def lay_out(node: int, depth: int) -> float:
        """The height of a node: the middle of its children's, or a line of its own."""
        nonlocal num_leaves
        if node in children:
            heights = [lay_out(child, depth + 1) for child in children[node]]
            height = (heights[0] + heights[-1]) / 2
        else:
            height = -float(num_leaves)
            num_leaves += 1
        place[node] = depth, height
        return height

    lay_out(-1, 0)
    box: dict[str, Any] = {"boxstyle": "round,pad=0.35", "facecolor": "white"}
    for node, parent in enumerate(parents):
        color = ACCEPTED if node in accepted else OTHER
        (x0, y0), (x1, y1) = place[parent], place[node]
        axis.plot([x0, x1], [y0, y1], color=color, linewidth=2.2 if node in accepted else 1, zorder=1)
        text = f"{labels[node]}\n{probabilities[node]:.2f}"
        axis.text(x1, y1, text, ha="center", va="center", fontsize=8, bbox=box | {"edgecolor": color}, zorder=2)
    axis.text(*place[-1], root, ha="center", va="center", fontsize=8, bbox=box | {"edgecolor": ACCEPTED}, zorder=2)
    depth = max((x for x, _ in place.values()), default=0)
    axis.set(xlim=(-0.5, depth + 0.5), ylim=(-num_leaves + 0.3, 0.7))
    axis.set_axis_off()
