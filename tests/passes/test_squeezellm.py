"""SqueezeLLM: gradients by hand, weights that matter are nearer to their entries, weights apart, and the checkpoint."""

import pytest
import torch
from draws import random
from tolerances import LOGITS
from transformers import AutoModelForCausalLM

import compress
from compress.errors import TargetError
from compress.layers.linear import CompressedLinear, linears
from compress.layers.parts.codebook import CodebookPart
from compress.layers.parts.outliers import OutliersPart
from compress.models.kinds.batch import Examples
from compress.passes.contract.options import OptionError
from compress.passes.quantize.squeezellm import SqueezeLLM
from compress.train.fisher import fisher
from compress.train.objective import LanguageLoss
from compress.train.student import trainable


def dense(parts):
    return sum(part.dense(torch.float32) for part in parts)


@pytest.fixture
def model(pico):
    return AutoModelForCausalLM.from_pretrained(pico, dtype="float32").eval()


def test_the_fisher_information_is_the_mean_of_squared_gradients(model, ids):
    rows, name = ids(3, 12), "model.layers.1.mlp.up_proj"
    wanted = torch.zeros_like(model.get_submodule(name).weight)
    for row in rows:
        model.zero_grad()
        model(input_ids=row[None], labels=row[None]).loss.backward()
        wanted += model.get_submodule(name).weight.grad.square() / len(rows)
    model.zero_grad()
    told = []
    with trainable(model, ("weights",), lambda _: True, torch.float32, "here") as student:
        found = fisher(student, LanguageLoss(), Examples.of_ids(rows), "here", told.append)
    torch.testing.assert_close(found[name], wanted, rtol=1e-3, atol=1e-12)
    inside = {n for n in linears(model) if n.startswith("model.layers.")}
    assert set(found) == inside and told == [1, 2, 3]
    assert all(p.grad is None for p in model.parameters())


def test_sensitive_weights_are_nearer_to_their_entries(layer_of):
    weight, sensitivity = random(4, 200), random(4, 200, seed=1).square() + 1e-3
    options = {"bits": 3, "outliers": 0, "sensitive": 0}
    own, plain = (
        (dense(SqueezeLLM(**options).rounded(weight, given, layer_of())) - weight).square()
        for given in (sensitivity, None)
    )
    assert float((own * sensitivity).sum()) < 0.9 * float((plain * sensitivity).sum())
    assert float(own.sum()) > float(plain.sum())


def test_the_largest_and_the_most_sensitive_weights_are_apart(layer_of):
    weight, sensitivity = random(10, 100), torch.ones(10, 100)
    sensitivity[3, 7] = 1e3
    step = SqueezeLLM(bits=3, outliers=0.002, sensitive=0.001, outlier_dtype="float32")
    codebook, apart = step.rounded(weight, sensitivity, layer_of())
    assert isinstance(codebook, CodebookPart) and isinstance(apart, OutliersPart)
    kept = apart.dense(torch.float32) != 0
    assert kept.sum() == 3 and kept[3, 7] and kept.view(-1)[weight.abs().flatten().topk(2).indices].all()
    torch.testing.assert_close(dense([codebook, apart])[kept], weight[kept])
    assert codebook.books.shape == (10, 1, 8, 1)


def test_pruned_weights_stay_zero(layer_of):
    weight = random(8, 64)
    mask = weight.abs() > 0.6
    parts = SqueezeLLM(bits=2).rounded(weight * mask, random(8, 64, seed=2).square(), layer_of(mask))
    assert not bool(dense(parts)[~mask].any())


def test_a_row_that_no_gradient_reaches_counts_all_its_weights(layer_of):
    weight = random(2, 64)
    sensitivity = torch.stack([torch.zeros(64), torch.ones(64)])
    step = SqueezeLLM(bits=2, outliers=0, sensitive=0)
    torch.testing.assert_close(
        dense(step.rounded(weight, sensitivity, layer_of())), dense(step.rounded(weight, None, layer_of()))
    )


@pytest.mark.parametrize("options", [{}, {"sensitivity": "none"}, {"outliers": 0, "sensitive": 0, "bits": 3}])
def test_a_run_and_its_checkpoint(recipe, tmp_path, options):
    result = compress.run(recipe(SqueezeLLM(**options), save={"format": "native"}), tmp_path / "out", progress=False)
    assert result.report["verified"]["own"] <= LOGITS
    loaded, _ = compress.load(tmp_path / "out")
    layers = [layer for layer in linears(loaded).values() if isinstance(layer, CompressedLinear)]
    assert layers and all(isinstance(layer.all_parts[0], CodebookPart) for layer in layers)


def test_bad_input(recipe, model):
    with pytest.raises(OptionError, match="bits"):
        SqueezeLLM(bits=0)
    with pytest.raises(OptionError, match="sensitivity: none"):
        SqueezeLLM(sensitivity="none", sequences=4)
    with pytest.raises(TargetError, match="a dictionary of 256 values is larger than its rows of"):
        compress.plan(recipe(SqueezeLLM(bits=8)))
    with pytest.raises(TargetError, match="format: native"):
        compress.plan(recipe(SqueezeLLM(), save={"format": "compressed-tensors"}))
