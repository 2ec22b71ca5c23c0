"""The journal keeps entries in order, shows all of them at once, and does not keep progress."""

from compress.passes.contract.journal import Journal, JournalEntry


def test_entries_are_kept_in_order_and_counted():
    journal = Journal()
    journal.add("note", "a", "first", channels=3)
    journal.add("fallback", "b", "second")
    journal.add("note", "c", "third")
    assert journal.entries[0] == JournalEntry("note", "a", "first", {"channels": 3})
    assert [entry.message for entry in journal.entries] == ["first", "second", "third"]
    assert journal.counts() == {"note": 2, "fallback": 1}
    assert [entry.label for entry in journal.entries] == ["note", "warning", "note"]


def test_progress_is_shown_but_not_kept():
    journal, seen = Journal(), []
    journal.listeners += [seen.append, lambda entry: seen.append(entry.kind)]
    journal.add("progress", "a", "block", done=1)
    journal.add("note", "a", "kept")
    assert [item if isinstance(item, str) else item.message for item in seen] == ["block", "progress", "kept", "note"]
    assert journal.counts() == {"note": 1}


def test_two_journals_share_nothing():
    Journal().add("note", "a", "b")
    assert Journal().entries == [] and Journal().counts() == {}
