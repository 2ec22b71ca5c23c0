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


def merged(*entries):
    """The entries that a listener hears of those of a pass on a block with the linears a, b, c and d."""
    journal, heard = Journal(), []
    journal.listeners.append(heard.append)
    with journal.one_per_block("passes[0] p", "layers.1", ["a", "b", "c", "d"]):
        for entry in entries:
            journal.add(entry.kind, entry.where, entry.message, **entry.figures)
    assert journal.entries == heard
    return heard


BLOCK = "passes[0] p layers.1"


def of(name, message="few tokens", **figures):
    return JournalEntry("fallback", f"{BLOCK}.{name}", message, figures)


def test_equal_fallbacks_of_a_block_are_one_entry():
    found = merged(of("a", tokens=9, wanted=64, cause="x"), of("b", "other"), of("c", tokens=3, wanted=64, cause="x"))
    figures = {"linears": 2, "first": "a", "tokens": "3 to 9", "wanted": 64, "cause": "x"}
    assert found == [JournalEntry("fallback", BLOCK, "few tokens", figures), of("b", "other")]
    assert found[0].place == f"{BLOCK} (linears 2, first a, tokens 3 to 9, wanted 64, cause x)"


def test_names_before_a_message_of_a_block_are_its_linears():
    found = merged(*(JournalEntry("fallback", BLOCK, f"{names}: not scaled") for names in ("a, b", "c", "norm")))
    assert found == [
        JournalEntry("fallback", BLOCK, "not scaled", {"linears": 3, "first": "a"}),
        JournalEntry("fallback", BLOCK, "norm: not scaled"),
    ]


def test_one_fallback_and_notes_of_a_block_stay_as_they_are():
    one = JournalEntry("fallback", BLOCK, "a, b: not scaled", {"relative_error": 0.5})
    notes = [JournalEntry("note", f"{BLOCK}.{name}", "fine") for name in "ab"]
    assert merged(one, *notes) == [*notes, one]


def test_entries_without_names_are_counted():
    found = merged(*(JournalEntry("fallback", BLOCK, "undone", {"error": error}) for error in (0.25, 0.5)))
    assert found == [JournalEntry("fallback", BLOCK, "undone", {"times": 2, "error": "0.25 to 0.5"})]


def test_fallbacks_before_a_failure_are_kept():
    journal = Journal()
    try:
        with journal.one_per_block("passes[0] p", "layers.1", ["a"]):
            journal.add("fallback", f"{BLOCK}.a", "few tokens")
            raise RuntimeError
    except RuntimeError:
        assert journal.entries == [of("a")]
