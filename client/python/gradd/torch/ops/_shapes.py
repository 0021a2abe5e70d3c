# SPDX-License-Identifier: Apache-2.0
"""What ranks tell each other about their tensors before the data: rows of numbers, and their sums.

Thread: any; the second step of an op calls it on the completion thread.
"""

from __future__ import annotations

from gradd.errors import RanksDisagree
from gradd.torch.engine import describe_row


def split_rows(row: list[int]) -> list[list[int]]:
    """Cut shape_row()s that were laid end to end."""
    parts = []
    while len(row) >= 2:
        parts.append(row[:2 + row[1]])
        row = row[2 + row[1]:]
    return parts


def sum_rows(name: str, ranks: list[int], rows: list[list[list[int]]], index: int) -> int:
    """Rows of the gathered tensor. RanksDisagree unless all but the first dimension agree."""
    first = rows[0][index] if index < len(rows[0]) else []
    total = 0
    for rank_, parts in zip(ranks, rows):
        mine = parts[index] if index < len(parts) else []
        if len(parts) != len(rows[0]):
            raise RanksDisagree(f"\"{name}\": rank {rank_} submitted {len(parts)} tensors, rank "
                                f"{ranks[0]} submitted {len(rows[0])}: all-gather needs the same "
                                "number", -2)
        if mine[:2] != first[:2] or mine[3:] != first[3:]:
            raise RanksDisagree(
                f"\"{name}\": rank {rank_} submitted {describe_row(mine)}, rank {ranks[0]} "
                f"submitted {describe_row(first)}: only the first dimension may differ", -2)
        total += mine[2]
    return total
