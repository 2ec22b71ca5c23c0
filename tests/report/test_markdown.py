"""report.md: every figure in it comes from report.json."""

import copy
import json
import re

import pytest

import compress
from compress.report.names import escaped, in_code
from compress.report.render import markdown
from compress.report.sections import SECTIONS, checks, journal, layer_errors, size_and_quality, time_and_memory
from compress.report.sections.base import table
from compress.report.write import write_report
from compress.results.result import RunResult

MB = 1_000_000
REPORT = {
    "compress": "9.8.7",
    "model": {"source": "some/model", "class": "Model", "fingerprint": "f1"},
    "size": {
        "dense_bytes": 10 * MB,
        "tensor_bytes": 4 * MB,
        "checkpoint_bytes": 5 * MB,
        "compressed_layers": 3,
        "compressed_weights": 4 * MB,
        "compressed_bytes": 2 * MB,
        "bits_per_weight": 4.0,
    },
    "layers": [
        {"layer": "x", "by": "one", "error": 0.1, "sparsity": 0.5, "asked": 0.5, "due": 0.5},
        {"layer": "y", "by": "one", "error": 0.3, "sparsity": 0.0, "asked": None, "due": None},
        {"layer": "z", "by": "two", "error": None, "sparsity": 0.25, "asked": None, "due": None},
    ],
    "costs": {"save": {"seconds": 1.26, "peak_bytes": 7 * MB}},
    "training": {},
    "predicted": {"tensor_bytes": 4 * MB, "memory_bytes": 30 * MB},
    "verified": {"layers": 3, "own": 0.0, "transformers": 1e-5, "skipped": None},
    "journal": {
        "counts": {"note": 3},
        "entries": [{"kind": "note", "where": w, "message": "hm", "figures": {}} for w in ("x", "y", "z")],
    },
    "reproduce": {
        "recipe": {"model": "some/model"},
        "fingerprint": "r1",
        "code": {"rtn": "s2"},
        "calibration_sha256": "c1",
        "compute_dtype": "float32",
        "storage_dtype": "bfloat16",
        "device": "cpu",
        "threads": 2,
        "kernels": "generic",
        "python": "3.11",
        "platform": "p",
        "packages": {"torch": "2.0", "gguf": None},
        "texts": [
            {
                "text": "chats",
                "part": "calibration",
                "sequences": 4,
                "length": 8,
                "sha256": "t0",
                "documents": 9,
                "skipped": 2,
                "tokens": 99,
                "forms": ["messages"],
                "template": "tokenizer",
                "packing": True,
                "max_tokens_per_document": None,
            },
        ],
    },
    "files": {"config.json": "h1"},
    "checkpoint_sha256": "s1",
    "kv_cache": None,
    "sparsity": None,
    "perplexity": [
        {
            "text": "a",
            "windows": 2,
            "length": 8,
            "sha256": "t1",
            "base": {"loss": 2.0, "tokens": 14, "seconds": 1.0, "of": "next tokens", "perplexity": 10.0},
            "compressed": {"loss": 3.0, "tokens": 14, "seconds": 1.0, "of": "next tokens", "perplexity": 12.5},
        }
    ],
}


@pytest.fixture
def report():
    return copy.deepcopy(REPORT)


def rendered(section, report):
    """The text of a section, which the whole page holds below its heading."""
    found = SECTIONS[section]().render(RunResult.from_json(report))
    page, title = markdown(RunResult.from_json(report)), SECTIONS[section].title
    assert f"## {title}\n\n{found}" in page if found is not None else f"## {title}" not in page
    return found


def summary(report):
    return size_and_quality.rows(RunResult.from_json(report))


def test_size_and_quality_by_hand(report):
    # bfloat16: 16 bits each before
    assert summary(report) == [
        ("checkpoint, MB", "10.0", "5.00", "2.00x smaller"),
        ("bits per weight, 3 layers", "16.00", "4.000", "4.00x smaller"),
        ("perplexity, a (2 x 8 tokens)", "10.00", "12.50", "+25.0%"),
    ]


def test_perplexity_of_masked_tokens_is_called_so(report):
    report["perplexity"][0]["compressed"]["of"] = "masked tokens"
    assert summary(report)[2][0] == "perplexity of masked tokens, a (2 x 8 tokens)"


def test_errors_of_reconstructed_blocks_are_in_the_order_of_the_model(report):
    assert rendered("block_reconstruction", report) is None
    for block, start, learned in ((0, 0.5, 0.25), (1, 0.25, 0.5), (2, 1.0, 0.75)):  # the second stayed as it was
        entry = {"kind": "note", "where": f"passes[1] p layers.{block}", "message": "error"}
        report["journal"]["entries"].append({**entry, "figures": {"start": start, "learned": learned}})
    assert rendered("block_reconstruction", report).splitlines()[-4:-1] == [
        "passes[1] p: 3 blocks",
        "  before           0.5 ▃▁█ 1",
        "  after           0.25 ▁▁█ 0.75",
    ]


def test_time_errors_and_journal_by_hand(report):
    found = RunResult.from_json(report)
    assert time_and_memory.rows(found) == [("save", "1.3", "7.00")]
    assert layer_errors.by_pass(found) == [
        ("one", "2", "0.2000", "0.3000", "0.250"),
        ("two", "1", "nan", "nan", "0.250"),
    ]
    assert layer_errors.largest(found) == [("y", "one", "0.3000"), ("x", "one", "0.1000")]
    assert journal.lines(found) == ["note: hm (x and 2 more)"]


