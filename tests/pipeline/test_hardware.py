"""A plan on other hardware: from config.json alone, the same bytes as the plan, and properties of settings."""

import json
import shutil
from itertools import pairwise

import pytest
import torch
from click.testing import CliRunner
from transformers import LlamaConfig, Qwen3MoeConfig

import compress
from compress import GPTQ, RTN, Distill, Wanda
from compress.cli import main
from compress.errors import ShortageError
from compress.pipeline.counted import counted, counts_by_kind
from compress.pipeline.hardware import plan_hardware
from compress.pipeline.workload import Division, inputs_of, workload

SHAPE = {"vocab_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}


@pytest.fixture
def config_alone(tmp_path):
    """config_alone(config, architecture, name) -> a folder that holds config.json and nothing else."""

    def write(config, architecture="LlamaForCausalLM", name="model") -> str:
        config.architectures, folder = [architecture], tmp_path / name
        config.save_pretrained(folder)
        return str(folder)

    return write


@pytest.fixture
def llama(config_alone):
    """llama(hidden=32, blocks=3) -> the folder of a configuration of a Llama."""

    def write(hidden=32, blocks=3) -> str:
        sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": blocks}
        return config_alone(LlamaConfig(**SHAPE, **sizes, dtype="bfloat16"), name=f"llama-{hidden}-{blocks}")

    return write


@pytest.fixture
def asked(recipe):
    """asked(model, *steps) -> a recipe on 8 sequences of 16 tokens of a text, without evaluation."""

    def build(model, *steps, **options):
        calibration = {"source": "wikitext", "sequences": 8, "length": 16, "batch": 2}
        return recipe(
            *steps, model=model, save={"verify": "own"}, **{"calibration": calibration, "eval": None, **options}
        )

    return build


def moe(**changes):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 5, "head_dim": 16}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [0]}
    return Qwen3MoeConfig(**SHAPE, **sizes, **experts, dtype="bfloat16", **changes)


def test_a_mixture_is_planned_from_one_block_of_each_kind(config_alone, asked):
    folder = config_alone(moe(), "Qwen3MoeForCausalLM")
    run = counted(asked(folder, GPTQ(group_size=16)), torch.device("cuda"))
    assert run.counts == (1, 4)  # a dense block, and the first of four equal ones
    dense, mixed = run.blocks
    assert mixed.shares["model.layers.1.mlp.experts.0.gate_proj"] == 0.5  # two of four experts for a token
    assert mixed.shares["model.layers.1.self_attn.q_proj"] == dense.shares["model.layers.0.mlp.up_proj"] == 1
    step, names = run.footprint.steps[0][1:]
    inputs = list(inputs_of(mixed, names, run.footprint.shapes))
    assert isinstance(step, GPTQ) and len(inputs) == 2 + 2 * 4  # attention: q, k, v and o; an expert: gate, up and down
    assert "planned without the tokenizer of the model" in run.notes


@pytest.mark.parametrize("steps", [(GPTQ(group_size=16),), (Wanda(pattern="2:4"), RTN(group_size=16))])
def test_bytes_and_memory_are_those_of_the_plan(steps, config_alone, asked, pico):
    folder = config_alone(moe(), "Qwen3MoeForCausalLM")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{pico}/{name}", folder)
    planned, run = compress.plan(asked(folder, *steps)), counted(asked(folder, *steps), torch.device("cpu"))
    assert (run.checkpoint_bytes, run.dense_bytes) == (planned.checkpoint_bytes, planned.dense_bytes)
    assert run.footprint.peak_bytes() == planned.memory_bytes


def test_the_work_of_a_tiny_model_by_hand(llama, asked):
    """One block, hidden 32, intermediate 64, 8 sequences of 16 tokens, multi-head attention of two heads."""
    run = counted(
        asked(llama(blocks=1), RTN(group_size=16, ignore="*.down_proj"), GPTQ(group_size=16, targets="*.down_proj")),
        torch.device("cpu"),
    )
    tokens, linears, weights = 8 * 16, 4 * 32 * 32 + 3 * 32 * 64, 32 * 64
    done = workload(run.footprint, run.blocks, 1000)
    rtn, gptq = (label for label, _, _ in run.footprint.steps)
    forward = 2 * tokens * linears + 8 * 2 * 2 * 16 * 16 * 32  # scores and their product with the values
    assert done.phases[rtn].products == done.phases[gptq].products == forward
    assert done.phases[gptq].statistics == 2 * tokens * 64**2
    assert done.phases[gptq].factors == pytest.approx(2 * 64**3 / 3)
    assert done.phases[gptq].installs == weights and done.phases[gptq].layers == 1
    assert done.phases["files"].stored == 1000 and done.unknown == ()
    halves = workload(run.footprint, run.blocks, 1000, Division(2)).phases[gptq]
    assert (halves.products, halves.statistics) == (forward / 2, tokens * 64**2)
    assert halves.columns == done.phases[gptq].columns / 2 and halves.factors == done.phases[gptq].factors


