"""The model card: its metadata, its table, and only programs that read the checkpoint."""

import json

import pytest
import yaml
from model_families import tiny_model
from schemes import coded

import compress
from compress.checkpoint.formats.readers import misreadings, programs_run
from compress.models.kinds.causal import CAUSAL
from compress.models.kinds.masked import MaskedLM
from compress.models.kinds.speech import Speech
from compress.report.card import CardFacts, base_metadata, card
from compress.results.result import RunResult


@pytest.fixture(scope="module")
def finished(recipe, tmp_path_factory):
    """A finished run with an evaluation."""
    folder = tmp_path_factory.mktemp("card")
    compress.run(recipe(compress.Wanda(sparsity=0.5), compress.RTN(group_size=32)), folder, progress=False)
    return folder


def front(text: str) -> dict:
    _, metadata, _ = text.split("---\n", 2)
    return yaml.safe_load(metadata)


def changed(report: RunResult, **save) -> RunResult:
    values = report.to_json()
    values["reproduce"]["recipe"]["save"] |= save
    return RunResult.from_json(json.loads(json.dumps(values)))


FACTS = CardFacts(frozenset({"quantized", "masked"}), generates=True, kind=CAUSAL)


def test_a_run_writes_its_card(finished):
    text = (finished / "README.md").read_text()
    report = RunResult.from_json(json.loads((finished / "report.json").read_text()))
    assert front(text)["tags"] == ["compress", "wanda", "rtn", "compressed-tensors", "5.01-bit", "pruned"]
    assert front(text)["library_name"] == "transformers" and front(text)["pipeline_tag"] == "text-generation"
    assert "base_model" not in front(text)  # a local folder is no model of the hub
    quality = report.evaluations["perplexity"][0]
    assert f"| {quality.base.perplexity:.2f} | {quality.compressed.perplexity:.2f} |" in text
    used = report.reproduce
    for condition in (f"torch {used.packages['torch']}", f"threads ({used.threads})", f"kernels ({used.kernels})"):
        assert condition in " ".join(text.split())  # what the bytes depend on
    assert compress.Recipe.from_text(text.split("```yaml\n")[1].split("```")[0]).passes
    assert "README.md" not in report.files and not list(finished.glob("*.part"))


def test_the_base_model_and_its_license_are_stated(finished, tmp_path):
    report = RunResult.from_json(json.loads((finished / "report.json").read_text()))
    text = card(report, "owner/some-model", FACTS, {"license": "apache-2.0"})
    assert front(text)["base_model"] == "owner/some-model" and front(text)["license"] == "apache-2.0"
    assert front(text)["base_model_relation"] == "quantized"
    assert "[owner/some-model](https://huggingface.co/owner/some-model)" in text
    pruned = card(report, "owner/some-model", CardFacts(frozenset({"masked"}), generates=True, kind=CAUSAL), {})
    assert front(pruned)["base_model_relation"] == "finetune" and "license" not in front(pruned)
    (tmp_path / "README.md").write_text("---\nlicense: mit\nlanguage: [en]\ntags: [x]\n---\n# A model\n")
    assert base_metadata(str(tmp_path)) == {"license": "mit", "language": ["en"]}
    (tmp_path / "README.md").write_text("---\nlicense: [\n---\n")
    assert base_metadata(str(tmp_path)) == base_metadata("none.gguf") == base_metadata("no/such-model") == {}


def facts_of(form: str, grid: str, symmetric: bool = True) -> CardFacts:
    schemes = [coded(grid, 32, symmetric)]
    programs = {"programs": tuple(programs_run(form, schemes)), "misreadings": tuple(misreadings(form, schemes))}
    return CardFacts(frozenset({"quantized"}), generates=True, kind=CAUSAL, **programs)


def test_only_programs_that_were_run_are_named(finished):
    report = RunResult.from_json(json.loads((finished / "report.json").read_text()))
    text = card(report, "m", FACTS, {})
    assert "AutoModelForCausalLM" in text and "compress.load" in text and "vllm serve" not in text
    unverified = report.model_copy(update={"verified": report.verified.model_copy(update={"transformers": None})})
    native = card(changed(unverified, format="native"), "m", FACTS, {})
    assert "Other programs were not run" in native and "AutoModel" not in native
    assert front(native)["library_name"] == "compress-llm"
    masked = card(report, "m", CardFacts(frozenset(), generates=False, kind=MaskedLM()), {})
    assert front(masked)["pipeline_tag"] == "fill-mask" and "AutoModelForMaskedLM" in masked
    facts = CardFacts.of([], tiny_model("whisper"))
    assert facts.kind == Speech() and not facts.generates
    heard = card(report, "m", facts, {})
    assert "import AutoModelForSpeechSeq2Seq, AutoProcessor" in heard
    assert 'processor = AutoProcessor.from_pretrained("FOLDER")' in heard and "AutoTokenizer" not in heard


READERS = {
    ("gptq", "int3", True): (["GPTQModel"], ["vLLM refuses it: it reads int4 and int8"]),
    ("gptq", "int4", True): (["GPTQModel", "vllm serve"], []),
    ("gptq", "int4", False): (
        ["GPTQModel"],
        ["vLLM refuses it: it reads no", "ONNX Runtime GenAI computes other weights"],
    ),
    ("awq", "int4", False): (["GPTQModel", "AutoAWQ", "vllm serve"], []),
    ("gguf", "uint4", False): (["llama.cpp"], ["vLLM refuses it without a plugin"]),
    ("compressed-tensors", "nvfp4", True): (["With transformers"], []),
}


@pytest.mark.parametrize("case", READERS, ids=str)
def test_a_card_names_the_programs_of_its_format_and_grid(case, finished):
    form, grid, symmetric = case
    programs, misreading = READERS[case]
    report = RunResult.from_json(json.loads((finished / "report.json").read_text()))
    unverified = report.model_copy(update={"verified": report.verified.model_copy(update={"transformers": None})})
    text = card(changed(unverified, format=form, verify="own"), "m", facts_of(form, grid, symmetric), {})
    assert all(name in text for name in programs) and all(name in text for name in misreading)
    assert ("vllm serve" in text) == ("vllm serve" in programs)


def test_it_claims_no_test_that_was_not_made(finished):
    report = RunResult.from_json(json.loads((finished / "report.json").read_text()))
    untested = report.model_copy(
        update={"verified": report.verified.model_copy(update={"transformers": None, "skipped": "too old"})}
    )
    assert "AutoModel" not in card(untested, "m", FACTS, {})  # the run tried, and transformers cannot read it
    own = changed(untested, verify="own")
    text = card(own, "m", facts_of("compressed-tensors", "int4"), {})
    assert "transformers and the package compressed-tensors (not tested in this run)" in text
