"""BERT as GGUF: an encoder whose embeddings llama.cpp computes, with its pooling and its pieces of words."""

import json
import shutil

import gguf
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from gguf import GGUFReader
from gguf.quants import dequantize
from gguf_families import TEXT, gguf_model, word_pieces
from transformers import AutoModelForMaskedLM, BertConfig

import compress
from compress import RTN
from compress.checkpoint.containers.gguf_header import FILE
from compress.checkpoint.formats.gguf_files.architecture import architecture_of
from compress.checkpoint.formats.gguf_files.vocabulary import CONTROL, NORMAL, vocabulary_of
from compress.cli import main
from compress.errors import ModelError
from compress.layers.linear import linears

POOLING = {"mean": gguf.PoolingType.MEAN, "cls": gguf.PoolingType.CLS, "lasttoken": gguf.PoolingType.LAST}


def encoder_folder(folder, pooling="mean"):
    """A folder of an encoder, as sentence-transformers has it."""
    gguf_model("bert").save_pretrained(folder)
    word_pieces().save_pretrained(folder)
    (folder / "1_Pooling").mkdir()
    modes = {
        f"pooling_mode_{name}_token{'s' if name == 'mean' else ''}".replace("lasttoken_token", "lasttoken"): name
        == pooling
        for name in POOLING
    }
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **modes}))
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder


def fields_of(folder):
    return {name: field.contents() for name, field in GGUFReader(folder / FILE).fields.items()}


def tensors_of(folder):
    return {tensor.name: tensor for tensor in GGUFReader(folder / FILE).tensors}


def hidden(model):
    return model(torch.tensor([word_pieces()(TEXT).input_ids])).last_hidden_state


def test_a_file_is_read_back_as_the_same_encoder_with_its_tokenizer(tmp_path):
    model = gguf_model("bert")
    compress.save(model, tmp_path / "out", "gguf", word_pieces(), "float32", embedding="dense", head="dense")
    for path in (tmp_path / "out", shutil.copy(tmp_path / "out" / FILE, tmp_path / "alone.gguf")):
        back, tokenizer = compress.load(path)
        assert type(back) is type(model) and torch.equal(hidden(back), hidden(model))
        assert torch.equal(back.pooler.dense.weight, model.pooler.dense.weight)
        assert tokenizer(TEXT).input_ids == word_pieces()(TEXT).input_ids
        assert (tokenizer.cls_token, tokenizer.mask_token, tokenizer.pad_token) == ("[CLS]", "[MASK]", "[PAD]")


def test_the_tensors_are_those_of_llamacpp(tmp_path):
    """bert.cpp: token types and positions are float32 tables; the pooler is what a classifier reads."""
    model = gguf_model("bert")
    compress.save(model, tmp_path / "out", "gguf", word_pieces(), "float32", embedding="dense", head="dense")
    stored, tables = tensors_of(tmp_path / "out"), model.embeddings
    for name, weight in (("position_embd", tables.position_embeddings), ("token_types", tables.token_type_embeddings)):
        tensor = stored[f"{name}.weight"]
        assert tensor.tensor_type.name == "F32" and torch.equal(torch.from_numpy(np.array(tensor.data)), weight.weight)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, 2).mapping.values()
    assert {name.rpartition(".")[0] for name in stored} <= {name for _, name in names}
    stated = fields_of(tmp_path / "out")
    assert stated["general.architecture"] == "bert" and stated["bert.attention.causal"] is False
    assert stated["tokenizer.ggml.token_type_count"] == 2 and stated["bert.context_length"] == 128


