from __future__ import annotations

import numpy as np

from tests.workers.execute.factories import make_sequences
from triptych.workers.execute.scheduling.rows import Rows
from triptych.workers.execute.scheduling.sequence import Sequence


def seated(*tables: list[int]) -> tuple[Rows, list[Sequence]]:
    """Rows with sequences that have these block tables."""
    rows = Rows(4, 3)
    sequences = make_sequences(len(tables))
    for sequence, table in zip(sequences, tables, strict=True):
        sequence.block_table = table
        rows.seat(sequence)
    return rows, sequences


def test_block_tables_are_padded_with_the_trash_page() -> None:
    rows, _ = seated([5, 6], [7])
    assert rows.block_tables[:2].tolist() == [[5, 6, 0], [7, 0, 0]]


def test_row_is_cleared_when_its_sequence_leaves() -> None:
    rows, sequences = seated([5, 6, 7])
    rows.leave(sequences[0])
    assert not np.any(rows.block_tables)


def test_new_pages_are_appended() -> None:
    rows, sequences = seated([5])
    sequences[0].block_table += [9]
    rows.write_pages(sequences[0], 1)
    assert rows.block_tables[0].tolist() == [5, 9, 0]


def test_sequences_come_in_row_order() -> None:
    rows, sequences = seated([1], [2], [3])
    rows.leave(sequences[0])
    rows.seat(sequences[0])
    assert rows.take_turns(4) == sequences


def test_sequences_take_turns_if_not_all_fit_into_a_step() -> None:
    rows, _ = seated([1], [2], [3], [4])
    turns = [[sequence.row for sequence in rows.take_turns(3)] for _ in range(4)]
    assert turns == [[0, 1, 2], [0, 1, 3], [0, 2, 3], [1, 2, 3]]


def test_leaving_sequence_costs_no_other_its_turn() -> None:
    rows, sequences = seated([1], [2], [3])
    rows.take_turns(1)
    rows.leave(sequences[1])
    assert rows.take_turns(1) == [sequences[2]]
