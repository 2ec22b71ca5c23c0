"""report.json: sizes and bits per weight against hand-worked numbers, hashes against the files themselves."""

import hashlib

import pytest
from safetensors import safe_open

import compress
from compress.errors import VerificationError
from compress.passes.contract.journal import Journal
from compress.pipeline.finish import finish
from compress.pipeline.prepare import prepare
from compress.pipeline.run import compress as work

# tiny llama: 3 blocks of q, o [32, 32], k, v [16, 32], gate, up [48, 32], down [32, 48]
WEIGHTS = 3 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32)
OUTSIDE = 2 * 64 * 32 + 32 + 3 * 2 * 32  # embedding and head, norms


@pytest.fixture(scope="module")
def finished(recipe, tiny_folder, tmp_path_factory):
    asked = recipe(compress.RTN(weights="int4", group_size=16), model=tiny_folder("llama"), save={"format": "native"})
    return compress.run(asked, tmp_path_factory.mktemp("report") / "out")


def test_sizes_by_hand(finished):
    size = finished.report["size"]
    packed = WEIGHTS // 2 + WEIGHTS // 16 * 4  # half a byte each, and a float32 scale for every 16
    assert size["compressed_layers"] == 21 and size["compressed_weights"] == WEIGHTS
    assert size["compressed_bytes"] == packed
    assert size["bits_per_weight"] == 4 + 32 / 16
    assert size["tensor_bytes"] == packed + 4 * OUTSIDE
    assert size["dense_bytes"] == 4 * (WEIGHTS + OUTSIDE)


def test_the_size_of_the_source_is_that_of_its_files(finished):
    source = finished.folder / finished.report["reproduce"]["recipe"]["model"]
    files = [path for path in source.iterdir() if path.suffix == ".safetensors"]
    assert finished.report["size"]["source_bytes"] == sum(path.stat().st_size for path in files)


def test_sizes_are_those_on_disk(finished):
    shards = list(finished.folder.glob("*.safetensors"))
    tensors = 0
    for path in shards:
        with safe_open(path, "pt") as file:
            tensors += sum(file.get_tensor(n).numel() * file.get_tensor(n).element_size() for n in file.keys())  # noqa: SIM118
    assert finished.report["size"]["tensor_bytes"] == finished.report["predicted"]["tensor_bytes"] == tensors
    assert finished.report["size"]["checkpoint_bytes"] == sum(path.stat().st_size for path in shards)


def test_files_are_hashed_the_descriptions_apart(finished):
    found = finished.report["files"]
    assert "config.json" in found and "model.safetensors.index.json" in found
    assert not {"report.json", "report.md", "recipe.yaml"} & found.keys()
    for name, digest in found.items():
        assert hashlib.sha256((finished.folder / name).read_bytes()).hexdigest() == digest
    lines = "".join(f"{name} {digest}\n" for name, digest in sorted(found.items()))
    assert finished.report["checkpoint_sha256"] == hashlib.sha256(lines.encode()).hexdigest()


def test_what_is_needed_to_do_it_again(finished):
    again = finished.report["reproduce"]
    assert compress.Recipe.from_data(again["recipe"]).passes == (compress.RTN(weights="int4", group_size=16),)
    assert again["compute_dtype"] == again["storage_dtype"] == "float32" and again["threads"] == 1
    assert again["packages"]["torch"] and len(again["fingerprint"]) == len(again["calibration_sha256"]) == 64


def test_every_layer_is_there_once_in_the_order_of_the_model(finished):
    names = [layer["layer"] for layer in finished.report["layers"]]
    assert len(names) == len(set(names)) == 21
    assert [name.split(".")[2] for name in names] == ["0"] * 7 + ["1"] * 7 + ["2"] * 7


def test_a_checkpoint_of_another_size_than_planned_is_no_success(recipe, tiny_folder, tmp_path):
    asked = recipe(compress.RTN(group_size=16), model=tiny_folder("llama"), save={"format": "native"})
    job = prepare(asked, tmp_path / "out", False, Journal())
    work(job)
    job.manifest.shards["outside"].size_bytes += 4
    with pytest.raises(VerificationError, match=r"holds \d+ bytes of tensors, but the plan predicted \d+"):
        finish(job)
