"""What `compress.load` returns is a PreTrainedModel: what other libraries call on one, for every format and both ends.

The reference is transformers on the same weights, dense: the checkpoint exported to format `dense` and opened by
`AutoModelForCausalLM`. Tying, resizing and replacing the ends are in test_end_methods.py.
"""

import copy
import json
import multiprocessing
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from batches import batch_of
from on_pico import PICO
from pydantic import TypeAdapter
from tolerances import LOGITS, same_logits
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, StaticCache, TextStreamer

import compress
from compress import Evaluate
from compress.checkpoint.formats import FORMATS
from compress.errors import CompressError
from compress.evaluation import combine_all, measure_all, speed
from compress.evaluation.base import EvaluationContext
from compress.layers.linear import CompressedLinear
from compress.models.kinds.batch import Examples
from compress.passes.contract.context import Run
from compress.pipeline.evaluation import evaluate
from compress.results.measurements import MEASUREMENTS

IDS = torch.arange(1, 33).view(2, 16)
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
ENDS = ("lm_head", "embed_tokens")
LAYERS = {
    "native": {"weights": "int4", "group_size": 32},
    "compressed-tensors": {"weights": "int4", "group_size": 32},
    "gptq": {"weights": "int4", "group_size": 32},
    "awq": {"weights": "int4", "group_size": 32, "symmetric": False},
    "bitsandbytes": {"weights": "nf4", "group_size": 32},
    "mlx": {"weights": "uint4", "group_size": 32},
    "modelopt": {"weights": "nvfp4"},
    "gguf": {"weights": "int8", "group_size": 32},
    "dense": None,
}
PACKED_ENDS = {"native": ((), ENDS), "gguf": (ENDS,), "mlx": ((), ENDS), "compressed-tensors": ((), ENDS[:1])}
"""Which ends a format stores in codes; all others store them as floats."""
SOURCES = [
    (form, tied, packed)
    for form in LAYERS
    for tied in (True, False)
    for packed in PACKED_ENDS.get(form, ((),))
    if not (tied and packed == ENDS[:1])  # a tied head is packed with its embedding
]


def name_of(source):
    form, tied, packed = source
    return f"{form} {'tied' if tied else 'untied'}{' packed' if packed else ''}"


every_source = pytest.mark.parametrize("source", SOURCES, ids=name_of)


def test_every_format_is_here():
    assert LAYERS.keys() == FORMATS.keys()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """written(source) -> (folder of the checkpoint, folder of the same weights as dense floats)."""
    made = {}

    def write(source):
        if source not in made:
            form, tied, packed = source
            root = tmp_path_factory.mktemp("contract")
            model = AutoModelForCausalLM.from_pretrained(PICO, tie_word_embeddings=tied)
            if not tied:
                head = 1.25 * model.model.embed_tokens.weight.detach()  # the files have no head of their own
                model.lm_head.weight = torch.nn.Parameter(head)
            if LAYERS[form]:
                compress.apply(model, compress.RTN(targets=["*", *packed], **LAYERS[form]))
            tokenizer = AutoTokenizer.from_pretrained(PICO)
            folder = compress.save(model, root / "out", format=form, tokenizer=tokenizer)
            if form == "dense":
                made[source] = folder, folder
            else:
                compress.export(folder, root / "dense", "dense")
                made[source] = folder, root / "dense"
        return made[source]

    return write


@pytest.fixture
def pair(written):
    """pair(source, **options) -> (what compress.load returns, the same weights in transformers, the tokenizer)."""

    def load(source, **options):
        folder, dense = written(source)
        model, tokenizer = compress.load(folder, dtype="float32", **options)
        return model, AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).eval(), tokenizer

    return load


def near(found, wanted, factor=1.0):
    assert found.shape == wanted.shape
    largest = max(1.0, float(wanted.detach().float().abs().max()))
    difference = float((found.detach().float() - wanted.detach().float()).abs().max())
    assert difference <= factor * LOGITS * largest, difference


# Uses of a model that changes nothing: use(model, reference, tokenizer).


