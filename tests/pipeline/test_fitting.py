"""A limit of memory: what a run does to stay within it, and what it says before any work where it cannot."""

import types

import numpy as np
import pytest
import yaml
from click.testing import CliRunner

import compress
from compress import AWQ, GPTQ, LKD, RTN, Calibration, Distill, Evaluate, Finetune, Wanda
from compress.cli import main
from compress.errors import ShortageError, UserError
from compress.pipeline import fitting
from compress.pipeline.fitting import LIBRARIES_BYTES, SEPARATE_BYTES, separate_large_tensors

PASSES = [Wanda(repair=0, true_sequential=False)]
SEQUENCES, LENGTH = 64, 64
STATES = SEQUENCES * LENGTH * 128 * 4  # activations of pico, 128 wide, in float32
OWN = {"verify": "own"}


@pytest.fixture
def long(pico, recipe, tmp_path):
    """long(*passes, **options): a recipe with more activations than weights."""
    generator = np.random.default_rng(0)
    np.save(tmp_path / "long.npy", generator.integers(512, size=(SEQUENCES, LENGTH)))
    text = Calibration(source=str(tmp_path / "long.npy"), sequences=None, length=None, batch=32)

    def build(*passes, **options):
        return recipe(*(passes or PASSES), **{"calibration": text, "save": OWN, "eval": None, **options})

    return build


def needs(asked, **options):
    """(bytes by part, of all) of a plan."""
    found = compress.plan(asked, **options)
    return {need.where: need for need in found.fit.needs}, found.memory_bytes


def test_with_enough_memory_nothing_changes(long):
    free, limited = compress.plan(long()), compress.plan(long(), memory="8GB")
    assert free == limited and limited.fit.batch == 32 and limited.fit.store_bytes > STATES


