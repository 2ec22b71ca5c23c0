"""One contract over every pass, found by its file: nothing here names an algorithm.

A pass is tried with the options of its own recipe, and after the passes that precede it there.
"""

import hashlib
import inspect
from functools import cache
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from pydantic import ValidationError
from tolerances import LOGITS
from transformers import AutoModelForCausalLM

import compress
from compress import PASSES, Recipe, passes
from compress.api.passes import BlockPass, LayerPass, ModelPass, Pass, Solution
from compress.errors import CalibrationError, RecipeError, TargetError
from compress.families.pruning import PruningPass
from compress.families.quantizing import Quantizing
from compress.model.kv_cache import SCALES, attentions_with_cache, cache_sha256, scheme_of
from compress.model.linear import CompressedLinear, linears, replace_linear
from compress.recipe.order import check_order

ROOT = Path(__file__).parents[1]
PICO = Path(__file__).parent / "pico" / "model"
SIZES = (LayerPass, BlockPass, ModelPass)

every_pass = pytest.mark.parametrize("key", PASSES)


def all_passes(check):
    """One test for all passes, of what takes no time; it fails with a line for every pass that is not as it should be."""

    def test():
        found = []
        for key in PASSES:
            try:
                check(key)
            except (AssertionError, pytest.fail.Exception) as error:
                found.append(f"{key}: {error}")
        assert not found, "\n".join(found)

    test.__name__, test.__doc__, test.__module__ = check.__name__, check.__doc__, check.__module__
    return test


@cache
def chain_of(key: str) -> tuple[Pass, ...]:
    """The passes of the recipe of the same name, up to the one that it is about."""
    steps = Recipe.from_yaml(ROOT / "recipes" / f"{key}.yaml").passes
    keys = [step.key() for step in steps]
    assert key in keys, f"recipes/{key}.yaml does not use {key}"
    return steps[: keys.index(key) + 1]


def changed(step: Pass, **options) -> Pass:
    """The same pass with other options, validated."""
    return type(step).model_validate({**step.model_dump(mode="json"), **options})


def fresh():
    return AutoModelForCausalLM.from_pretrained(PICO).eval()


def digest_of_inputs(layer: CompressedLinear) -> torch.Tensor:
    """The same for layers that scale and round their inputs alike."""
    record = [t.sha256() for t in layer.all_transforms]
    return torch.tensor(list(hashlib.sha256(repr(record).encode()).digest()))


def digest_of_cache(attention) -> torch.Tensor:
    """The same for attentions that round keys and values alike."""
    record = cache_sha256(attention) if scheme_of(attention) is not None else "as they are"
    return torch.tensor(list(hashlib.sha256(record.encode()).digest()))


def weights_of(model) -> dict[str, torch.Tensor]:
    """The dense weight of every linear, digests of how its inputs, and keys and values, are treated, and all other tensors."""
    layers = {name: CompressedLinear.of(layer) for name, layer in linears(model).items()}
    found = {f"{name}.weight": layer.weight.clone() for name, layer in layers.items()}
    found |= {f"{name}.inputs": digest_of_inputs(layer) for name, layer in layers.items()}
    held = tuple(f"{name}." for name in layers)
    rest = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(held)}
    found |= {name: tensor.clone() for name, tensor in rest.items() if not name.endswith(SCALES)}
    return found | {
        f"{name}.cache": digest_of_cache(attention) for name, attention in attentions_with_cache(model).items()
    }


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.fixture(scope="module")
def ids(pico_ids):
    return pico_ids


@pytest.fixture(scope="module")
def applied(ids):
    """applied(key) -> the weights that the key's chain makes of the pico model; computed once."""
    done: dict[str, dict[str, torch.Tensor]] = {}

    def work(key):
        if key not in done:
            done[key] = weights_of(compress.apply(fresh(), chain_of(key), ids))
        return done[key]

    return work


# One name everywhere


def test_every_file_holds_a_pass():
    files = {path.stem for path in Path(passes.__file__).parent.glob("*.py")} - {"__init__"}
    assert set(PASSES) == files, "the class of a file is called like the file, underscores left out"


