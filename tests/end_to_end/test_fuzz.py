"""Damaged checkpoints end in a model that its digests judge, or in one line that names a file; `make fuzz` tries more."""

import json
import os
import shutil
import struct
import time

import pytest
import torch
from fuzz_changes import climbing
from fuzzing import Fuzzer, TooLong, within
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import compress
from compress.checkpoint.formats import FORMATS
from compress.checkpoint.sources.untrusted import read_json
from compress.errors import ModelError
from compress.pipeline.exporting import export

INPUTS = 200


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory):
    return Fuzzer(tmp_path_factory.mktemp("fuzz"))


def test_damaged_checkpoints(fuzzer):
    found = {seed: fuzzer.outcome(seed) for seed in range(INPUTS)}
    failed = {seed: vars(outcome) for seed, outcome in found.items() if outcome.failure}
    assert not failed, f"{len(failed)} inputs failed: {json.dumps(failed, indent=1)}"
    ends = {outcome.end for outcome in found.values()}
    assert {"error", "model that its digests reject", "error of transformers"} <= ends  # all kinds of inputs were drawn


def test_other_processes_do_not_use_up_the_time_of_an_input():
    with within(0.05):
        time.sleep(0.2)
    with pytest.raises(TooLong, match=r"0\.05 seconds of processor time"), within(0.05):
        while True:
            pass
    with pytest.raises(TooLong, match=r"0\.05 seconds of wall time"), within(10.0, 0.05):
        time.sleep(10)


def test_row_starts_that_wrap_are_refused(fuzzer, tmp_path):
    """They climb by 2^32 in all, so that no difference of int32 is negative."""
    target = shutil.copytree(fuzzer.made["native-single-outliers"], tmp_path / "model")
    name = "model.layers.0.mlp.up_proj.outliers_rows"
    path = target / json.loads((target / "model.safetensors.index.json").read_text())["weight_map"][name]
    held = load_file(path)
    held[name] = climbing(held[name], 2**32)
    save_file(held, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="does not rise from 0"):
        compress.load(target)


@pytest.fixture
def folder(fuzzer, tmp_path):
    return shutil.copytree(fuzzer.made["native-int4"], tmp_path / "model")


def edit(path, change):
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def layers(config):
    return config["quantization_config"]["layers"]["model.layers.0.mlp.up_proj"]


def nested(folder, levels):
    (folder / "config.json").write_text('{"a":' * levels + "1" + "}" * levels)


def pipe(folder):
    (folder / "tokenizer_config.json").unlink()
    os.mkfifo(folder / "tokenizer_config.json")


def huge_header(folder):
    path = sorted(folder.glob("*.safetensors"))[0]
    path.write_bytes(struct.pack("<Q", 2**40) + path.read_bytes()[8:])


def config(change):
    return lambda folder: edit(folder / "config.json", change)


def weight_map(name):
    index = "model.safetensors.index.json"
    return lambda folder: edit(folder / index, lambda v: v["weight_map"].update({"lm_head.weight": name}))