@pytest.mark.parametrize("pooling", POOLING)
def test_the_pooling_is_that_of_the_folder(pooling, tmp_path):
    done = CliRunner().invoke(
        main,
        ["export", str(encoder_folder(tmp_path / "model", pooling)), "-o", str(tmp_path / "out"), "--format", "gguf"],
    )
    assert done.exit_code == 0, done.output
    assert fields_of(tmp_path / "out")["bert.pooling_type"] == int(POOLING[pooling])
    for name in ("modules.json", "1_Pooling/config.json"):  # sentence-transformers reads them
        assert (tmp_path / "out" / name).read_text() == (tmp_path / "model" / name).read_text()


def test_codes_of_an_encoder_stay_as_they_are(recipe, tmp_path):
    step = RTN(weights="int8", group_size=32)
    asked = recipe(step, model=str(encoder_folder(tmp_path / "model")), save={"format": "gguf"}, eval=None)
    compress.run(asked, tmp_path / "out", progress=False)
    model, _ = compress.load(tmp_path / "out")
    stored = tensors_of(tmp_path / "out")["blk.1.ffn_up.weight"]
    layer = linears(model)["encoder.layer.1.intermediate.dense"]
    assert stored.tensor_type.name == "Q8_0" and layer.scheme.codes.grid.name == "int8"
    assert torch.equal(torch.from_numpy(dequantize(stored.data, stored.tensor_type)), layer.weight_as(torch.float32))


def test_pieces_at_the_beginning_of_words_have_a_space_and_others_no_mark():
    found = vocabulary_of(word_pieces(), 300)
    assert (found.model, found.merges, found.scores) == ("bert", [], [])
    assert {"\u2581the", "\u2581fox", "ed", "aive", "\u2581a", "a"} <= set(found.tokens) and "##ed" not in found.tokens
    kinds = dict(zip(found.tokens, found.types, strict=True))
    assert (kinds["[CLS]"], kinds["\u2581the"]) == (CONTROL, NORMAL)
    expected = {
        "bos_token_id": 2,
        "cls_token_id": 2,
        "seperator_token_id": 3,
        "mask_token_id": 4,
        "padding_token_id": 0,
    }
    expected |= {"add_bos_token": True, "add_sep_token": True, "add_eos_token": False, "unknown_token_id": 1}
    assert found.flags == expected | {"normalizer.lowercase": True, "normalizer.strip_accents": True}
    assert vocabulary_of(word_pieces(lowercase=False), 300).flags["normalizer.strip_accents"] is False


def changed(part, value):
    tokenizer = word_pieces()
    stated = json.loads(tokenizer.backend_tokenizer.to_str())
    stated[part] = value if value is None else {**stated[part], **value}
    return type(tokenizer)(
        tokenizer_object=type(tokenizer.backend_tokenizer).from_str(json.dumps(stated)),
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    )


@pytest.mark.parametrize(
    ("part", "value", "reason"),
    [
        ("pre_tokenizer", None, r"has other steps \(BertNormalizer, None\)"),
        ("model", {"continuing_subword_prefix": "@@"}, "has other steps"),
        ("normalizer", {"handle_chinese_chars": False}, "words of Chinese"),
        ("post_processor", None, "does not put the tokens cls and sep around a text"),
    ],
)
def test_tokenizers_that_llamacpp_does_not_know_are_refused(part, value, reason):
    with pytest.raises(ValueError, match=reason):
        vocabulary_of(changed(part, value), 300)


def test_a_decoder_and_a_model_with_a_head_are_refused(recipe, tmp_path):
    config = BertConfig(is_decoder=True)
    assert architecture_of(config).refuses(config).startswith("is_decoder is True, but llama.cpp computes bert with")
    AutoModelForMaskedLM.from_config(gguf_model("bert").config).save_pretrained(tmp_path / "masked")
    word_pieces().save_pretrained(tmp_path / "masked")
    asked = recipe(
        RTN(weights="int8", group_size=32), model=str(tmp_path / "masked"), save={"format": "gguf"}, eval=None
    )
    with pytest.raises(ModelError, match="no tensor for bert.embeddings.word_embeddings.weight .* architecture bert"):
        compress.plan(asked)