def test_every_algorithm_has_a_recipe_and_a_test_of_its_name():
    recipes = {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
    tests = {path.stem.removeprefix("test_") for path in (ROOT / "tests" / "passes").glob("test_*.py")}
    assert set(PASSES) <= recipes
    assert set(PASSES) <= tests


@all_passes
def test_key_class_and_recipe_have_one_name(key):
    step = PASSES[key]
    assert step.key() == key
    assert step.__name__.lower() == key.replace("_", "")
    assert chain_of(key)[-1].key() == key


@all_passes
def test_it_says_what_it_does_and_where_it_was_published(key):
    step = PASSES[key]
    assert inspect.getdoc(step) and step.__doc__, "a sentence of its own, not its base's"
    assert step.paper.startswith("https://") and "paper" in step.__dict__
    assert all(option.description for option in step.model_fields.values())
    assert inspect.getdoc(inspect.getmodule(step))


# A frozen value


@all_passes
def test_it_is_a_frozen_value_of_exactly_one_size(key):
    step = chain_of(key)[-1]
    assert sum(isinstance(step, size) for size in SIZES) == 1
    assert not inspect.isabstract(type(step))
    for name in type(step).model_fields:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(step, name, getattr(step, name))
    assert hash(step) == hash(changed(step)) and step == changed(step)


@all_passes
def test_unknown_options_are_errors_with_a_hint(key):
    step = chain_of(key)[-1]
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        changed(step, tragets="*")
    with pytest.raises(RecipeError, match=rf"^r:3:\d+: passes\[0\] {key} tragets: .*did you mean 'targets'"):
        Recipe.from_text(f"model: m\npasses:\n  - {key}: {{tragets: '*'}}\n", "r")


@all_passes
def test_it_survives_a_round_trip_through_yaml(key):
    recipe = Recipe(model="m", passes=chain_of(key))
    assert Recipe.from_text(recipe.to_yaml()) == recipe


@all_passes
def test_its_facts_are_told_consistently(key):
    step = chain_of(key)[-1]
    assert type(step).makes <= step.facts()
    assert not step.after & step.never_after
    assert isinstance(step, Quantizing) <= ("quantized" in step.facts())
    assert isinstance(step, PruningPass) <= ("masked" in step.facts())


# It runs


@every_pass
def test_it_changes_something_and_the_same_again_and_leaves_all_else_alone(key, applied, ids):
    """Finite weights; neither the global random state nor what was asked changes, and neither has a say in the result."""
    assert applied(key).keys() != weights_of(fresh()).keys() or differing(applied(key), weights_of(fresh()))
    assert all(bool(torch.isfinite(t).all()) for t in applied(key).values() if t.is_floating_point())
    model, chain, given = fresh(), chain_of(key), ids.clone()
    before = [hash(step) for step in chain]
    torch.manual_seed(20)
    state = torch.get_rng_state()
    assert compress.apply(model, list(chain), given) is model
    assert torch.equal(torch.get_rng_state(), state)
    assert differing(weights_of(model), applied(key)) == []
    assert torch.equal(given, ids)
    assert [hash(step) for step in chain] == before


@pytest.mark.slow
@every_pass
def test_run_ships_the_weights_that_apply_makes(key, applied, recipe, tmp_path):
    files = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in PICO.iterdir()}
    asked = recipe(*chain_of(key), save={"format": "native", "verify": "own"})
    result = compress.run(asked, tmp_path / "out")
    assert result.report["verified"]["own"] <= LOGITS
    shipped, _ = compress.load(result.folder)
    assert differing(weights_of(shipped), applied(key)) == []
    assert {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in PICO.iterdir()} == files


def parts_for(step: Pass) -> tuple[str, str]:
    """A layer pass is held to one linear, the others, which work on what belongs together, to one block; and some more."""
    if isinstance(step, LayerPass):
        return "model.layers.1.self_attn.k_proj", "model.layers.1.self_attn.*"
    return "model.layers.1.*", "model.layers.[12].*"


def with_outliers():
    """The same function, but one channel that norms write is much larger, as in real models: passes may look for that."""
    model = fresh()
    for block in model.model.layers:
        attention, mlp = block.self_attn, block.mlp
        readers = {
            block.input_layernorm: (attention.q_proj, attention.k_proj, attention.v_proj),
            block.post_attention_layernorm: (mlp.gate_proj, mlp.up_proj),
        }
        with torch.no_grad():
            for norm, linears_ in readers.items():
                norm.weight[3] *= 128
                for linear in linears_:
                    linear.weight[:, 3] /= 128
    return model