def test_the_memory_of_an_accelerator_is_shown_where_one_was_used(report):
    assert "accelerator" not in rendered("time_and_memory", report)
    report["costs"] |= {"verify": {"seconds": 2, "peak_bytes": 3 * MB, "device_bytes": 5 * MB}}
    assert rendered("time_and_memory", report).splitlines() == [
        "| phase | seconds | peak memory, MB | peak memory of the accelerator, MB |",
        "| --- | --- | --- | --- |",
        "| save | 1.3 | 7.00 | 0 |",
        "| verify | 2.0 | 3.00 | 5.00 |",
    ]
    _, bars, *_ = SECTIONS["time_and_memory"]().blocks(RunResult.from_json(report))
    assert [group.title for group in bars.groups] == ["Time", "Peak memory", "Peak memory of the accelerator"]


def test_training_by_hand(report):
    assert rendered("training", report) is None
    curve = [{"step": i + 1, "loss": float(20 - i), "rate": 1.0} for i in range(20)]
    curve.insert(3, {"step": 3, "held_out": 7.5})
    record = {
        "first_loss": 19.5,
        "last_loss": 1.5,
        "steps": 20,
        "of": 20,
        "trained": {"weights": 4},
        "seconds": 1.26,
        "held_out": [],
        "best": None,
        "curve": curve,
    }
    report["training"] = {"one": record, "two": {**record, "best": {"step": 3, "held_out": 7.5}}}
    assert rendered("training", report).splitlines()[2:4] == [
        "| one | 20 | 19.5 | 1.5 | none | 1.3 |",
        "| two | 20 | 19.5 | 1.5 | 7.5 (step 3) | 1.3 |",
    ]


def test_a_quantized_cache_by_hand(report):
    assert rendered("kv_cache", report) is None
    of = {"keys, int8 per attention": {"attentions": 3, "mean_error": 0.01, "largest_error": 0.02}}
    sizes = {"before": 768.0, "after": 408.0}
    report["kv_cache"] = {
        "bytes_per_token": sizes,
        "simulated": True,
        "stated": True,
        "of": of,
        "attentions": {},
        "summaries": ["Keys are in half precision."],
    }
    section = rendered("kv_cache", report)
    assert section.splitlines()[-1] == "| keys, int8 per attention | 3 | 0.0100 | 0.0200 |"
    assert "Keys are in half precision. kv_cache_scheme in config.json" in section
    assert ("KV cache, bytes per token", "768", "408", "1.88x smaller, simulated") in summary(report)
    report["kv_cache"]["simulated"] = False
    assert ("KV cache, bytes per token", "768", "408", "1.88x smaller") in summary(report)
    report["kv_cache"]["stated"] = False
    assert "Only compress.load applies it" in rendered("kv_cache", report)


def test_checks_say_what_was_not_done(report):
    line = "reloaded by transformers: outputs differ by at most 1e-05, weights equal"
    assert checks.lines(RunResult.from_json(report))[-1] == line
    report["verified"] |= {"transformers": None, "skipped": "too far"}
    assert checks.lines(RunResult.from_json(report))[-1] == "not reloaded by transformers: too far"


def test_checks_say_whether_the_plan_knew_the_size(report):
    assert checks.lines(RunResult.from_json(report))[0] == "tensor bytes: 4000000, as predicted by the plan"
    report["predicted"]["tensor_bytes"] = 3 * MB
    chosen = "3000000 were predicted before calibration chose the schemes of some layers"
    assert checks.lines(RunResult.from_json(report))[0] == f"tensor bytes: 4000000, {chosen}"


def test_a_quiet_run_says_so(report):
    report["journal"]["entries"] = []
    assert rendered("journal", report) == "No warnings and no notes."


def test_every_figure_of_the_report_comes_from_report_json(recipe, tiny_folder, tmp_path):
    """The page can be made again from the file alone, and follows each number in it."""
    asked = recipe(compress.RTN(group_size=16), model=tiny_folder("llama"), save={"format": "native"})
    folder = compress.run(asked, tmp_path / "out").folder
    stored = json.loads((folder / "report.json").read_text())
    page = (folder / "report.md").read_text()
    assert markdown(RunResult.from_json(stored)) == page
    assert re.search(r"\| bits per weight, 21 layers \| 32\.00 \| 6\.000 \| 5\.33x smaller \|", page)
    for change in ("dense_bytes", "checkpoint_bytes", "bits_per_weight", "compressed_layers"):
        other = copy.deepcopy(stored)
        other["size"][change] *= 2
        assert markdown(RunResult.from_json(other)) != page, change


def test_the_reproduction_says_what_was_read(report):
    text = "chats, messages, 9 documents (2 blank rows skipped), 99 tokens, chat template: tokenizer, "
    row = f"| calibration text | {text}4 sequences of 8 tokens, sha256 t0 |"
    assert row in rendered("reproduction", report)
    del report["reproduce"]["texts"]  # as earlier versions wrote it
    assert "calibration text" not in rendered("reproduction", report)


def test_both_files_are_written(report, tmp_path):
    write_report(RunResult.from_json(report), tmp_path)
    assert RunResult.from_json(json.loads((tmp_path / "report.json").read_text())) == RunResult.from_json(report)
    assert (tmp_path / "report.md").read_text() == markdown(RunResult.from_json(report))


NAME = "a|b [x](https://example.org) <img src=x> `c`\n# d"


def test_names_of_files_are_text_in_markdown():
    shown = escaped(NAME)
    assert shown == r"a\|b \[x](https://example.org) \<img src=x> \`c\` # d"
    assert in_code(NAME) == "`a|b [x](https://example.org) <img src=x> c # d`"
    assert table(("module",), [(NAME,)]).splitlines()[2] == f"| {shown} |"