def logits(model, **inputs):
    with torch.no_grad():
        return model(**(inputs or {"input_ids": IDS})).logits


def use_as_it_is(model, theirs, tokenizer):
    assert isinstance(model, transformers.PreTrainedModel) and not model.training
    assert model.device == theirs.device and model.dtype == torch.float32
    near(logits(model), logits(theirs))


def use_masks_of_padding(model, theirs, tokenizer):
    mask = torch.ones_like(IDS)
    mask[0, :5] = 0
    near(
        logits(model, input_ids=IDS, attention_mask=mask)[:, 5:],
        logits(theirs, input_ids=IDS, attention_mask=mask)[:, 5:],
    )


def use_inputs_embeds(model, theirs, tokenizer):
    found, wanted = model.get_input_embeddings()(IDS), theirs.get_input_embeddings()(IDS)
    near(found, wanted)
    near(logits(model, inputs_embeds=found), logits(theirs))


def use_hidden_states(model, theirs, tokenizer):
    with torch.no_grad():
        found, wanted = (m(IDS, output_hidden_states=True, use_cache=False).hidden_states for m in (model, theirs))
        inner = model.base_model(IDS).last_hidden_state
    assert len(found) == len(wanted) == model.config.num_hidden_layers + 1
    for one, other in zip(found, wanted, strict=True):
        near(one, other, 10)
    near(inner, wanted[-1], 10)


def use_attentions(model, theirs, tokenizer):
    for each in (model, theirs):
        each.set_attn_implementation("eager")
    with torch.no_grad():
        found, wanted = (m(IDS, output_attentions=True).attentions for m in (model, theirs))
    near(torch.stack(found), torch.stack(wanted))


def use_labels(model, theirs, tokenizer):
    with torch.no_grad():
        outputs = model(IDS, labels=IDS)
    by_hand = functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1).float(), IDS[:, 1:].flatten())
    near(outputs.loss, by_hand)
    near(outputs.loss, theirs(IDS, labels=IDS).loss)


def use_tuples(model, theirs, tokenizer):
    with torch.no_grad():
        near(model(IDS, return_dict=False)[0], theirs(IDS, return_dict=False)[0])


def use_a_cache_step_by_step(model, theirs, tokenizer):
    with torch.no_grad():
        first = model(IDS[:, :10], use_cache=True)
        rest = model(IDS[:, 10:], past_key_values=first.past_key_values)
    near(torch.cat([first.logits, rest.logits], 1), logits(theirs))


def use_few_logits(model, theirs, tokenizer):
    near(logits(model, input_ids=IDS, logits_to_keep=2), logits(theirs)[:, -2:])


def generates(**options):
    """A use: the same tokens as transformers generates."""

    def use(model, theirs, tokenizer):
        found, wanted = [], []
        for each, tokens in ((model, found), (theirs, wanted)):
            torch.manual_seed(3)
            made = each.generate(IDS, **{**GREEDY, **options})
            tokens.append(made)
        assert torch.equal(found[0], wanted[0]) and found[0].shape[1] > IDS.shape[1]

    return use


def use_generate_with_padding_on_the_left(model, theirs, tokenizer):
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.convert_ids_to_tokens(0), "left"
    batch = tokenizer(["The module defines", "A list of"], return_tensors="pt", padding=True)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    assert torch.equal(model.generate(**inputs, **GREEDY), theirs.generate(**inputs, **GREEDY))


def use_generate_in_a_cache_of_fixed_size(model, theirs, tokenizer):
    caches = [StaticCache(each.config, max_cache_len=40) for each in (model, theirs)]
    found, wanted = (
        each.generate(IDS, past_key_values=cache, **GREEDY) for each, cache in zip((model, theirs), caches, strict=True)
    )
    assert torch.equal(found, wanted)


def use_generate_further_with_the_cache(model, theirs, tokenizer):
    made = []
    for each in (model, theirs):
        first = each.generate(IDS, return_dict_in_generate=True, use_cache=True, **GREEDY)
        text = torch.cat([first.sequences, IDS[:, :3]], 1)
        made.append(each.generate(text, past_key_values=first.past_key_values, **GREEDY))
    assert torch.equal(*made)