def test_first_the_activations_go_to_files_then_batches_become_smaller(long):
    _, free = needs(long())
    first = compress.plan(long(), memory=LIBRARIES_BYTES + free - STATES // 4)
    assert first.fit.batch == 32 and 0 <= first.fit.store_bytes <= STATES // 2
    assert first.memory_bytes == free - STATES + first.fit.store_bytes
    assert any("activations between blocks beyond 0 MB are stored in files" in note for note in first.notes)
    second = compress.plan(long(), memory=LIBRARIES_BYTES + free - 2 * STATES)
    assert second.fit.batch < 32 and second.memory_bytes <= free - 2 * STATES
    assert any(f"calibration.batch is {second.fit.batch} instead of 32" in note for note in second.notes)


def test_files_change_no_byte_and_a_batch_is_that_of_the_recipe(long, tmp_path):
    _, free = needs(long())
    limit = LIBRARIES_BYTES + free - STATES // 4
    plain = compress.run(long(), tmp_path / "plain", progress=False).report
    spilled = compress.run(long(), tmp_path / "spilled", progress=False, memory=limit).report
    assert spilled["files"] == plain["files"] and spilled["predicted"]["memory_bytes"] < free
    tight = compress.run(long(), tmp_path / "tight", progress=False, memory=limit - 2 * STATES).report
    stated = yaml.safe_load((tmp_path / "tight" / "recipe.yaml").read_text())
    assert stated["calibration"]["batch"] == tight["reproduce"]["recipe"]["calibration"]["batch"] < 32
    assert any("calibration.batch is" in entry["message"] for entry in tight["journal"]["entries"])
    again = compress.run(tmp_path / "tight" / "recipe.yaml", tmp_path / "again", progress=False).report
    assert again["files"] == tight["files"]


@pytest.fixture
def mixture(recipe, tiny, tmp_path):
    """mixture(*passes): a recipe for a block with 16 experts, whose statistics take most of the memory."""
    tiny("qwen3-moe", num_hidden_layers=1, num_experts=16).save_pretrained(tmp_path / "mixture")
    np.save(tmp_path / "few.npy", np.random.default_rng(0).integers(64, size=(4, 16)))
    text = Calibration(source=str(tmp_path / "few.npy"), sequences=None, length=None)
    model = str(tmp_path / "mixture")
    return lambda *passes: recipe(*passes, model=model, calibration=text, save={"format": "native", **OWN}, eval=None)


MIXED = {
    "gptq": [GPTQ(group_size=16, true_sequential=False)],
    "wanda": [Wanda(pattern="2:4")],
    "awq": [AWQ(group_size=16), RTN(group_size=16)],
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", MIXED)
def test_a_limit_makes_the_group_of_inputs_smaller_and_changes_no_byte(name, mixture, tmp_path):
    asked = mixture(*MIXED[name])
    _, free = needs(asked)
    plans = {}
    for limit in range(LIBRARIES_BYTES + free, LIBRARIES_BYTES, -free // 200):
        try:
            planned = compress.plan(asked, memory=limit)
        except ShortageError:
            break
        assert planned.memory_bytes <= limit - LIBRARIES_BYTES
        plans.setdefault(planned.fit.inputs_at_once or 33, (limit, planned.notes))
    assert len(plans) > 2 and list(plans) == sorted(plans, reverse=True) and max(plans) == 33
    digests = []
    for count in (33, sorted(plans)[len(plans) // 2], min(plans)):
        limit, notes = plans[count]
        keeps = f"passes[0] {name} keeps statistics of {count} of 33 inputs"
        assert any(keeps in note for note in notes) == (count < 33)
        digests.append(compress.run(asked, tmp_path / str(count), progress=False, memory=limit).report["files"])
    assert digests[0] == digests[1] == digests[2]


@pytest.mark.parametrize("experts", [False, True])
def test_under_a_limit_activations_in_a_block_are_computed_again_and_no_byte_changes(experts, long, mixture, tmp_path):
    asked = mixture(GPTQ(group_size=16)) if experts else long(GPTQ())
    found, free = needs(asked)
    (need,) = [need for place, need in found.items() if "gptq" in place]
    limit = LIBRARIES_BYTES + free - need.parts["activations that wait inside of the block"] // 2
    planned = compress.plan(asked, memory=limit)
    assert planned.fit.recomputes and planned.memory_bytes <= limit - LIBRARIES_BYTES
    assert any("computes the activations inside of a block again" in note for note in planned.notes)
    (smaller,) = [need for need in planned.fit.needs if "gptq" in need.where]
    assert "activations that wait inside of the block" not in smaller.parts
    assert ("inputs of experts" in smaller.parts) == experts
    digests = [
        compress.run(asked, tmp_path / str(memory), progress=False, memory=memory).report["files"]
        for memory in (None, limit)
    ]
    assert digests[0] == digests[1]


@pytest.mark.parametrize("remedy", ["sequences", "length", "true_sequential"])
def test_each_remedy_that_is_named_is_enough(remedy, long):
    in_lockstep = GPTQ(error="asymmetric")  # what waits for the comparison is not recomputed
    alone = long().calibration.model_copy(update={"batch": 1})
    limit = (
        LIBRARIES_BYTES + needs(long(in_lockstep, calibration=alone))[1] - 2 * STATES
    )  # stores in files save one of them
    with pytest.raises(ShortageError) as caught:
        compress.plan(long(in_lockstep), memory=limit)
    said = str(caught.value)
    assert said.startswith("memory: passes[0] gptq on model.layers.")
    assert "activations that wait inside of the block" in said and "MB are left of" in said
    if remedy == "true_sequential":
        assert "true_sequential: false of passes[0] gptq" in said
        changed = long(GPTQ(error="asymmetric", true_sequential=False))
    else:
        value = int(said.split(f"calibration.{remedy}: ")[1].split(",")[0].split(" ")[0])
        kept = long().calibration.model_copy(update={remedy: value})
        changed = long(in_lockstep, calibration=kept)
    assert compress.plan(changed, memory=limit).memory_bytes <= limit - LIBRARIES_BYTES


def test_passes_that_learn_from_batches_keep_them(long):
    asked = long(RTN(), LKD(train="scales", steps=1))
    _, free = needs(asked)
    with pytest.raises(ShortageError, match="it fits with"):
        for share in range(20, 0, -1):
            assert compress.plan(asked, memory=LIBRARIES_BYTES + free * share // 20).fit.batch == 32


def test_passes_over_the_whole_model_name_their_memory(long):
    asked = long(Finetune(steps=1))
    found, most = needs(asked)
    need = found["passes[0] finetune"]
    assert need.size_bytes == most and need.parts["the pass"] > 3 * 4 * 128 * 288
    with pytest.raises(ShortageError, match=r"memory: passes\[0\] finetune needs .*; it fits with"):
        compress.plan(asked, memory=LIBRARIES_BYTES + most - 1000)


def test_the_evaluation_is_a_need(long, tmp_path):
    asked = long(RTN(), eval=Evaluate(perplexity=(str(tmp_path / "long.npy"),), windows=2, length=None))
    found, _ = needs(asked)
    assert found["evaluation"].parts["logits of a text"] == LENGTH * 1024 * 4


def test_transformers_needs_the_dense_model(long):
    asked = long(RTN(), save={"verify": "full"})
    planned = compress.plan(asked)
    limit = LIBRARIES_BYTES + planned.dense_bytes + planned.checkpoint_bytes
    assert compress.plan(asked, memory=limit).fit is not None
    with pytest.raises(ShortageError, match=r"memory: verification by transformers needs .*save: {verify: own}"):
        compress.plan(asked, memory=limit - 1)


def test_a_machine_that_is_too_small(long, tmp_path, monkeypatch):
    monkeypatch.setattr("compress.pipeline.plan.available_bytes", lambda device: 1000)
    with pytest.raises(
        ShortageError, match=r"memory: .* needs .*; 0\.00100 MB are available to this process; it fits with"
    ):
        compress.run(long(), tmp_path / "out")
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()
    assert any(
        note.startswith("this machine is too small for the run: memory: ") for note in compress.plan(long()).notes
    )


def test_a_machine_with_room_for_files_only(long, monkeypatch):
    _, free = needs(long())
    monkeypatch.setattr("compress.pipeline.plan.available_bytes", lambda device: free - STATES // 2)
    found = compress.plan(long())
    assert found.fit.batch == 32 and found.fit.store_bytes <= STATES // 2


def test_the_options_of_the_commands(long, tmp_path):
    (tmp_path / "recipe.yaml").write_text(long().to_yaml())
    command = CliRunner()
    shown = command.invoke(main, ["plan", str(tmp_path / "recipe.yaml"), "--memory", "2GB"]).output
    assert "passes[0] wanda on model.layers.2: " in shown and "activations between blocks 2.10 MB" in shown
    for name in ("plan", "run"):
        wrong = command.invoke(main, [name, str(tmp_path / "recipe.yaml"), "--memory", "8"])
        assert wrong.exit_code == 2 and "memory: '8' is no size; write a number and a unit" in wrong.output


@pytest.mark.parametrize("memory", ["lots", "0GB", -1])
def test_sizes_in_python(memory, long, tmp_path):
    for call in (lambda: compress.plan(long(), memory=memory), lambda: compress.run(long(), tmp_path, memory=memory)):
        with pytest.raises(UserError, match=f"memory: {memory!r} is no"):
            call()


def test_the_teacher_of_a_pass_over_the_whole_model_is_no_second_model(long):
    found, _ = needs(long(RTN(), Distill(train="scales", steps=1)))
    assert set(found["passes[1] distill"].parts) == {
        "tensors outside of the blocks",
        "all blocks",
        "the pass",
        "modules of linears",
    }


def test_copies_of_packed_weights_that_are_too_large_are_made_layer_by_layer(long):
    asked = long(RTN(weights="int8", group_size=32), eval=Evaluate(perplexity=("embedded",), windows=2, length=16))
    free = compress.plan(asked, memory="8GB")
    copies = free.fit.needs[0].parts["weights in the layout of kernels"]
    limited = compress.plan(asked, memory=LIBRARIES_BYTES + 4 * copies - 4)
    assert limited.fit.copies_bytes == copies - 1 < free.fit.copies_bytes
    # layers of one module may be computed together; keys and values have half as many channels as queries
    feed_forward, block = 3 * 128 * 288, 3 * 128 * 128 + 3 * 128 * 288
    largest = limited.fit.needs[0].parts["weights in the layout of kernels"]
    assert largest == copies * feed_forward // (3 * block)
    assert any("kernels copy the weights of a layer again" in note for note in limited.notes)
    assert not any("kernels copy" in note for note in free.notes)


@pytest.mark.parametrize(
    ("platform", "has", "asked"),
    [("linux", True, [(-3, SEPARATE_BYTES)]), ("linux", False, []), ("darwin", True, []), ("win32", True, [])],
)
def test_only_glibc_is_asked_to_give_back_large_tensors(platform, has, asked, monkeypatch):
    seen = []
    library = types.SimpleNamespace(**({"mallopt": lambda *given: seen.append(given)} if has else {}))  # musl has none
    monkeypatch.setattr(fitting.sys, "platform", platform)
    monkeypatch.setattr(fitting.ctypes, "CDLL", lambda name: library)
    separate_large_tensors()
    assert seen == asked
