"""AQLM: better than grids of as many bits, learned entries, a checkpoint as planned, and what it refuses."""

import copy

import pytest
import torch
from draws import correlated, random, seen_of
from tolerances import LOGITS
from transformers import AutoModelForCausalLM

import compress
from compress.errors import RecipeError, TargetError
from compress.layers.linear import linears
from compress.layers.parts.codebook import CodebookPart
from compress.passes.contract.observers import UnitGram
from compress.passes.contract.options import OptionError
from compress.passes.quantize.aqlm import AQLM
from compress.passes.quantize.gptq import GPTQ
from compress.train.linear import scaled_product


@pytest.fixture
def rows():
    return correlated(600, 64)


def error(weight, found, rows):
    return float(((found - weight) @ rows.T).norm() / (weight @ rows.T).norm())


@pytest.mark.parametrize("options", [{}, {"length": 8, "books": 2}])
def test_two_bits_are_better_than_gptq_on_a_grid(layer_of, rows, options):
    weight = random(512, 64)
    [part] = AQLM(normalize_tokens=False, **options).solve(weight, seen_of(rows), layer_of()).weight
    grid = GPTQ(weights="int2", group_size="channel", normalize_tokens=False)
    rounded = grid.solve(weight, seen_of(rows), layer_of()).weight.dense()
    assert part.scheme.bits * part.scheme.count / part.scheme.length == 2
    assert error(weight, part.dense(torch.float32), rows) < 0.9 * error(weight, rounded, rows)


def test_turns_are_better_than_the_start_also_in_the_storage_dtype(layer_of, rows):
    weight, seen = random(256, 64), seen_of(rows, UnitGram)
    found = {}
    for rounds in (0, 8):
        [part] = AQLM(rounds=rounds).solve(weight, seen, layer_of(storage=torch.bfloat16)).weight
        assert part.books.dtype == part.scale.dtype == torch.bfloat16
        found[rounds] = error(weight, part.dense(torch.float32), torch.nn.functional.normalize(rows))
    assert found[8] < 0.95 * found[0]


def test_it_depends_on_its_seed_alone(layer_of, rows):
    weight = random(64, 64)
    parts = [AQLM(seed=s).solve(weight, seen_of(rows, UnitGram), layer_of()).weight[0] for s in (0, 0, 1)]
    assert parts[0].sha256() == parts[1].sha256() != parts[2].sha256()


@pytest.mark.parametrize("per", ["tensor", "channel"])
def test_gradients_of_the_factors_of_entries_are_those_of_autograd(per):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 4, (6, 5, 1), generator=generator)
    books = random(6 if per == "channel" else 1, 1, 4, 2)
    part = CodebookPart.of(codes, books, random(6, seed=1))
    x, factor = random(3, 10, seed=2), (1 + 0.1 * random(*books.shape, seed=3)).requires_grad_(True)
    scaled_product(x, factor, part).square().sum().backward()
    other = factor.detach().clone().requires_grad_(True)
    table = (books * other)[:, 0].expand(6, 4, 2)
    weight = table.gather(1, codes.expand(-1, -1, 2)).flatten(1) * part.scale[:, None]
    (x @ weight.T).square().sum().backward()
    torch.testing.assert_close(factor.grad, other.grad)
    plain = part.dense(torch.float32)
    torch.testing.assert_close(scaled_product(x, factor, part, plain), scaled_product(x, factor, part))


def test_entries_are_learned_for_the_whole_model(pico, pico_ids):
    model = AutoModelForCausalLM.from_pretrained(pico, dtype="float32").eval()
    small = compress.apply(copy.deepcopy(model), AQLM(bits=4, rounds=2), pico_ids)
    before = {name: layer.all_parts[0] for name, layer in linears(small).items() if name.startswith("model.layers.")}
    compress.apply(
        small, compress.Distill(train=["scales"], steps=6, learning_rate=0.01, hold_out=0), pico_ids, teacher=model
    )
    for name, part in before.items():
        after = small.get_submodule(name).all_parts[0]
        assert torch.equal(part.words, after.words) and not torch.equal(part.books, after.books)
        assert torch.equal(part.books.sign(), after.books.sign())


@pytest.mark.parametrize("options", [{}, {"bits": 4, "length": 2, "books": 2, "rounds": 1}])
def test_a_run_and_its_checkpoint(recipe, tmp_path, options):
    result = compress.run(recipe(AQLM(**options), save={"format": "native"}), tmp_path / "out", progress=False)
    assert result.report["verified"]["own"] <= LOGITS
    loaded, _ = compress.load(tmp_path / "out")
    parts = [layer.all_parts[0] for name, layer in linears(loaded).items() if name.startswith("model.layers.")]
    assert all(isinstance(part, CodebookPart) and part.scale is not None for part in parts)


def test_bad_input(recipe, one_block):
    with pytest.raises(OptionError, match="steps"):
        AQLM(rounds=0, steps=4)
    with pytest.raises(OptionError, match="length"):
        AQLM(length=1)
    with pytest.raises(RecipeError, match="put .* before|mask"):
        compress.plan(recipe(compress.Wanda(), AQLM(), save={"format": "native"}))
    with pytest.raises(TargetError, match="runs of 7 weights do not divide its"):
        compress.plan(recipe(AQLM(length=7), save={"format": "native"}))
    with pytest.raises(TargetError, match="a codebook of 256 entries is larger than its"):
        compress.plan(recipe(AQLM(length=16), model=one_block("llama"), save={"format": "native"}))