CASES = {
    "a field that no scheme has": (
        config(lambda v: layers(v)["parts"][0].update(zork=1)),
        r"config\.json .*up_proj: codes has no field 'zork'",
    ),
    "a scheme without grid": (
        config(lambda v: layers(v)["parts"][0].pop("grid")),
        r"up_proj: codes lacks its field 'grid'",
    ),
    "an unknown grid": (
        config(lambda v: layers(v)["parts"][0].update(grid="int99")),
        "grid 'int99' is not known; did you mean 'int",
    ),
    "many parts": (
        config(lambda v: layers(v).update(parts=layers(v)["parts"] * 65 + [0])),
        "up_proj: a layer has 66 parts, but it must have at most 64",
    ),
    "many transforms": (
        config(lambda v: layers(v).update(transforms=[0] * 65)),
        "up_proj: a layer has 65 transforms, but it must have at most 64",
    ),
    "a negative shape": (config(lambda v: layers(v).update(shape=[-64, 32])), "must be from 1 to"),
    "a group of a wrong type": (
        config(lambda v: layers(v)["parts"][0].update(group_size=[16])),
        r"group_size of codes is \[16\]",
    ),
    "a group of nothing": (
        config(lambda v: layers(v)["parts"][0].update(group_size=0)),
        "group_size of codes is 0, but .* at least 1",
    ),
    "a negative width": (config(lambda v: v.update(hidden_size=-32)), r"config\.json"),
    "a huge width": (config(lambda v: v.update(hidden_size=2**40)), r"config\.json"),
    "many layers": (
        config(lambda v: v.update(num_hidden_layers=10**9)),
        "num_hidden_layers is 1000000000, but .* at most",
    ),
    "rather many layers": (
        config(lambda v: v.update(num_hidden_layers=9_000)),
        r"more than \d+ modules, which the files .* too small for",
    ),
    "a huge vocabulary": (config(lambda v: v.update(vocab_size=2**33)), r"asks for a tensor \[8589934592, 32\]"),
    "deep JSON": (lambda f: nested(f, 100), "nested in more than 64 levels"),
    "very deep JSON": (lambda f: nested(f, 100_000), "nested in more than 64 levels"),
    "large JSON": (
        lambda f: (f / "tokenizer.json").write_bytes(b" " * ((64 << 20) + 1)),
        r"tokenizer\.json has more than 64 MiB; fetch it",
    ),
    "another encoding": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe{}"), "byte 0 is not UTF-8"),
    "an index that leaves the folder": (weight_map("../outside/model.safetensors"), "outside of the folder"),
    "an index with a device": (weight_map("/dev/zero"), "which is no .safetensors file"),
    "an index with a number": (weight_map(7), "which is no .safetensors file"),
    "a pipe": (pipe, r"tokenizer_config\.json is not a regular file; put the file itself in its place"),
    "a long header": (huge_header, r"model-00001-of-00002\.safetensors is truncated or not a safetensors file"),
    "a tokenizer without model": (
        lambda f: edit(f / "tokenizer.json", lambda v: v.pop("model")),
        r"the tokenizer in .*tokenizer\.json",
    ),
    "a special token of a wrong type": (
        lambda f: edit(f / "tokenizer_config.json", lambda v: v.update(eos_token=[3])),
        r"the tokenizer in .*tokenizer_config\.json",
    ),
    "a file of the tokenizer elsewhere": (
        lambda f: edit(f / "tokenizer_config.json", lambda v: v.update(fast_tokenizer_files=["../tokenizer.4.0.json"])),
        "fast_tokenizer_files must be a list of names of files in the folder",
    ),
    "code of the hub": (
        config(lambda v: v.update(attn_implementation="some/kernel")),
        "names code of the hub, 'some/kernel'; set trust_remote",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_kind_of_damage_has_its_message(case, folder):
    change, message = CASES[case]
    change(folder)
    with pytest.raises(ModelError, match=message):
        compress.load(folder)


def test_a_file_of_json_is_not_read_if_it_is_too_large(tmp_path):
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(ValueError, match="it has more than 64 MiB"):
        read_json(tmp_path / "manifest.json")


def foreign(change):
    return lambda folder: edit(folder / "config.json", lambda v: change(v["quantization_config"]))


def tensor(suffix, change):
    def changed(folder):
        for path in sorted(folder.glob("*.safetensors")):
            held = load_file(path)
            found = [name for name in held if name.endswith(suffix)]
            if found:
                held = {name: change(t.clone()) if name == found[0] else t.clone() for name, t in held.items()}
                save_file(held, path, metadata={"format": "pt"})
                return
        raise AssertionError(suffix)

    return changed


def text(value):
    return lambda _: torch.tensor(list(value.encode()), dtype=torch.uint8)


FOREIGN = {
    "gptq: a version of a wrong type": (
        "gptq-int4",
        foreign(lambda v: v.update(checkpoint_format=["gptq"])),
        r"checkpoint_format = .* is not read",
    ),
    "gptq: an invalid pattern": (
        "gptq-int4",
        foreign(lambda v: v.update(dynamic={"+:(": {"bits": 8}})),
        r"'\(' is no regular expression",
    ),
    "gptq: patterns that are no object": (
        "gptq-int4",
        foreign(lambda v: v.update(dynamic=[7])),
        r"dynamic = \[7\] is not read",
    ),
    "gptq: a group size of a wrong type": (
        "gptq-int4",
        foreign(lambda v: v.update(group_size="x")),
        r"group_size = 'x' is not read",
    ),
    "gptq: no group size": (
        "gptq-int4",
        foreign(lambda v: v.pop("group_size")),
        r"cannot be read \(it lacks 'group_size'",
    ),
    "gptq: scales without shape": (
        "gptq-int4",
        tensor(".scales", lambda t: t.flatten()[0]),
        r"cannot be read \(IndexError",
    ),
    "gptq: other zero points": (
        "gptq-int4",
        tensor(".qzeros", lambda t: t * 0),
        r"qzeros holds 0 to 0, but .*sym.* \(in .*\.safetensors\)",
    ),
    "awq: zero_point of a wrong group size": (
        "awq-int4",
        foreign(lambda v: v.update(group_size=0)),
        r"group_size = 0 is not read",
    ),
    "awq: a version of a wrong type": (
        "awq-int4",
        foreign(lambda v: v.update(version=[1])),
        r"version = \[1\] is not read",
    ),
    "bitsandbytes: a threshold": (
        "bitsandbytes-llm-int8",
        foreign(lambda v: v.update(llm_int8_threshold="x")),
        r"llm_int8_threshold = 'x' is not read",
    ),
    "bitsandbytes: several formats of a weight": (
        "bitsandbytes-llm-int8",
        tensor(".weight_format", lambda t: torch.zeros(3, dtype=torch.uint8)),
        "weight_format is not 0",
    ),
    "bitsandbytes: a state that is no object": (
        "bitsandbytes-nf4",
        tensor("bitsandbytes__nf4", text("[1]")),
        r"bitsandbytes__nf4 cannot be read",
    ),
    "bitsandbytes: a deep state": (
        "bitsandbytes-nf4",
        tensor("bitsandbytes__nf4", text("[" * 4_000)),
        r"bitsandbytes__nf4 cannot be read",
    ),
    "bitsandbytes: a long state": (
        "bitsandbytes-nf4",
        tensor("bitsandbytes__nf4", text(" " * 5000)),
        r"__nf4 has 5000 bytes, but it can have at most 4096",
    ),
    "gptq: another version": (
        "gptq-int4",
        foreign(lambda v: v.update(checkpoint_format="marlin")),
        r"checkpoint_format = 'marlin' is not read",
    ),
    "fp8: weights that nothing describes": (
        "compressed-tensors-fp8",
        config(lambda v: v.pop("quantization_config")),
        r"weight in .*\.safetensors holds F8_E4M3, not floats of 16 bits or more, and it has no scale",
    ),
    "bitsandbytes: a huge offset": (
        "bitsandbytes-nf4-double",
        tensor("bitsandbytes__nf4", text(json.dumps({"shape": [32, 32], "blocksize": 32, "nested_offset": 10**400}))),
        r"bitsandbytes__nf4 cannot be read \(its nested_offset is 10",
    ),
    "gguf: codes that no block type holds": (
        "gguf-q4_0",
        foreign(lambda v: v["layers"]["model.layers.0.mlp.up_proj"]["parts"][0].update(grid="int7")),
        r"up_proj: no block type of GGUF holds",
    ),
    "native: a role": (
        "native-ends",
        foreign(lambda v: v["layers"]["lm_head"].update(role="zork")),
        r"lm_head: role 'zork' is none of linear",
    ),
    "native: a table of another shape": (
        "native-ends",
        foreign(lambda v: v["layers"]["model.embed_tokens"].update(shape=[63, 32])),
        r"model\.embed_tokens is \[63, 32\] in the checkpoint, but \[1024, 32\] by its config\.json",
    ),
}
"""(checkpoint, damage, message) of formats of other programs, and of quantized ends."""


@pytest.mark.parametrize("case", FOREIGN)
def test_each_kind_of_damage_of_other_formats_has_its_message(case, fuzzer, tmp_path):
    name, change, message = FOREIGN[case]
    folder = shutil.copytree(fuzzer.made[name], tmp_path / "model")
    change(folder)
    with pytest.raises(ModelError, match=message):
        compress.load(folder)


def test_every_format_takes_part(fuzzer):
    assert {name.partition("-")[0] for name in fuzzer.made} >= {name.partition("-")[0] for name in FORMATS}


def test_an_export_has_digests(fuzzer, tmp_path):
    export(fuzzer.made["gptq-int4"], tmp_path / "out", "native")
    compress.load(tmp_path / "out", verify=True)
    assert "model.safetensors.index.json" in (tmp_path / "out" / "SHA256SUMS").read_text()


def test_a_recipe_whose_model_is_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    (tmp_path / "recipe.yaml").write_text(f"model: {tmp_path}\npasses: [rtn]\n")
    recipe = compress.Recipe.from_yaml(tmp_path / "recipe.yaml")  # looks whether the model is compressed
    with pytest.raises(ModelError, match=r"config\.json is not a regular file; put the file itself in its place"):
        compress.load(recipe.model)


def test_transformers_alone_says_which_folder_names_a_file_of_another_kind(folder):
    weight_map("/dev/zero")(folder)
    message = f"model: {folder} is in format native, .* loaded from /dev/zero; name its folder"
    with pytest.raises(ModelError, match=message):
        AutoModelForCausalLM.from_pretrained(folder)


def test_a_link_out_of_the_folder(folder, fuzzer):
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(fuzzer.outside / "config.json")
    with pytest.raises(ModelError, match=r"config\.json is a link to a file outside of .*; put a copy in its place"):
        compress.load(folder)


def test_links_of_the_hubs_cache_are_read(folder, tmp_path):
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "1234", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    shutil.copytree(folder, blobs)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    model, _ = compress.load(snapshot, verify=True)
    assert model.config.hidden_size == 32


def test_load_verifies_when_asked(folder):
    compress.load(folder, verify=True)
    path = sorted(folder.glob("*.safetensors"))[1]
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    (folder / "extra.safetensors").write_bytes(data)
    compress.load(folder)  # the file is valid
    with pytest.raises(ModelError) as caught:
        compress.load(folder, verify=True)
    first, second = str(caught.value).splitlines()
    assert path.name in first and "is damaged: its sha256 is" in first
    assert "extra.safetensors is not listed in SHA256SUMS" in second


def test_a_checkpoint_without_digests(folder):
    (folder / "SHA256SUMS").unlink()
    with pytest.raises(ModelError, match="has no file SHA256SUMS, so its files cannot be checked"):
        compress.load(folder, verify=True)
    (folder / "SHA256SUMS").write_text("zork\n")
    with pytest.raises(ModelError, match="SHA256SUMS, line 1, is not a digest and the name of a file"):
        compress.load(folder, verify=True)


def test_a_null_byte_in_the_index_is_told_by_transformers_reader_too(folder):
    weight_map("\0.safetensors")(folder)
    with pytest.raises(ModelError, match="is missing, but the index lists it"):
        AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)


def test_a_pipe_in_the_place_of_weights_is_told_by_transformers_reader_too(folder):
    path = sorted(folder.glob("*.safetensors"))[0]
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ModelError, match="is truncated or not a safetensors file"):
        AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
