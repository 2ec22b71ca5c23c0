"""Windows that overlap, bytes of text, standard errors, and kept results."""

import math

import pytest
import torch
from batches import ids_of
from transformers import AutoTokenizer

from compress.data.text_source import TextSource
from compress.errors import CalibrationError
from compress.evaluation.perplexity import perplexity, score_of
from compress.evaluation.store import Results
from compress.evaluation.windows import WindowTask, bytes_of, evaluation_examples, measure_windows
from compress.models.kinds.batch import Examples


def losses(model, window):
    with torch.no_grad():
        logs = model(input_ids=window[None]).logits[0].log_softmax(-1)
    return -logs[:-1].gather(1, window[1:, None])[:, 0]


def test_overlapping_windows_score_every_token_once(pico_model, pico):
    tokenizer = AutoTokenizer.from_pretrained(pico)
    ids, use = evaluation_examples(pico_model, tokenizer, "embedded", 3, 32, stride=12)
    stream, _ = evaluation_examples(pico_model, tokenizer, "embedded", 1, 32 + 2 * 12)
    examples, ids, stream = ids, ids_of(ids), ids_of(stream)
    assert ids.shape == (3, 32) and (use.sequences, use.length) == (3, 32)
    for i, row in enumerate(ids):
        assert torch.equal(row, stream[0, 12 * i : 12 * i + 32])
    wanted = [losses(pico_model, ids[0]), losses(pico_model, ids[1])[-12:], losses(pico_model, ids[2])[-12:]]
    found = perplexity(pico_model, examples, stride=12)
    assert found.tokens == 31 + 12 + 12 == stream.shape[1] - 1
    assert found.loss == pytest.approx(float(torch.cat(wanted).mean()), rel=1e-5)


@pytest.mark.parametrize(
    ("text", "length", "stride", "message"),
    [
        ("embedded", 32, 40, "stride 40 is longer than the text of a window; use stride <= 32"),
        (TextSource(source="embedded", packing=False), 32, 8, "needs one stream of text"),
        ("embedded", 4096, 8, "exceeds the model's 512 positions"),
    ],
)
def test_strides_that_cannot_be(text, length, stride, message, pico_model, pico):
    with pytest.raises(CalibrationError, match=message):
        evaluation_examples(pico_model, AutoTokenizer.from_pretrained(pico), text, 2, length, stride)


def test_stored_ids_are_not_cut_into_overlapping_windows(pico_model, texts):
    with pytest.raises(CalibrationError, match="write stride: null"):
        evaluation_examples(pico_model, None, texts["test"], 2, 32, 8)


def test_bits_per_byte_are_those_of_the_text(pico_model, pico):
    tokenizer = AutoTokenizer.from_pretrained(pico)
    examples, _ = evaluation_examples(pico_model, tokenizer, "embedded", 2, 48)
    ids = ids_of(examples)
    windows = measure_windows(pico_model, examples, WindowTask(tokenizer=tokenizer), Results(None))
    found = score_of(windows, "next tokens")
    size = sum(len(tokenizer.decode(row).encode()) - len(tokenizer.decode(row[:1]).encode()) for row in ids)
    assert sum(w["bytes"] for w in windows) == size
    assert found.bits_per_byte == pytest.approx(found.loss * found.tokens / math.log(2) / size)
    assert perplexity(pico_model, ids).bits_per_byte is None  # without a tokenizer


def test_special_tokens_have_no_bytes(pico):
    tokenizer = AutoTokenizer.from_pretrained(pico)
    ids = torch.tensor(tokenizer("some words of text").input_ids)
    ended = torch.cat([ids, torch.tensor([tokenizer.eos_token_id])])
    assert bytes_of(ended, 0, tokenizer) == bytes_of(ids, 0, tokenizer) > 0


def test_the_error_is_that_of_the_mean_over_windows(pico_model, pico_ids):
    found = perplexity(pico_model, pico_ids)
    each = [float(losses(pico_model, row).mean()) for row in pico_ids]
    assert found.by_window == pytest.approx(each, rel=1e-5)
    middle = sum(each) / 6
    assert found.stderr == pytest.approx(math.sqrt(sum((x - middle) ** 2 for x in each) / 5 / 6), rel=1e-4)


def test_windows_that_are_kept_are_not_computed_again(pico_model, pico_ids, tmp_path):
    task = WindowTask()
    first = measure_windows(pico_model, Examples.of_ids(pico_ids[:3]), task, Results(tmp_path))
    lines = (tmp_path / "0.jsonl").read_text().splitlines()
    (tmp_path / "0.jsonl").write_text("\n".join(lines[:2]) + "\n" + lines[2][:20])  # killed while it wrote the third
    seen = []
    pico_model.register_forward_pre_hook(lambda *_: seen.append(1))
    again = measure_windows(pico_model, Examples.of_ids(pico_ids[:3]), task, Results(tmp_path))
    assert len(seen) == 1 and [w["loss"] for w in again] == [w["loss"] for w in first]
    assert (
        measure_windows(pico_model, Examples.of_ids(pico_ids[:3]), task, Results(tmp_path)) == again and len(seen) == 1
    )


def test_the_divergence_of_a_window_is_that_of_its_logits(pico_model, tiny, pico_ids, tmp_path):
    base = WindowTask(top_k=64, base=tmp_path / "kept", role="base")
    measure_windows(pico_model, Examples.of_ids(pico_ids[:2]), base, Results(None))
    other = WindowTask(top_k=64, base=tmp_path / "kept")
    [same, _] = measure_windows(pico_model, Examples.of_ids(pico_ids[:2]), other, Results(None))
    assert abs(sum(same["kl"])) < 0.1 and sum(same["same"]) == 63 and same["positions"] == list(range(1, 64))
    with torch.no_grad():
        before = pico_model(input_ids=pico_ids[:1]).logits[0, :-1].double().log_softmax(-1)
        next(pico_model.parameters()).mul_(1.05)
        after = pico_model(input_ids=pico_ids[:1]).logits[0, :-1].double().log_softmax(-1)
    [changed, _] = measure_windows(pico_model, Examples.of_ids(pico_ids[:2]), other, Results(None))
    whole = (before.exp() * (before - after)).sum(-1)
    assert sum(changed["kl"]) == pytest.approx(float(whole.sum()), rel=0.1, abs=0.1)
