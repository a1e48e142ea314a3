"""What each file and record means after a stop, case by case."""

import pytest

from forebay.core.machines.recover import (
    Delete,
    DropRecord,
    FileSeen,
    Identity,
    Keep,
    Quarantine,
    Rebuild,
    RecordSeen,
    Restore,
    Settle,
    judge_file,
    judge_owed,
    judge_record,
)

HEADER = Identity("b", "k", 7, 100, (0, 1))
FILE = FileSeen("data/7", "data", 100, HEADER)
RECORD = RecordSeen("b", "k", 7, "data/7", 100)
DURABLE = RecordSeen("b", "k", 7, "data/7", 100, durable=True)


@pytest.mark.parametrize("trusted", [True, False])
def test_temp_files_go(trusted):
    assert judge_file(FileSeen("tmp/x", "temp", 5, HEADER), RECORD, trusted) == [Delete("tmp/x", "temp")]


def test_a_file_that_its_record_names_stays():
    assert judge_file(FILE, RECORD, True) == [Keep("data/7")]
    assert judge_file(FILE, DURABLE, False) == [Keep("data/7")], "it was synced before its record"


def test_a_file_without_a_record_is_rubbish_or_the_truth():
    assert judge_file(FILE, None, True) == [Delete("data/7", "orphan")]
    assert judge_file(FILE, None, False) == [Rebuild("data/7", HEADER)]


def test_a_file_that_cannot_say_what_it_is_goes():
    unknown = FileSeen("data/7", "data", 100, None)
    assert judge_file(unknown, None, False) == [Delete("data/7", "unreadable")]
    assert judge_file(unknown, RECORD, True) == [DropRecord("b", "k", 7), Delete("data/7", "unreadable")]
    assert judge_file(unknown, DURABLE, False) == [Keep("data/7")], "its record knows everything"


def test_a_file_of_the_wrong_size_or_without_sums_is_not_rebuilt():
    assert judge_file(FileSeen("data/7", "data", 99, HEADER), None, False) == [Delete("data/7", "unreadable")]
    empty = Identity("b", "k", 7, 100)
    assert judge_file(FileSeen("data/7", "data", 100, empty), None, False) == [Delete("data/7", "unreadable")]


def test_of_two_versions_of_a_key_the_later_is_rebuilt_in_either_order():
    later = Identity("b", "k", 9, 100, (0,))
    seen, known = FileSeen("data/9", "data", 100, later), RecordSeen("b", "k", 9, "data/9", 100)
    assert judge_file(seen, RECORD, False) == [Rebuild("data/9", later), Delete("data/7", "superseded")]
    assert judge_file(FILE, known, False) == [Delete("data/7", "superseded")]


def test_a_durable_record_wins_over_every_clean_file():
    other = FileSeen("data/9", "data", 100, Identity("b", "k", 9, 100, (0, 1)))
    assert judge_file(other, DURABLE, False) == [Delete("data/9", "superseded")]


@pytest.mark.parametrize("trusted", [True, False])
def test_a_durable_write_that_was_cut_before_its_record_is_undone(trusted):
    seen = FileSeen("data/9", "data", 100, Identity("b", "k", 9, 100, (0, 1), durable=True))
    assert judge_file(seen, None, trusted) == [Delete("data/9", "orphan")]
    assert judge_file(seen, RECORD, trusted) == [Delete("data/9", "superseded")]


def test_a_file_that_a_durable_record_names_is_set_aside_never_deleted():
    wrong = FileSeen("data/7", "data", 100, Identity("b", "other", 7, 100, (0,)))
    quarantine, lost = judge_file(wrong, DURABLE, True)
    assert isinstance(quarantine, Quarantine)
    assert lost == DropRecord("b", "k", 7, lost=True)


def test_a_record_without_its_file_goes_and_a_durable_one_loudly():
    assert judge_record(RECORD, True) == []
    assert judge_record(RECORD, False) == [DropRecord("b", "k", 7)]
    assert judge_record(DURABLE, False) == [DropRecord("b", "k", 7, lost=True)]
    assert judge_record(RecordSeen("b", "k", 7, "", 10), False) == [], "an inline object has no file"


def test_a_clean_file_beside_a_durable_record_goes():
    newer = RecordSeen("b", "k", 9, "data/9", 100, durable=True)
    assert judge_file(FILE, newer, True) == [Delete("data/7", "superseded")]


# --- what is owed ----------------------------------------------------------------------------------------------------
OLDER = RecordSeen("b", "k", 3, "data/3", 50)
TOMBSTONE = RecordSeen("b", "k", 0, "", 0, durable=True)


def test_what_is_owed_comes_into_view_unless_it_is_there():
    assert judge_owed(DURABLE, None, False, 100) == [Restore(DURABLE)]
    assert judge_owed(DURABLE, OLDER, False, 100) == [Restore(DURABLE)], "the stop came before it was shown"
    assert judge_owed(DURABLE, DURABLE, False, 100) == []


@pytest.mark.parametrize("size_bytes", [None, 99, 101])
def test_what_is_owed_and_gone_is_out_of_view_and_loud(size_bytes):
    lost = DropRecord("b", "k", 7, lost=True)
    assert judge_owed(DURABLE, None, False, size_bytes) == [lost]
    assert judge_owed(DURABLE, DURABLE, False, size_bytes) == [lost, DropRecord("b", "k", 7)]
    assert judge_owed(DURABLE, OLDER, False, size_bytes) == [lost, DropRecord("b", "k", 3)], "nor what it had replaced"


def test_a_flush_that_ended_is_not_owed_again_when_the_visible_index_says_so():
    assert judge_owed(DURABLE, None, True, None) == [Settle(DURABLE)]
    assert judge_owed(DURABLE, RECORD, False, 100) == [Settle(DURABLE)], "clean already"
    assert judge_owed(TOMBSTONE, OLDER, True, None) == [Settle(TOMBSTONE)]


def test_a_tombstone_takes_what_it_was_about_to_take():
    assert judge_owed(TOMBSTONE, OLDER, False, None) == [DropRecord("b", "k", 3)]
    assert judge_owed(TOMBSTONE, None, False, None) == []
