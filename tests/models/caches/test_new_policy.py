"""A cache policy that this file alone defines goes through every stage of the toolkit by its contract."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from tolerances import CROSSED_LOGITS, same_logits

import compress
from compress import RTN
from compress.checkpoint.inspection import inspect
from compress.errors import ModelError, TargetError
from compress.layers.base import TensorSpec
from compress.models.caches.attentions import attentions_containing, cache_policies, policy_tensors, set_policy
from compress.models.caches.base import CachePolicy, read_policy
from compress.models.terms import CACHE_KEY
from compress.passes.contract.facts import Requirements
from compress.passes.contract.passes import BlockPass

BOUND = 1.5
ATTENTION = "model.layers.1.self_attn"


@dataclass(frozen=True)
class ClippedCache(CachePolicy):
    """Keep keys in bfloat16, and values within a stored bound."""

    kind: ClassVar[str] = "clipped"
    traceable: ClassVar[bool] = True

    clips_values: bool = True

    def update(self, cache, tensors, keys, values):
        bound = tensors.get("v_bound")
        values = values if bound is None else torch.minimum(torch.maximum(values, -bound), bound)
        return cache.append(keys.bfloat16().to(keys.dtype), values)

    def token_bytes(self, part, heads, width, itemsize):
        return heads * width * (2 if part == "keys" else itemsize)

    def text_of(self, part):
        return "bfloat16" if part == "keys" else "within a bound" if self.clips_values else None

    @property
    def summary(self):
        return "Keys are bfloat16."

    def tensors(self):
        return {"v_bound": TensorSpec((1,))} if self.clips_values else {}

    def refuses(self, name, tensor):
        return None if float(tensor) > 0 else "not a positive bound"


class Clipped(BlockPass):
    """Install the policy."""

    paper: ClassVar[str] = "https://example.org/clipped"
    never_after: ClassVar[frozenset] = frozenset({"cache_quantized"})
    makes: ClassVar[frozenset] = frozenset({"cache_quantized"})

    @property
    def requires(self):
        return Requirements(data=False)

    def effects(self, layer):
        return replace(super().effects(layer), cache=ClippedCache())

    def solve_block(self, block, inputs, log):
        for attention in attentions_containing(block, inputs.names).values():
            set_policy(attention, ClippedCache(), {"v_bound": torch.tensor([BOUND])})


def generated(model, ids):
    return model.generate(ids[:1, :8], attention_mask=torch.ones(1, 8), max_new_tokens=6, do_sample=False)


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.mark.parametrize("format_", ["native", "dense"])
def test_a_model_in_memory_is_saved_and_loaded_with_it(format_, pico_model, pico_ids, tmp_path):
    exact = logits(pico_model, pico_ids)
    model = compress.apply(pico_model, [Clipped()])
    wanted, text = logits(model, pico_ids), generated(model, pico_ids)
    assert not torch.equal(wanted, exact)
    compress.save(model, tmp_path, format=format_)
    loaded, _ = compress.load(tmp_path)
    assert set(cache_policies(loaded).values()) == {ClippedCache()} and len(cache_policies(loaded)) == 3
    assert policy_tensors(loaded.get_submodule(ATTENTION)) == {"v_bound": torch.tensor([BOUND])}
    assert same_logits(logits(loaded, pico_ids), wanted) and torch.equal(generated(loaded, pico_ids), text)
    decoding = loaded.get_compiled_call(None)
    assert decoding.reason is None and len(decoding.decoders) == 1, "its decode steps are traced"
    assert inspect(tmp_path).notes == ["KV cache of 3 attention modules: keys bfloat16, values within a bound"]


def test_a_run_plans_verifies_measures_and_reports_it(recipe, tmp_path):
    requested = recipe(Clipped(), RTN(group_size=32))
    planned = compress.plan(requested)
    report = compress.run(requested, tmp_path).report
    config = json.loads((tmp_path / "config.json").read_text())
    assert config[CACHE_KEY][ATTENTION] == {"kind": "clipped"}
    assert planned.checkpoint_bytes == report["predicted"]["tensor_bytes"]
    assert report["verified"]["transformers"] <= CROSSED_LOGITS and not report["kv_cache"]["stated"]  # keys are rounded
    heads, width, attentions = 2, 32, 3
    assert report["kv_cache"]["bytes_per_token"]["after"] == attentions * heads * width * (2 + 4)
    errors = report["kv_cache"]["of"]
    assert set(errors) == {"keys, bfloat16", "values, within a bound"}
    assert 0 < errors["keys, bfloat16"]["largest_error"] < 2**-8
    text = (tmp_path / "report.md").read_text()
    assert "Keys are bfloat16. Only compress.load applies it" in text and "| values, within a bound | 3 |" in text


def test_a_killed_run_restores_it_and_a_later_run_starts_from_it(recipe, stop, tmp_path):
    requested = recipe(Clipped(), RTN(group_size=32, targets="*.mlp.*"), eval=None)
    stop(requested, tmp_path)
    compress.run(requested, tmp_path)
    assert len(cache_policies(compress.load(tmp_path)[0])) == 3
    further = recipe(RTN(group_size=32, targets="*.self_attn.*"), model=str(tmp_path))
    assert len(compress.plan(further).layers) == 21


@pytest.mark.parametrize("damage", ["missing", "invalid"])
def test_a_damaged_tensor_of_it_is_an_error(damage, pico_model, tmp_path):
    compress.save(compress.apply(pico_model, [Clipped()]), tmp_path, format="dense")
    for path in tmp_path.glob("*.safetensors"):
        tensors = load_file(path)
        if damage == "missing":
            tensors.pop(f"{ATTENTION}.v_bound", None)
        elif f"{ATTENTION}.v_bound" in tensors:
            tensors[f"{ATTENTION}.v_bound"] = torch.tensor([-1.0])
        save_file(tensors, path, metadata={"format": "pt"})
    message = "v_bound is missing" if damage == "missing" else r"v_bound in .* is \[-1.0\], not a positive bound"
    with pytest.raises(ModelError, match=f"{ATTENTION}.{message}"):
        compress.load(tmp_path)


def test_a_format_of_one_file_refuses_it_in_the_plan(recipe):
    with pytest.raises(TargetError, match=r"passes\[0\] clipped: format gguf cannot state a cache policy"):
        compress.plan(recipe(Clipped(), RTN(group_size=32), save={"format": "gguf"}))


def test_its_json_is_its_fields_and_its_kind():
    assert ClippedCache().to_json() == {"kind": "clipped"}
    without = ClippedCache(clips_values=False)
    assert read_policy(without.to_json()) == without and without.text == "keys bfloat16, values exact"
