"""report.md: every figure in it comes from report.json."""

import copy
import json
import re

import pytest

import compress
from compress.report.markdown import (
    by_pass,
    checks,
    costs,
    evidence,
    journal,
    kv_cache,
    markdown,
    reconstruction,
    training,
    worst,
    write_report,
)

MB = 1_000_000
REPORT = {
    "compress": "9.8.7",
    "model": {"source": "some/model", "fingerprint": "f1"},
    "size": {
        "dense_bytes": 10 * MB, "tensor_bytes": 4 * MB, "checkpoint_bytes": 5 * MB, "compressed_layers": 3,
        "compressed_weights": 4 * MB, "compressed_bytes": 2 * MB, "bits_per_weight": 4.0,
    },
    "quality": [
        {"text": "a", "windows": 2, "length": 8, "base": {"perplexity": 10.0, "of": "next tokens"}, "compressed": {"perplexity": 12.5}}
    ],
    "layers": [
        {"layer": "x", "by": "one", "error": 0.1, "sparsity": 0.5},
        {"layer": "y", "by": "one", "error": 0.3, "sparsity": 0.0},
        {"layer": "z", "by": "two", "error": None, "sparsity": 0.25},
    ],
    "sparsity": None,
    "kv_cache": None,
    "costs": {"save": {"seconds": 1.26, "peak_bytes": 7 * MB}},
    "training": {},
    "predicted": {"tensor_bytes": 4 * MB, "memory_bytes": 30 * MB},
    "verified": {"layers": 3, "own": 0.0, "transformers": 1e-5, "skipped": None},
    "journal": {"entries": [{"kind": "note", "where": w, "message": "hm", "figures": {}} for w in ("x", "y", "z")]},
    "reproduce": {
        "recipe": {"model": "some/model"}, "calibration_sha256": "c1", "compute_dtype": "float32",
        "storage_dtype": "bfloat16", "device": "cpu", "threads": 2, "python": "3.11", "platform": "p",
        "packages": {"torch": "2.0", "gguf": None},
    },
    "checkpoint_sha256": "s1",
}  # fmt: skip


@pytest.fixture
def report():
    return copy.deepcopy(REPORT)


def test_size_and_quality_by_hand(report):
    # bfloat16: 16 bits each before
    assert evidence(report) == [
        ("checkpoint, MB", "10.0", "5.0", "2.00x smaller"),
        ("bits per weight, 3 layers", "16.00", "4.000", "4.00x smaller"),
        ("perplexity, a (2 x 8 tokens)", "10.00", "12.50", "1.250x"),
    ]


def test_perplexity_of_masked_tokens_is_called_so(report):
    report["quality"][0]["base"]["of"] = "masked tokens"
    assert evidence(report)[2][0] == "perplexity of masked tokens, a (2 x 8 tokens)"


def test_errors_of_blocks_that_learned_are_told_in_their_order(report):
    assert reconstruction(report) == []
    for block, start, learned in ((0, 0.5, 0.25), (1, 0.25, 0.5), (2, 1.0, 0.75)):  # the second stayed as it was
        entry = {"kind": "note", "where": f"passes[1] p layers.{block}", "message": "error"}
        report["journal"]["entries"].append({**entry, "figures": {"start": start, "learned": learned}})
    (text,) = reconstruction(report)
    assert text.splitlines()[-4:-1] == [
        "passes[1] p: 3 blocks", "  before           0.5 ▃▁█ 1", "  after           0.25 ▁▁█ 0.75"
    ]  # fmt: skip
    assert text in markdown(report)


def test_time_errors_and_journal_by_hand(report):
    assert costs(report) == [("save", "1.3", "7")]
    assert by_pass(report) == [("one", "2", "0.2000", "0.3000", "0.250"), ("two", "1", "nan", "nan", "0.250")]
    assert worst(report) == [("y", "one", "0.3000"), ("x", "one", "0.1000")]
    assert journal(report) == ["- note: hm (x and 2 more)"]


def test_training_by_hand(report):
    assert training(report) == [] and "## Training" not in markdown(report)
    curve = [{"step": i + 1, "loss": float(20 - i), "rate": 1.0} for i in range(20)]
    curve.insert(3, {"step": 3, "held_out": 7.5})
    record = {"first_loss": 19.5, "last_loss": 1.5, "steps": 20, "seconds": 1.26, "best": None, "curve": curve}
    report["training"] = {"one": record, "two": {**record, "best": {"step": 3, "held_out": 7.5}}}
    (section,) = training(report)
    assert section.splitlines()[4:6] == [
        "| one | 20 | 19.5 | 1.5 | none | 1.3 |",
        "| two | 20 | 19.5 | 1.5 | 7.5 (step 3) | 1.3 |",
    ]
    assert section in markdown(report)


def test_a_rounded_cache_by_hand(report):
    assert kv_cache(report) == [] and "## KV cache" not in markdown(report)
    of = {"keys, int8 per attention": {"attentions": 3, "mean_error": 0.01, "largest_error": 0.02}}
    sizes = {"before": 768.0, "after": 408.0}
    report["kv_cache"] = {"bytes_per_token": sizes, "stated": True, "of": of, "attentions": {}}
    (section,) = kv_cache(report)
    assert section.splitlines()[-1] == "| keys, int8 per attention | 3 | 0.0100 | 0.0200 |"
    assert "kv_cache_scheme in config.json" in section and section in markdown(report)
    assert evidence(report)[2] == ("KV cache, bytes per token", "768", "408", "1.88x smaller")
    report["kv_cache"]["stated"] = False
    assert "Only compress.load knows of it" in kv_cache(report)[0]


def test_checks_say_what_was_not_done(report):
    assert checks(report)[-1] == "reloaded by transformers: logits differ by at most 1e-05, weights equal"
    report["verified"] |= {"transformers": None, "skipped": "too far"}
    assert checks(report)[-1] == "not reloaded by transformers: too far"


def test_checks_say_whether_the_plan_knew_the_size(report):
    assert checks(report)[0] == "tensor bytes: 4000000, as predicted by the plan"
    report["predicted"]["tensor_bytes"] = 3 * MB
    allocated = "as layers ended; 3000000 were predicted before calibration decided on some"
    assert checks(report)[0] == f"tensor bytes: 4000000, {allocated}"


def test_a_quiet_run_says_so(report):
    report["journal"]["entries"] = []
    assert "Nothing was done another way than asked." in markdown(report)


def test_every_figure_of_the_report_comes_from_report_json(recipe, tiny_folder, tmp_path):
    """The page can be made again from the file alone, and follows each number in it."""
    asked = recipe(compress.RTN(group_size=16), model=tiny_folder("llama"), save={"format": "native"})
    folder = compress.run(asked, tmp_path / "out").folder
    stored = json.loads((folder / "report.json").read_text())
    page = (folder / "report.md").read_text()
    assert markdown(stored) == page
    assert re.search(r"\| bits per weight, 21 layers \| 32\.00 \| 6\.000 \| 5\.33x smaller \|", page)
    for change in ("dense_bytes", "checkpoint_bytes", "bits_per_weight", "compressed_layers"):
        other = copy.deepcopy(stored)
        other["size"][change] *= 2
        assert markdown(other) != page, change


def test_both_files_are_written(report, tmp_path):
    write_report(report, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert (tmp_path / "report.md").read_text() == markdown(report)