@pytest.mark.slow
@every_pass
def test_what_is_not_targeted_stays_as_it_is(key, ids):
    *before, step = chain_of(key)
    part, more = parts_for(step)
    if step.requires.new_shape:
        return the_untargeted_is_still_there(step, part, ids)
    untouched = weights_of(compress.apply(with_outliers(), before, ids) if before else with_outliers())
    found = weights_of(compress.apply(with_outliers(), [*before, changed(step, targets=[part])], ids))
    moved = differing(found, untouched)
    one_sweep = isinstance(step, BlockPass) or step.requires.unquantized
    if one_sweep and any(s.requires.data for s in before):  # later blocks calibrate on what it changes
        moved = [name for name in moved if not name.startswith("model.layers.2.")]
    assert moved and all(name.startswith(part.removesuffix("*")) for name in moved)
    rest = weights_of(compress.apply(with_outliers(), [*before, changed(step, targets=[more], ignore=[part])], ids))
    assert all(torch.equal(rest[n], untouched[n]) for n in rest if n.startswith(part.removesuffix("*")))


def the_untargeted_is_still_there(step: Pass, part: str, ids):
    """Under whatever name; or what is asked cannot be done to a part of the model, and an error says so."""
    wanted = {n: t for n, t in weights_of(fresh()).items() if not n.startswith(part.removesuffix("*"))}
    try:
        found = weights_of(compress.apply(fresh(), [changed(step, targets=[part])], ids))
    except TargetError as error:
        assert "uniform" in str(error)
        return
    assert found.keys() != weights_of(fresh()).keys()
    for name, tensor in wanted.items():
        assert any(torch.equal(tensor, other) for other in found.values()), name


class Masking(LayerPass):
    """Half of the weights, here and there, in no pattern that an algorithm would choose."""

    paper: ClassVar[str] = "https://example.org/masking"
    makes: ClassVar[frozenset] = frozenset({"masked"})

    def solve(self, weight, seen, layer):
        keep = torch.rand(weight.shape, generator=torch.Generator().manual_seed(weight.shape[0])) > 0.5
        return Solution(weight * keep, keep)


@pytest.mark.few(11)
@every_pass
def test_what_was_pruned_before_stays_pruned(key, ids):
    """Exactly zero in the weight that is multiplied by, with zero points, too; or the pass may not come after pruning.

    In one layer or block, since the others are the same to it.
    """
    part, _ = parts_for(chain_of(key)[-1])
    for step in _with_zero_points(chain_of(key)[-1]):
        chain = [Masking(), *chain_of(key)[:-1], changed(step, targets=[part])]
        if any("masked" in s.never_after for s in chain):
            with pytest.raises(RecipeError, match="are already pruned"):
                check_order(chain)
            continue
        pruned = linears(compress.apply(fresh(), chain[:1], ids))
        masks = {name: layer.mask for name, layer in pruned.items() if isinstance(layer, CompressedLinear)}
        model = compress.apply(fresh(), chain, ids)
        assert len(masks) == 21
        for name, mask in masks.items():
            layer = model.get_submodule(name)
            assert int(layer.mask.sum()) <= int(mask.sum())
            assert bool((layer.weight[~layer.mask] == 0).all()), name


def _with_zero_points(step: Pass) -> list[Pass]:
    both = isinstance(step, Quantizing) and step.weights.startswith("int")
    return [step, changed(step, symmetric=False)] if both else [step]


# It fails as it should


@every_pass
def test_patterns_that_match_nothing_are_errors(key, ids, recipe, tmp_path):
    *before, step = chain_of(key)
    for option in ("targets", "ignore"):
        lost = [*before, changed(step, **{option: ["*.q_porj"]})]
        message = rf"passes\[{len(before)}\] {key}: {option} pattern '\*\.q_porj' matches no linear.*'q_proj'"
        with pytest.raises(TargetError, match=message):
            compress.apply(fresh(), lost, ids)
        with pytest.raises(TargetError, match=message):
            compress.run(recipe(*lost, save={"format": "native"}), tmp_path / option)


@all_passes
def test_a_wrong_regular_expression_is_an_error_at_once(key):
    with pytest.raises(ValidationError, match="is not a regular expression"):
        changed(chain_of(key)[-1], targets=["re:("])


