"""report.html: what each section shows, and that everything from outside stays text."""

import copy
import re
from html.parser import HTMLParser

import pytest
from sample_report import BLOCKS, HOSTILE, KINDS, sample

from compress.report.charts import MOST_POINTS, thinned
from compress.report.depth import by_kind, kind_and_depth
from compress.report.names import short_name
from compress.report.page.blocks import Code, PageBlock
from compress.report.pareto import Variant, Variants
from compress.report.render import html
from compress.report.sections import SECTIONS
from compress.report.sections.base import Section
from compress.report.sections.time_and_memory import pipeline
from compress.report.sensitivity import MeasuredSensitivities
from compress.report.verdict import headline
from compress.results.result import RunResult

VOID = {"meta", "link", "wbr"}
LIMIT = 2_000_000  # bytes of a page


class Reader(HTMLParser):
    """The tags of a page, which must be closed in order, and its text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.words = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self):
        return " ".join("".join(self.words).split())

    def found(self, tag, /, **attrs):
        return [known for name, known in self.tags if name == tag and attrs.items() <= known.items()]


def page(values):
    return html(RunResult.from_json(values))


def blocks(section, values):
    return SECTIONS[section]().blocks(RunResult.from_json(values))


@pytest.fixture(scope="module")
def whole():
    return page(sample())


def test_every_section_is_there_in_order(whole):
    ids = [known["id"] for known in Reader(whole).found("section")]
    assert ids == [key for key, _ in sorted(SECTIONS.items(), key=lambda item: item[1].order)]
    links = [known["href"] for known in Reader(whole).found("a")]
    assert links == [f"#{key}" for key in ids[1:]]


def test_the_page_is_complete_by_itself(whole):
    read = Reader(whole)
    assert len(whole.encode()) < LIMIT
    assert not re.search(r"(?:src|href)=\"(?!#|data:)|url\(|@import|https?://", whole)
    assert not read.found("script") and "default-src 'none'" in str(read.found("meta"))
    assert read.found("html", lang="en") and read.found("meta", name="viewport")


def test_the_page_of_a_large_model_is_small():
    """Eighteen thousand experts with a fallback each, and a training of a hundred thousand steps."""
    values = sample()
    few = {"kind": "fallback", "message": "few tokens", "figures": {"tokens": 3, "wanted": 64}}
    values["journal"]["entries"] = [few | {"where": f"passes[0] gptq model.layers.{i}.up"} for i in range(18_000)]
    curve = [{"step": i, "loss": 1 / (1 + i), "rate": 0.1} for i in range(100_000)]
    values["training"]["passes[2] distill"]["curve"] = curve
    text = page(values)
    assert len(text.encode()) < LIMIT / 2
    assert "and 16000 more in report.json" in text
    drawn = thinned([(point["step"], point["loss"]) for point in curve])
    assert len(drawn) == MOST_POINTS and drawn[0] == (0, 1.0) and drawn[-1] == (99_999, 1e-5)
    assert [y for _, y in drawn] == sorted((y for _, y in drawn), reverse=True)


def test_a_model_called_script_stays_text(whole):
    hostile = page(sample(HOSTILE))
    assert not re.search(r"<script", hostile, re.IGNORECASE) and hostile.count("&lt;script&gt;") >= 8
    assert HOSTILE in Reader(hostile).text
    first, second = ([tag for tag, _ in Reader(text).tags if tag != "wbr"] for text in (whole, hostile))
    assert first == second


@pytest.mark.parametrize("name", ['"><img src=x onerror=alert(1)>', "{{ 7 * 7 }}", "</style></title>", "a&b'c"])
def test_other_names_stay_text(name):
    read = Reader(page(sample(name)))
    assert " ".join(name.split()) in read.text and "49 ," not in read.text
    assert not read.found("img") and len(read.found("style")) == 1


def test_the_verdict_in_one_sentence():
    values = sample()
    report = lambda: RunResult.from_json(copy.deepcopy(values))  # noqa: E731
    start = "3.12 times smaller, 2.29 times faster, "
    assert headline(report()) == start + "worse by 0.0812\u00a0±\u00a00.0041 nats per token on embedded."
    text = values["perplexity"].pop(0)
    values["perplexity"] = [text]
    text["difference"] = {"loss": -0.0002, "stderr": 0.04}
    changed = f"KL divergence {text['divergence']['mean']:.2g} nats"
    assert headline(report()).startswith(f"{start}different predictions ({changed}")
    text["difference"] = {"loss": -0.02, "stderr": 0.004}
    assert headline(report()) == start + "better by 0.0200\u00a0±\u00a00.0040 nats per token."
    text["difference"] = {"loss": 0.02, "stderr": None}
    assert "undecided" in headline(report())
    values |= {"perplexity": None, "speed": None}
    assert headline(report()) == "3.12 times smaller, the embeddings agree to 0.98700 ± 0.00030 (cosine)."
    values["agreement"] = None
    assert headline(report()) == "3.12 times smaller, the quality was not measured."
    values["size"]["checkpoint_bytes"] *= 4
    assert headline(report()).startswith("1.28 times larger, ")


def test_the_title_is_short():
    assert short_name("org/model") == "org/model" and short_name("model") == "model"
    assert short_name("/models/small") == "small" and short_name("../a/b.gguf") == "b.gguf" and short_name("/") == "/"
    read = Reader(page(sample("~/models/small")))
    assert "small, compressed" in read.text and "~/models/small: sparsegpt → gptq → distill → native" in read.text


def test_the_options_of_passes_are_spelled_as_in_yaml():
    assert "symmetric false" in page(sample()) and "symmetric False" not in page(sample())


def test_sections_without_data_are_left_out():
    values = sample() | dict.fromkeys(
        ("perplexity", "agreement", "tasks", "generation", "speed", "kv_cache", "sparsity")
    )
    values |= {
        "training": {},
        "layers": [],
        "formats": {},
        "sensitivity": None,
        "journal": {"counts": {}, "entries": []},
    }
    ids = [known["id"] for known in Reader(page(values)).found("section")]
    assert ids == ["verdict", "size_and_quality", "time_and_memory", "checks", "journal", "reproduction"]
    assert "No warnings and no notes." in page(values)


def test_every_entry_of_the_journal_is_shown(whole):
    text = Reader(whole).text
    assert all(f"passes[1] gptq model.layers.{i} (tokens {i})" in text for i in range(BLOCKS))
    warning, *notes = blocks("journal", sample())
    assert warning.label == "warning" and len(warning.places) == BLOCKS and {note.label for note in notes} == {"note"}


def test_tasks_have_intervals_flips_and_failures(whole):
    text = Reader(whole).text
    assert "8 gained, 25 lost, p = 0.0046" in text and "−0.043 [−0.071, −0.014]" in text
    assert "boolq failed: no data in org/model" in text
    _, chart, *_ = blocks("tasks", sample())
    assert [row.tone for row in chart.rows] == ["bad", "plain"]


def test_errors_along_the_depth():
    _, first, second, *_ = blocks("layer_errors", sample())
    assert [chart.title for chart in (first, second)] == ["passes[0] sparsegpt", "passes[1] gptq"]
    assert first.rows == list(KINDS) and first.columns == [str(block) for block in range(BLOCKS)]
    error = next(row["error"] for row in sample()["layers"] if row["layer"].endswith(f"3.{KINDS[1]}"))
    assert first.values[1][3] == error


def test_kinds_and_depths_by_hand():
    assert kind_and_depth("model.layers.3.mlp.down_proj") == ("mlp.down_proj", 3)
    assert kind_and_depth("h.0.mlp.experts.17.up") == ("mlp.experts.*.up", 0)
    assert kind_and_depth("lm_head") == ("lm_head", None)
    assert kind_and_depth("model.layers.12") == ("block", 12)
    pairs = [("h.0.mlp.experts.1.up", 1.0), ("h.0.mlp.experts.2.up", 3.0), ("h.1.fc2", 5.0), ("lm_head", 9.0)]
    assert by_kind(pairs) == {"mlp.experts.*.up": {0: 2.0}, "fc2": {1: 5.0}}


def test_the_pipeline_shows_chosen_options():
    shown = {step.name: list(step.options) for step in pipeline(sample()["reproduce"]["recipe"])}
    assert shown["sparsegpt"] == ["targets *.mlp.*", "pattern 2:4"] and shown["save"] == ["native"]
    assert [step.options for step in pipeline({"passes": [{"own": {"a": [1, 2]}}]})] == [["a 1, 2"]]


def test_sensitivities():
    def one(block, choice, kl):
        sizes = {"weights": 9, "bits": 4.25, "kl_stderr": abs(kl) / 10, "loss": kl, "loss_stderr": None}
        return {"name": f"h.{block}.fc", "choice": choice, "kl": kl, **sizes}

    found = [
        one(block, choice, kl * (block + 1)) for choice, kl in (("int4", 1e-4), (HOSTILE, 2.0)) for block in range(3)
    ]
    facts = {
        "compress": "1",
        "model": "org/m",
        "fingerprint": "f",
        "text": "t",
        "windows": 2,
        "length": 8,
        "level": "layer",
    }
    text = MeasuredSensitivities(**facts, choices={"int4": {}, HOSTILE: {}}, found=found).html()
    read = Reader(text)
    assert len(read.found("div", role="img")) == 2 and not read.found("script") and HOSTILE in read.text
    assert (
        "6.00 nats" not in read.text
        and "12.0 nats over all layers" in read.text
        and "Sensitivity of org/m" in read.text
    )


def test_a_section_with_markdown_alone_is_shown(monkeypatch):
    class Toy(Section):
        title, order = "Toys", 999

        def render(self, report):
            return "1 < 2"

    monkeypatch.setitem(SECTIONS, "toy", Toy)
    assert Toy().blocks(RunResult.from_json(sample())) == [Code("1 < 2")]
    assert "<h2>Toys</h2>" in page(sample()) and "1 &lt; 2" in page(sample())


def test_the_size_of_a_source_that_is_quantized_already():
    """A 4-bit file that becomes a larger one is not reported as smaller without a word."""
    values = sample()
    values["size"]["source_bytes"] = values["size"]["checkpoint_bytes"] // 2
    report = RunResult.from_json(values)
    assert headline(report).startswith("2.00 times larger than the source file, 3.12 times smaller than in ")
    text = Reader(page(values)).text
    assert "checkpoint against the source file, MB" in text and "the source file has" in text
    values["size"]["source_bytes"] = values["size"]["dense_bytes"] + 4096  # headers
    assert headline(RunResult.from_json(values)).startswith("3.12 times smaller, ")


def test_every_kind_of_block_has_a_template(whole):
    from compress.report.page.render import environment

    kinds, templates = list(PageBlock.__subclasses__()), environment().list_templates()
    missing = [kind.__name__ for kind in kinds if f"{kind.__name__.lower()}.html" not in templates]
    assert not missing and len(kinds) >= 12


def test_a_comparison():
    def variant(source, size, loss):
        return Variant(source=source, size_bytes=size, base_bytes=10**9, text="t", loss=loss, loss_stderr=0.01)

    read = Reader(Variants([variant(f"out/{HOSTILE}", 3 * 10**8, 0.2), variant("out/b", 2 * 10**8, 0.1)]).html())
    assert len(read.found("title")) == 1 + 2 and not read.found("script")
    assert "out/b: 5.00x smaller; loss - base 0.1000 ± 0.0100" in read.text
