"""KL divergence on kept tokens against the KL over the whole vocabulary."""

import subprocess
import sys

import pytest
import torch

from compress.evaluation.divergence import SAMPLES, SampledDistribution, summarized


def logits(seed, rows=64, vocabulary=200, scale=3.0):
    return scale * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


def full_kl(base, other):
    base, other = base.double().log_softmax(-1), other.double().log_softmax(-1)
    return (base.exp() * (base - other)).sum(-1)


def test_with_all_tokens_it_is_the_whole_divergence():
    base, other = logits(0), logits(0) + 0.3 * logits(1)
    found, _ = SampledDistribution.of(base, 200).divergence(other)
    # only the rounding of the base's log-probabilities to 16 bits is left: 2^-11 relative, times |log p - log q|
    assert torch.allclose(found, full_kl(base, other), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("top_k", [1, 8, 64])
def test_with_some_tokens_it_is_an_unbiased_estimate(top_k):
    base = logits(0, rows=2000)
    other = base + 0.5 * logits(1, rows=2000)
    found, whole = SampledDistribution.of(base, top_k).divergence(other)[0], full_kl(base, other)
    error = (found - whole).std() / len(whole) ** 0.5
    assert abs(float((found - whole).mean())) < 4 * float(error) + 1e-3  # 1e-3: log-probabilities have 16 bits
    assert float(error) < 0.02 * float(whole.mean())


def test_more_tokens_leave_less_to_chance():
    base = logits(0)
    other = base + 0.5 * logits(1)
    spread = [
        float((SampledDistribution.of(base, k).divergence(other)[0] - full_kl(base, other)).std()) for k in (1, 16, 128)
    ]
    assert spread == sorted(spread, reverse=True)


def test_a_model_does_not_diverge_from_itself():
    base = logits(0)
    found, same = SampledDistribution.of(base, 16).divergence(base)
    assert float(found.abs().max()) < 5e-3 and abs(float(found.mean())) < 5e-4 and bool(same.all())


def test_agreement_is_that_of_the_first_tokens():
    base = torch.tensor([[5.0, 1.0, 0.0], [0.0, 4.0, 1.0]])
    _, same = SampledDistribution.of(base, 2).divergence(torch.tensor([[3.0, 2.0, 2.5], [3.0, 2.0, 2.5]]))
    assert same.tolist() == [True, False]


@pytest.mark.parametrize("vocabulary", [100, 70000])
def test_kept_tokens_come_back_from_disk(vocabulary, tmp_path):
    kept = SampledDistribution.of(logits(2, rows=3, vocabulary=vocabulary), 8)
    kept.save(tmp_path / "kept.safetensors")
    again = SampledDistribution.load(tmp_path / "kept.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))
    ids = 2 if vocabulary < 1 << 16 else 4
    tensors = 3 * (8 + SAMPLES) * (ids + 2) + 3 * 2
    assert tensors <= (tmp_path / "kept.safetensors").stat().st_size < tensors + 600


def test_chunks_are_kept_as_the_rows_of_each():
    base = logits(3, rows=10)
    found = SampledDistribution.in_chunks(base, 8, rows=4)
    wanted = [SampledDistribution.of(part, 8, seed=i) for i, part in enumerate(base.split(4))]
    assert all(torch.equal(a, torch.cat(parts)) for a, parts in zip(found, zip(*wanted, strict=True), strict=True))


ALLOCATED = """
import torch
from compress.passes.contract.memory import PeakMemory
from compress.evaluation.divergence import SampledDistribution
base = torch.randn(1, 1 << 18).expand(192, -1)
with PeakMemory() as nothing:
    pass
with PeakMemory() as found:
    SampledDistribution.in_chunks(base, 64, rows=16)
print(found.peak_bytes - nothing.peak_bytes)
"""


def test_many_chunks_take_the_memory_of_one():
    chunk_bytes = 16 * (1 << 18) * 4
    command = [sys.executable, "-c", ALLOCATED]  # the allocator of a new process, as in a run
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert int(done.stdout) < 16 * chunk_bytes  # small tensors that stay between those of a chunk: 24


def test_certain_predictions_stay_finite():
    base = torch.full((1, 50), -1e4)
    base[0, 3] = 1e4
    found, same = SampledDistribution.of(base, 50).divergence(base)
    assert float(found) == pytest.approx(0, abs=1e-3) and bool(same)


def test_the_summary_by_hand():
    windows = [([0.1, 0.3], [1, 0], [1, 2]), ([0.2, 0.6], [1, 1], [1, 3])]
    found = summarized(windows, 8)
    assert found.mean == pytest.approx(0.3) and found.median == pytest.approx(0.25)
    assert found.stderr == pytest.approx(0.1) and found.agreement == 0.75
    assert found.p99 == pytest.approx(0.3 + 0.97 * 0.3)
    assert [(row.first, row.last) for row in found.by_position] == [(1, 1), (2, 3)]
    assert [row.kl for row in found.by_position] == pytest.approx([0.15, 0.45])
    assert [row.agreement for row in found.by_position] == [1.0, 0.5]