@every_pass
def test_data_is_asked_for_where_it_is_needed(key, applied):
    chain = chain_of(key)
    if any(step.requires.data for step in chain):
        with pytest.raises(CalibrationError, match="need token ids"):
            compress.apply(fresh(), chain)
    elif not any(isinstance(step, ModelPass) for step in chain):
        assert differing(weights_of(compress.apply(fresh(), chain)), applied(key)) == []


@all_passes
def test_the_order_that_it_declares_is_checked_before_any_work(key):
    """After a pass that makes what it must not find, it is refused."""
    step = chain_of(key)[-1]
    for fact in step.never_after:
        maker = next(s for other in PASSES for s in chain_of(other) if fact in s.facts() and not s.after)
        with pytest.raises(
            RecipeError, match=f"put {key} before it|remove one of the two, or give them disjoint targets"
        ):
            check_order([maker, step])
    if step.after:
        with pytest.raises(RecipeError, match="first; put a pass that does so before it"):
            check_order([step])


# Passes of one's own, of all sizes, in one chain


class Doubled(ModelPass):
    """Twice the weights of what it works on."""

    paper: ClassVar[str] = "https://example.org/doubled"

    def apply(self, model, run):
        for name in linears(model):
            if name.endswith("down_proj"):
                layer = replace_linear(model, name)
                layer.put(2 * layer.weight)
        run.journal.add("note", self.key(), "doubled")


class Shifted(LayerPass):
    """Something is added to every weight."""

    paper: ClassVar[str] = "https://example.org/shifted"
    amount: float = 0.25

    def solve(self, weight, seen, layer):
        layer.log("note", "shifted", amount=self.amount)
        return Solution(weight + self.amount)


class Negated(BlockPass):
    """The sign of one projection of each block."""

    paper: ClassVar[str] = "https://example.org/negated"

    def solve_block(self, block, inputs, log):
        CompressedLinear.of(block.mlp.up_proj).weight.neg_()


ONLY = ("model.layers.0.mlp.down_proj", "model.layers.2.mlp.down_proj")
OWN = {
    "model": ([Doubled()], lambda w: 2 * w),
    "model, layer": ([Doubled(), Shifted(targets=ONLY)], lambda w: 2 * w + 0.25),
    "layer, model, layer": ([Shifted(targets=ONLY), Doubled(), Shifted(targets=ONLY)], lambda w: 2 * (w + 0.25) + 0.25),
}


@pytest.mark.parametrize("chain", OWN)
def test_passes_of_ones_own_run_through_apply_and_run(chain, recipe, ids, tmp_path):
    steps, wanted = OWN[chain]
    original = weights_of(fresh())
    in_memory = weights_of(compress.apply(fresh(), steps, ids))
    result = compress.run(recipe(*steps, save={"format": "dense"}), tmp_path / "out")
    shipped = weights_of(compress.load(result.folder)[0])
    for found in (in_memory, shipped):
        for name in ONLY:
            assert torch.allclose(found[f"{name}.weight"], wanted(original[f"{name}.weight"]), atol=1e-6)
        assert torch.equal(found["model.layers.1.mlp.up_proj.weight"], original["model.layers.1.mlp.up_proj.weight"])
    notes = [entry.message for entry in result.journal.entries if entry.kind == "note"]
    assert ("shifted" in notes) == ("layer" in chain)
    assert ("doubled" in notes) == ("model" in chain)


def test_a_pass_of_ones_own_is_called_by_its_class(ids):
    assert Recipe(model="m", passes=[Doubled(), Masking()]).labels() == ["passes[0] doubled", "passes[1] masking"]
    with pytest.raises(TargetError, match=r"passes\[0\] shifted: targets pattern 'x' matches no linear"):
        compress.apply(fresh(), [Shifted(targets="x")], ids)


def test_a_block_pass_of_ones_own(ids):
    before, after = weights_of(fresh()), weights_of(compress.apply(fresh(), [Negated()], ids))
    assert differing(before, after) == [f"model.layers.{i}.mlp.up_proj.weight" for i in range(3)]
    assert torch.equal(after["model.layers.2.mlp.up_proj.weight"], -before["model.layers.2.mlp.up_proj.weight"])


def test_a_pass_without_its_verb_cannot_be_made():
    class Silent(LayerPass):
        """Nothing."""

        paper: ClassVar[str] = "https://example.org/silent"

    with pytest.raises(TypeError, match="abstract"):
        Silent()
