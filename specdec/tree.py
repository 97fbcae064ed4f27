"""Trees of draft tokens, as arrays of parents: -1 is the last committed token, and a parent comes before its children.

Two orders of a tree's nodes are of use. Drafts have them by score, so that their first n nodes are the best tree of n nodes. In
a cache the likeliest path comes first: if that is what is accepted, its K and V are where a chain's would be.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def check_settings(tree_topk: int | None, tree_depth: int | None) -> None:
    """Raise ValueError, one line, for settings of a method's draft trees that are beyond their limits."""
    if tree_topk is not None and not tree_topk >= 1:
        raise ValueError(f"tree_topk={tree_topk} must be at least 1; try 4, or leave it out for chains")
    if tree_depth is not None and not tree_depth >= 1:
        raise ValueError(f"tree_depth={tree_depth} must be at least 1; try 8, or leave it out for no limit of its own")
    if tree_depth is not None and tree_topk is None:
        raise ValueError(f"tree_depth={tree_depth} is for trees, and tree_topk is not set; set it, or leave tree_depth out")


def depths(parent_BK: np.ndarray) -> np.ndarray:
    """[B, K] nodes between each node and the last committed token: 0 for its children."""
    depth_BK = np.zeros_like(parent_BK)
    rows = np.arange(len(parent_BK))
    for k in range(parent_BK.shape[1]):
        parent_B = parent_BK[:, k]
        depth_BK[:, k] = np.where(parent_B < 0, 0, depth_BK[rows, parent_B] + 1)
    return depth_BK


def height(parent_BK: np.ndarray, length_B: np.ndarray) -> np.ndarray:
    """[B] nodes of each row's longest path. length_B: nodes of each row; the rest is padding."""
    is_node_BK = np.arange(parent_BK.shape[1]) < length_B[:, None]
    return np.where(is_node_BK, depths(parent_BK) + 1, 0).max(1, initial=0)


def height_of(parents: list[int]) -> int:
    """The same of one tree, on its own much faster."""
    path_lengths: list[int] = []
    for parent in parents:
        path_lengths.append(1 + (path_lengths[parent] if parent >= 0 else 0))
    return max(path_lengths, default=0)


def chain(num_rows: int, num_nodes: int) -> np.ndarray:
    """[B, K] the parents of chains."""
    return np.tile(np.arange(num_nodes) - 1, (num_rows, 1))


def is_first_child(parent_BK: np.ndarray) -> np.ndarray:
    """[B, K] whether a node is its parent's first child."""
    same_BKK = parent_BK[:, :, None] == parent_BK[:, None]
    return ~np.tril(same_BKK, -1).any(2)


def on_path(parent_BK: np.ndarray) -> np.ndarray:
    """[B, K, K] whether the second node is the first one, or above it."""
    num_rows, num_nodes = parent_BK.shape
    on_path_BKK = np.zeros((num_rows, num_nodes, num_nodes), dtype=bool)
    row_B = np.arange(num_rows)
    for k in range(num_nodes):
        parent_B = parent_BK[:, k]
        on_path_BKK[:, k] = on_path_BKK[row_B, parent_B] & (parent_B >= 0)[:, None]
        on_path_BKK[:, k, k] = True
    return on_path_BKK


def slots(parent_BK: np.ndarray, length_B: np.ndarray) -> np.ndarray:
    """[B, K] places of the nodes in a cache, from 0: first the path that always goes to the first child, then the others in
    order. Padding comes last."""
    num_rows, num_nodes = parent_BK.shape
    at_B = np.full(num_rows, -1)
    is_first_path_BK = np.zeros((num_rows, num_nodes), dtype=bool)
    for k in range(num_nodes):
        goes_B = (parent_BK[:, k] == at_B) & (k < length_B)
        is_first_path_BK[:, k] = goes_B
        at_B = np.where(goes_B, k, at_B)
    order_BK = np.argsort(~is_first_path_BK, axis=1, kind="stable")
    slot_BK = np.empty_like(order_BK)
    np.put_along_axis(slot_BK, order_BK, np.broadcast_to(np.arange(num_nodes), order_BK.shape), 1)
    return slot_BK


def graft(
    token_K: np.ndarray, parent_K: np.ndarray, other_token_K: np.ndarray, other_parent_K: np.ndarray, max_nodes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Two trees under one root: nodes of both in turn, each in its order, those with the same path once.

    Returns the tokens and parents of the nodes; and the place of each in the one tree and in the other, -1 where it has none.
    """
    place: dict[tuple[int, int], int] = {}  # of a node, by its parent's place and its token
    sources = [
        list(zip(token_K.tolist(), parent_K.tolist(), strict=True)),
        list(zip(other_token_K.tolist(), other_parent_K.tolist(), strict=True)),
    ]
    placed: tuple[list[int], list[int]] = ([], [])
    nodes: list[tuple[int, int]] = []
    origins: list[list[int]] = []
    for turn in range(2 * max(map(len, sources))):
        which = turn % 2
        number = turn // 2
        if number >= len(sources[which]):
            continue
        token, parent = sources[which][number]
        above = placed[which][parent] if parent >= 0 else -1
        if above < -1:
            placed[which].append(-2)  # its parent found no room
            continue
        if (above, token) not in place:
            if len(nodes) == max_nodes:
                placed[which].append(-2)
                continue
            place[above, token] = len(nodes)
            nodes.append((token, above))
            origins.append([-1, -1])
        placed[which].append(place[above, token])
        origins[place[above, token]][which] = number
    tokens, parents = np.array(nodes, dtype=np.int64).reshape(-1, 2).T
    first, second = np.array(origins, dtype=np.int64).reshape(-1, 2).T
    return tokens, parents, first, second


def walk(parent_BK: Tensor, accept_BK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Go from the last committed token to the first child that is accepted, and on from there, as long as there is one.

    accept_BK: whether a walk that is at a node's parent may go to the node.
    Returns the number of accepted nodes [B], the last of them [B] (-1: none), and all of them in order, [B, K], then padding.
    """
    at_B = parent_BK.new_full(parent_BK.shape[:1], -1)
    num_accepted_B = torch.zeros_like(at_B)
    path_BK = torch.zeros_like(parent_BK)
    for k in range(parent_BK.shape[1]):
        goes_B = accept_BK[:, k] & (parent_BK[:, k] == at_B)
        at_B = torch.where(goes_B, k, at_B)
        path_BK.scatter_add_(1, num_accepted_B.unsqueeze(1), k * goes_B.long().unsqueeze(1))
        num_accepted_B = num_accepted_B + goes_B
    return num_accepted_B, at_B, path_BK


def path_to(parent_BK: Tensor, node_B: Tensor) -> tuple[Tensor, Tensor]:
    """The path that ends at a node of each row: number of its nodes [B], and these in order, [B, K], then padding.

    node_B: -1 is the path without nodes.
    """
    is_on_BK = torch.zeros_like(parent_BK, dtype=torch.bool)
    for k in reversed(range(parent_BK.shape[1])):
        is_on_BK[:, k] = node_B == k
        node_B = torch.where(is_on_BK[:, k], parent_BK[:, k], node_B)
    order_BK = (~is_on_BK).long().argsort(dim=1, stable=True)
    return is_on_BK.sum(1), order_BK
