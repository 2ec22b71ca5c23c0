"""A plan and a roofline need the configuration and the tokenizer of a model; of the hub they fetch nothing else."""

import fnmatch
import shutil
from pathlib import Path

import huggingface_hub
import pytest

import compress
from compress import RTN, Distill, Rotate, Wanda
from compress.checkpoint.opening import open_model
from compress.errors import ModelError
from compress.pipeline.rooflines import roofline

NOTE = "planned without the weights: zeros of an earlier pruning, and tensors that differ, are not known"
STEPS = {
    "quantized": [RTN(group_size=16)],
    "pruned": [Wanda(pattern="2:4"), RTN(group_size=16, ignore="*.0.*")],
    "reshaped, unlike": [Rotate(), RTN(group_size=16, overrides={"*.v_proj": {"weights": "none"}})],
    "trained": [Distill(train=["norms", "weights"], steps=1)],
}


@pytest.fixture
def bare(tmp_path):
    """bare(folder) -> a copy of a model's folder without weights."""

    def copied(folder: str) -> str:
        return str(shutil.copytree(folder, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors")))

    return copied


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_the_plan_is_the_same(family, name, tiny_folder, bare, recipe):
    folder = tiny_folder(family)
    if (family, name) == ("qwen3-moe", "reshaped, unlike"):
        pytest.skip("its norms are read by routers")
    asked = recipe(*STEPS[name], model=folder, save={"verify": "own"})
    planned = compress.plan(asked)
    without = compress.plan(asked.model_copy(update={"model": bare(folder)}))
    assert (without.layers, without.checkpoint_bytes) == (planned.layers, planned.checkpoint_bytes)
    assert without.dense_bytes == planned.dense_bytes
    assert set(without.notes) - set(planned.notes) == {NOTE}


@pytest.mark.parametrize("family", ["gpt2", "opt", "mixtral", "t5", "bart", "mamba", "gemma3", "deepseek-v3", "albert"])
def test_any_family_is_planned(family, tiny_folder, bare, recipe):
    asked = recipe(RTN(weights="int8", group_size="channel"), model=tiny_folder(family), save={"format": "native"})

    def outcome(source: str) -> object:
        try:
            planned = compress.plan(asked.model_copy(update={"model": source}))
        except ModelError as error:
            return str(error)
        return planned.layers, planned.checkpoint_bytes

    assert outcome(bare(tiny_folder(family))) == outcome(tiny_folder(family))


def test_bfloat16_is_stored_as_bfloat16(tiny, bare, recipe, tmp_path):
    tiny("llama").bfloat16().save_pretrained(tmp_path / "model")
    asked = recipe(RTN(group_size=16), model=str(tmp_path / "model"), dtype="float32", save={"format": "native"})
    without = asked.model_copy(update={"model": bare(str(tmp_path / "model"))})
    assert compress.plan(without).checkpoint_bytes == compress.plan(asked).checkpoint_bytes


def test_the_roofline_is_the_same(pico, bare):
    assert roofline(bare(pico), context=256).to_json() == roofline(pico, context=256).to_json()


def test_a_run_needs_the_weights(bare, pico, recipe, tmp_path):
    with pytest.raises(ModelError, match=r"holds no \.safetensors file"):
        compress.run(recipe(RTN(group_size=32), model=bare(pico)), tmp_path / "out")


def test_a_folder_with_other_files_of_weights_is_refused(pico, bare, recipe, tmp_path):
    folder = tmp_path / "bare"
    asked = recipe(RTN(group_size=32), model=bare(pico))
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"holds no \.safetensors file"):
        compress.plan(asked)


def test_a_compressed_folder_needs_its_weights(pico, recipe, tmp_path, bare):
    compress.run(recipe(RTN(group_size=32), eval=None), tmp_path / "out", progress=False)
    with pytest.raises(
        ModelError, match=r"lacks 4 of 4 files of weights that its index lists: model-00001-of-00004\.safetensors, "
    ):
        compress.plan(recipe(Wanda(), model=bare(str(tmp_path / "out")), save={"format": "native"}))


HUB = [
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "model.safetensors",
    "consolidated.safetensors",
    "original/consolidated.00.pth",
    "original/params.json",
    "original/model.safetensors",
    "1_Pooling/config.json",
]


@pytest.fixture
def hub(pico, monkeypatch, tmp_path):
    """The names of files that were fetched from the hub, where each model is the pico model in the layout of `HUB`."""
    fetched: list[str] = []
    snapshot = tmp_path / "snapshots" / ("a" * 40)

    def download(name, revision=None, allow_patterns=(), ignore_patterns=()):
        names = [n for n in HUB if any(fnmatch.fnmatch(n, pattern) for pattern in allow_patterns)]
        names = [n for n in names if not any(fnmatch.fnmatch(n, pattern) for pattern in ignore_patterns)]
        snapshot.mkdir(parents=True, exist_ok=True)
        for file in names:
            if not (snapshot / file).exists():
                fetched.append(file)
                if (Path(pico) / file).exists():
                    shutil.copyfile(Path(pico) / file, snapshot / file)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return fetched


def test_a_plan_of_a_model_of_the_hub_fetches_no_weights(hub, recipe):
    asked = recipe(RTN(group_size=32), Distill(teacher="owner/teacher", steps=1, train=["norms"]), model="owner/name")
    planned = compress.plan(asked)
    assert planned.layers and NOTE in planned.notes
    roofline("owner/name", context=256)
    assert hub and not [name for name in hub if "safetensors" in name or "original" in name]


def test_weights_are_fetched_once(hub):
    assert open_model("owner/name").source == "owner/name"
    assert "model.safetensors" in hub and not [name for name in hub if "original" in name or "consolidated" in name]