def use_an_assistant(model, theirs, tokenizer):
    ids = IDS[:1]
    draft = AutoModelForCausalLM.from_pretrained(PICO).eval()
    found = model.generate(ids, assistant_model=draft, **GREEDY)
    assert torch.equal(found, theirs.generate(ids, **GREEDY))
    assert torch.equal(draft.generate(ids, assistant_model=model, **GREEDY), draft.generate(ids, **GREEDY))


class Collected(TextStreamer):
    """Keeps the text instead of printing it."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self.pieces = []

    def on_finalized_text(self, text, stream_end=False):
        self.pieces.append(text)


def use_a_streamer(model, theirs, tokenizer):
    streamers = [Collected(tokenizer) for _ in range(2)]
    for each, streamer in zip((model, theirs), streamers, strict=True):
        each.generate(IDS[:1], streamer=streamer, **GREEDY)
    found, wanted = ("".join(streamer.pieces) for streamer in streamers)
    assert found == wanted and len(streamers[0].pieces) > 1


def use_stop_strings(model, theirs, tokenizer):
    whole = theirs.generate(IDS[:1], **GREEDY)[0, IDS.shape[1] :]
    stop = next(text for text in map(tokenizer.decode, whole[2:]) if text.strip())
    found, wanted = (
        each.generate(IDS[:1], stop_strings=[stop], tokenizer=tokenizer, **GREEDY) for each in (model, theirs)
    )
    assert torch.equal(found, wanted)


def use_scores(model, theirs, tokenizer):
    found, wanted = (
        each.generate(IDS, output_scores=True, return_dict_in_generate=True, **GREEDY) for each in (model, theirs)
    )
    near(torch.stack(found.scores), torch.stack(wanted.scores), 10)


def use_a_pipeline(model, theirs, tokenizer):
    texts = []
    for each in (model, theirs):
        generator = transformers.pipeline("text-generation", model=each, tokenizer=tokenizer)
        texts.append(generator("The module defines", **GREEDY)[0]["generated_text"])
    assert texts[0] == texts[1] and texts[0].startswith("The module defines")


def use_the_backend_of_lm_eval(model, theirs, tokenizer):
    pytest.importorskip("lm_eval", reason="the package lm-eval is not installed")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    asked = [Instance("loglikelihood", {}, ("The module", f" {word}"), i) for i, word in enumerate(("defines", "eats"))]
    found, wanted = (HFLM(pretrained=each, tokenizer=tokenizer).loglikelihood(asked) for each in (model, theirs))
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in wanted], rel=1e-3)


def use_a_copy(model, theirs, tokenizer):
    wanted = logits(model)
    twin = copy.deepcopy(model)
    assert same_logits(logits(twin), wanted)
    for parameter in twin.parameters():
        parameter.data = torch.zeros_like(parameter)
    assert same_logits(logits(model), wanted)


def use_pickle(model, theirs, tokenizer):
    assert same_logits(logits(pickle.loads(pickle.dumps(model))), logits(model))


def use_threads(model, theirs, tokenizer):
    wanted = logits(model)
    with ThreadPoolExecutor(3) as threads:
        assert all(torch.equal(found, wanted) for found in threads.map(lambda _: logits(model), range(6)))


def use_a_forked_process(model, theirs, tokenizer):
    wanted, context = logits(model), multiprocessing.get_context("fork")
    found = context.SimpleQueue()
    child = context.Process(target=lambda: found.put(same_logits(logits(model), wanted)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads; this process waits
        child.start()
    child.join(60)
    assert child.exitcode == 0 and found.get()


def use_compile(model, theirs, tokenizer):
    torch.compiler.reset()
    with torch.no_grad():
        near(torch.compile(model, backend="eager")(IDS).logits, logits(theirs))
    torch.compiler.reset()


def use_dispatch_model(model, theirs, tokenizer):
    from accelerate import dispatch_model, infer_auto_device_map

    plan = infer_auto_device_map(
        model, {"cpu": "10GiB"}, no_split_module_classes=[type(model.model.layers[0]).__name__]
    )
    found = dispatch_model(model, device_map=dict.fromkeys(plan, "cpu"), force_hooks=True)
    near(logits(found), logits(theirs))
    assert torch.equal(found.generate(IDS, **GREEDY), theirs.generate(IDS, **GREEDY))


def use_prepare(model, theirs, tokenizer):
    from accelerate import Accelerator

    found = Accelerator(cpu=True).prepare(model)
    near(logits(found), logits(theirs))


def use_a_state_dict(model, theirs, tokenizer):
    wanted, state = logits(model), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    other = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in other.state_dict().values():
            tensor.copy_(torch.zeros_like(tensor))
    assert not torch.equal(logits(other), wanted)
    missing = other.load_state_dict(state)
    assert not missing.missing_keys and not missing.unexpected_keys
    assert same_logits(logits(other), wanted)


def in_dtype(change, dtype):
    """A use: outputs of another dtype, near those of transformers, and the way back."""

    def use(model, theirs, tokenizer):
        wanted = logits(theirs)
        found = change(model)
        assert found is model and model.dtype == dtype
        made = logits(model)
        assert made.dtype == dtype and made.isfinite().all()
        rounded = 0.1 if dtype != torch.float32 else LOGITS
        assert float((made.float() - wanted).norm() / wanted.norm()) <= rounded
        assert model.generate(IDS, **GREEDY).shape == (2, 24)
        near(logits(model.float()), wanted, 1 if dtype == torch.float32 else 1000)

    return use


def use_meta(model, theirs, tokenizer):
    twin = copy.deepcopy(model).to("meta")
    assert {p.device.type for p in twin.parameters()} | {b.device.type for b in twin.buffers()} == {"meta"}
    near(logits(model), logits(theirs))


def use_names(model, theirs, tokenizer):
    assert {name for name, _ in model.named_modules()} >= {name for name, _ in theirs.named_modules() if "." in name}
    assert model.num_parameters() > 0 and model.get_memory_footprint() > 0
    assert json.loads(model.config.to_json_string()) and model.generation_config is not None
    assert model.can_generate() and repr(model)


def use_eval_and_train(model, theirs, tokenizer):
    assert model.train() is model and model.training
    near(logits(model), logits(theirs))  # no dropout
    assert not model.eval().training


USES = {name.removeprefix("use_"): use for name, use in list(globals().items()) if name.startswith("use_")}
USES |= {
    "generate greedily": generates(),
    "generate without a cache": generates(use_cache=False),
    "generate by beams": generates(num_beams=3),
    "generate samples": generates(do_sample=True, temperature=0.8, top_k=20),
    "generate with a static cache": generates(cache_implementation="static"),
    "generate by prompt lookup": lambda m, t, k: torch.testing.assert_close(
        m.generate(IDS[:1], prompt_lookup_num_tokens=3, **GREEDY), t.generate(IDS[:1], **GREEDY)
    ),
    "generate with penalties": generates(repetition_penalty=1.3, no_repeat_ngram_size=2),
    "generate a few at least": generates(min_new_tokens=5, eos_token_id=[1, 2, 3]),
    "half": in_dtype(lambda model: model.half(), torch.float16),
    "bfloat16": in_dtype(lambda model: model.bfloat16(), torch.bfloat16),
    "to a dtype": in_dtype(lambda model: model.to(torch.bfloat16), torch.bfloat16),
    "float": in_dtype(lambda model: model.float(), torch.float32),
    "to a device": in_dtype(lambda model: model.to("cpu"), torch.float32),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.few(97, slow=331)  # primes, so that each source and each use is among them
@pytest.mark.parametrize("use", USES)
@every_source
def test_a_use_of_a_model_is_that_of_transformers(source, use, pair):
    USES[use](*pair(source))


# Saving and training.


@every_source
def test_save_pretrained_is_read_again_or_says_what_to_call(source, pair, tmp_path):
    model, theirs, tokenizer = pair(source)
    try:
        model.save_pretrained(tmp_path / "saved")
    except CompressError as error:
        assert "compress.save" in str(error) and source[0] != "dense"
    else:
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
        near(logits(again), logits(theirs))
    compress.save(model, tmp_path / "ours", format=source[0], tokenizer=tokenizer)
    assert same_logits(logits(compress.load(tmp_path / "ours", dtype="float32")[0]), logits(model))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of the name of checkpoints of activations
@every_source
def test_gradients_reach_inputs_and_dense_parameters(source, pair):
    """With and without checkpoints of activations."""
    found = []
    for checkpointing in (False, True):
        model, theirs, _ = pair(source, trainable=True)
        gradients = []
        for each in (model, theirs):
            each.train()
            if checkpointing:
                each.gradient_checkpointing_enable()
            embeds = each.get_input_embeddings()(IDS).detach().requires_grad_()
            each(inputs_embeds=embeds, labels=IDS).loss.backward()
            gradients.append((embeds.grad, each.model.norm.weight.grad))
        for one, other in zip(*gradients, strict=True):
            assert one is not None
            near(one, other)
        found.append(gradients[0][0])
    near(*found)


@pytest.mark.few(5)
@every_source
def test_trainer_trains_what_is_dense(source, pair, tmp_path):
    model, _, _ = pair(source, trainable=True)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    packed = {n: m.sha256() for n, m in model.named_modules() if isinstance(m, CompressedLinear) and m.quantized}
    assert before and bool(packed) == (source[0] != "dense")
    rows = [{"input_ids": ids, "labels": ids} for ids in IDS]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True
    )
    result = transformers.Trainer(model, arguments, train_dataset=rows).train()
    assert result.training_loss > 0
    assert any(not torch.equal(p.detach(), before[n]) for n, p in model.named_parameters() if n in before)
    assert packed == {n: m.sha256() for n, m in model.named_modules() if n in packed}


# Every evaluator on every source.

ROWS = [
    {"goal": f"To open the {thing}", "sol1": f"turn the {thing} to the left.", "sol2": "eat it.", "label": i % 2}
    for i, thing in enumerate(["door", "jar", "box", "window"])
]


@pytest.mark.few(6)
@every_source
def test_every_evaluator_measures_every_source(source, written, texts, tmp_path, monkeypatch):
    """Perplexity, tasks, answers and speed of a checkpoint, against those of the same weights in transformers."""
    pytest.importorskip("lm_eval", reason="the package lm-eval is not installed")
    for name, value in {"TOKENS": 4, "PREFILL": 8, "ROUNDS": 1, "READ_BYTES": 1 << 16}.items():
        monkeypatch.setattr(speed, name, value)
    (tmp_path / "piqa").mkdir()
    (tmp_path / "piqa" / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    settings = Evaluate(
        perplexity=(texts["test"],), windows=2, length=None, tasks=("piqa",), data=str(tmp_path), generation=True
    )
    folder, dense = map(str, written(source))
    if folder == dense:
        dense = str(PICO)
    base, found = evaluate([dense, folder], settings, base=dense, work=tmp_path / "work").models
    (before,), (after,) = base.texts, found.texts
    if source[0] != "dense":  # pico itself otherwise, whose head is another one if it is untied
        assert after.compressed.loss == pytest.approx(before.compressed.loss, rel=2e-3)
        assert after.divergence.mean < 1e-3 and after.divergence.agreement > 0.95
    assert found.evaluations["generation"]
    for each in (base, found):
        assert not each.failed and each.items.keys() == {"piqa"}, each.source
    model, tokenizer = compress.load(folder)
    examples = {"a": Examples.of_ids(IDS)}
    asked = settings.model_copy(update={"speed": True})
    context = EvaluationContext(Run(), "compressed", examples, tokenizer, batch_of(IDS[:1]), settings=asked)
    values = measure_all(model, context)
    measured = combine_all(values, values)  # some results are comparisons
    for key in set(MEASUREMENTS) - {"agreement", "sparsity", "kv_cache"}:  # of other models than these
        assert measured[key], key
        measurement = MEASUREMENTS[key]
        measurement.summary(TypeAdapter(measurement.value_type).validate_python(measured[key]))