def test_more_devices_are_never_slower_nor_take_more_memory(llama, asked):
    for step in (GPTQ(group_size=16), Wanda(pattern="2:4"), RTN(group_size=16)):
        planned = plan_hardware(asked(llama(), step), "6xH100")
        assert [setting.processes for setting in planned.settings] == [1, 2, 4, 6]
        seconds = [setting.total_seconds for setting in planned.settings]
        memory = [setting.fit.peak_bytes for setting in planned.settings]
        assert seconds == sorted(seconds, reverse=True) and memory == sorted(memory, reverse=True)
        assert planned.cheapest.device_seconds == min(setting.device_seconds for setting in planned.settings)
        assert planned.fastest.total_seconds == seconds[-1]


def test_a_larger_model_never_takes_less(llama, asked):
    step = GPTQ(group_size=16)
    plans = [plan_hardware(asked(llama(*size), step), "1xH100") for size in ((32, 2), (32, 4), (64, 4))]
    for less, more in pairwise(plans):
        assert less.dense_bytes < more.dense_bytes and less.checkpoint_bytes < more.checkpoint_bytes
        assert less.cheapest.total_seconds < more.cheapest.total_seconds
        assert less.cheapest.fit.peak_bytes <= more.cheapest.fit.peak_bytes


def test_a_plan_is_the_same_twice(llama, asked):
    recipe = asked(llama(), GPTQ(group_size=16))
    assert plan_hardware(recipe, "8xH200").to_json() == plan_hardware(recipe, "8xH200").to_json()


def test_the_smaller_of_two_limits_counts(llama, asked):
    recipe = asked(llama(), GPTQ(group_size=16))
    small = plan_hardware(recipe, "1xH100", memory="1GB")
    assert any("the one that was asked for: 1000 MB" in note for note in small.notes)
    large = plan_hardware(recipe, "1x4090", memory="1TB")
    assert any("that of 1 x RTX-4090 (24 GB each): 24000 MB" in note for note in large.notes)


def test_a_run_that_fits_no_device_is_an_error(asked, config_alone):
    wide = LlamaConfig(
        **SHAPE | {"num_attention_heads": 64}, hidden_size=16384, intermediate_size=53248, num_hidden_layers=2
    )
    folder = config_alone(wide)
    with pytest.raises(ShortageError, match=r"^hardware 2xT4: memory: .* it fits with"):
        plan_hardware(asked(folder, GPTQ(group_size=16)), "2xT4")
    with pytest.raises(ShortageError, match="MB of RAM, the machine has"):
        plan_hardware(asked(folder, RTN(group_size=16)), "1xB200,100MB")


def test_what_is_not_counted_is_named(llama, asked):
    planned = plan_hardware(asked(llama(), compress.AWQ(group_size=16), RTN(group_size=16)), "1xH100")
    assert planned.unknown == ("passes[0] awq",)
    apple = plan_hardware(asked(llama(), RTN(group_size=16)), "1xM4-Max,64GB")
    assert apple.cheapest.total_seconds is None and "rates are not published" in apple.unknown[-1]


def test_passes_that_tell_blocks_apart_are_counted_on_all_blocks(asked, llama):
    assert counts_by_kind(asked(llama(), RTN(group_size=16, ignore=["*.fc1", "*_proj2"])))
    for step in (
        RTN(group_size=16, ignore="*.layers.0.*"),
        RTN(group_size=16, targets="re:.*layers.[12].*"),
        Distill(steps=1),
    ):
        assert not counts_by_kind(asked(llama(), step))


def test_a_head_larger_than_its_files_is_planned(config_alone, asked):
    """Nothing is allocated for a model without files of weights; a bound on the number of modules stays."""
    sizes = {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 1, "num_attention_heads": 8}
    folder = config_alone(LlamaConfig(vocab_size=200_000, max_position_embeddings=64, **sizes, dtype="bfloat16"))
    planned = plan_hardware(asked(folder, RTN(group_size=32)), "1xH100")
    assert planned.dense_bytes > 2 * 2 * 200_000 * 1024


def test_the_command(llama, tmp_path):
    shown = CliRunner().invoke(
        main, ["plan", llama(), "--scheme", "FP8-dynamic", "--eval", "none", "--hardware", "2xH100"]
    )
    assert shown.exit_code == 0, shown.output
    assert "predicted" in shown.output and "device-hours" in shown.output and "cheapest: 1 of 2 devices" in shown.output
    options = ["plan", llama(), "--scheme", "FP8-dynamic", "--eval", "none", "--hardware", "2xH100", "--json"]
    values = json.loads(CliRunner().invoke(main, options).stdout)
    assert values["predicted"] is True and [setting["processes"] for setting in values["settings"]] == [1, 2]
    assert values["settings"][0]["memory"] and values["rates"] == "H100-SXM, predicted"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hardware", "8xH10"], "did you mean 'H100'?"),
        (["--hardware", "1xH100", "--all"], "leave out --all and --out"),
        (["--model", "other"], "with --scheme write only the model"),
    ],
)
def test_wrong_options(options, message, llama):
    shown = CliRunner().invoke(main, ["plan", llama(), "--scheme", "W4A16", *options])
    assert shown.exit_code == 2 and message in shown.output
