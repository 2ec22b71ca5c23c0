"""Runs on a simulated GPU: no operation mixes the devices, and the files are those of the CPU.

Where C++ adds on the CPU, which a GPU does not, near ties are decided otherwise.
"""

import pytest
import torch
from safetensors.torch import load_file
from simulated_gpu import GPU, simulated

import compress
from compress import AWQ, GPTQ, RTN, Distill, LLMInt8, SmoothQuant, SparseGPT, Wanda
from compress.native import gpus

PASSES = {
    "rtn": [RTN(weights="int4", group_size=32)],
    "gptq": [GPTQ(weights="int4", group_size=32)],
    "awq": [AWQ(weights="int4", group_size=32), RTN(weights="int4", group_size=32)],
    "smoothquant": [SmoothQuant(), RTN(weights="int8", group_size="channel", activations="int8")],
    "wanda": [Wanda(sparsity=0.5)],
    "sparsegpt": [SparseGPT(pattern="2:4")],
    "distill": [RTN(weights="int4", group_size=32), Distill(train=["scales", "norms"], steps=2)],
}
ALIKE = {"rtn": 1.0, "gptq": 0.85, "awq": 0.85}
"""The share of equal words of codes. Other passes compute floats, which differ in their last bits: a GPU divides by a
Python number through its reciprocal, and does not add in C++."""
APART = {"rtn": 1e-6, "gptq": 0.3, "awq": 0.3}
"""The largest relative difference of a tensor of floats. A scale that is found among candidates may be the next one."""


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch):
    """Triton's programs read memory of a real device."""
    monkeypatch.setenv("COMPRESS_KERNELS", "none")
    gpus.installed.cache_clear()
    yield
    monkeypatch.undo()
    gpus.installed.cache_clear()


def tensors(folder):
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


@pytest.mark.few(2, slow=6)
@pytest.mark.parametrize("form", ["native", "compressed-tensors"])
@pytest.mark.parametrize("name", PASSES)
def test_a_run_on_a_gpu_writes_what_one_on_the_cpu_writes(recipe, name, form, tmp_path, monkeypatch):
    asked = recipe(*PASSES[name], save={"format": form})
    host = compress.run(asked, tmp_path / "cpu", progress=False)
    with simulated(monkeypatch):
        device = compress.run(asked.model_copy(update={"device": "cuda"}), tmp_path / "gpu", progress=False)
        again = compress.run(asked.model_copy(update={"device": "cuda"}), tmp_path / "gpu", progress=False)
        model, _ = compress.load(tmp_path / "gpu", device="cuda")
        assert model(torch.arange(10, device="cuda")[None]).logits.device == GPU
    assert device.report["reproduce"]["device"] == "cuda"
    assert again.report["perplexity"] == device.report["perplexity"]
    wanted, found = tensors(tmp_path / "cpu"), tensors(tmp_path / "gpu")
    assert wanted.keys() == found.keys()
    same = [
        (tensor.view(torch.uint8) == found[key].view(torch.uint8)).flatten()
        for key, tensor in wanted.items()
        if not tensor.is_floating_point()
    ]
    assert not same or torch.cat(same).double().mean() >= ALIKE.get(name, 0.98)
    apart = [
        (t.double() - found[key].double()).norm() / t.double().norm()
        for key, t in wanted.items()
        if t.is_floating_point()
    ]
    assert max(apart) <= APART.get(name, 0.1)
    assert device.report["size"] == host.report["size"]
    losses = [run.report["perplexity"][0]["compressed"]["loss"] for run in (host, device)]
    assert losses[1] == pytest.approx(losses[0], abs=0.02)


def test_scales_that_are_multiplied_in_a_file_are_read_back(recipe, tmp_path, monkeypatch):
    """SCB of bitsandbytes is 127 times the scale."""
    asked = recipe(LLMInt8(), save={"format": "bitsandbytes"}, eval=None, device="cuda")
    with simulated(monkeypatch):
        compress.run(asked, tmp_path, progress=False)


def test_a_run_of_two_segments_is_resumed_on_a_gpu(recipe, tmp_path, monkeypatch):
    asked = recipe(Wanda(sparsity=0.5, repair=0), RTN(weights="int4", group_size=32), eval=None, device="cuda")
    with simulated(monkeypatch):
        compress.run(asked, tmp_path, progress=False)
        before = tensors(tmp_path)
        (sorted(tmp_path.glob("*.safetensors"))[1]).unlink()
        compress.run(asked, tmp_path, progress=False)
    assert all(torch.equal(tensor, before[key]) for key, tensor in tensors(tmp_path).items())


def test_the_simulation_raises_as_a_gpu_does(monkeypatch):
    with simulated(monkeypatch):
        x, y = torch.ones(3, device="cuda"), torch.ones(3)
        assert x.device == GPU and (x + 1).is_cuda and x[1:].device == GPU and not y.is_cuda
        assert torch.zeros_like(x).device == GPU and (x * torch.tensor(2.0)).device == GPU
        assert x.cpu().device.type == "cpu" and y.to(x).device == GPU and y.device.type == "cpu"
        assert x[torch.tensor([0])].device == GPU
        quotient = torch.full((1,), 5.0, device="cuda") / 127
        assert quotient.is_cuda and quotient.cpu() == torch.tensor(5.0) * (1 / torch.tensor(127.0))
        mistakes = [
            lambda: x + y,
            lambda: torch.equal(x, y),
            lambda: y[torch.zeros(1, dtype=torch.long, device="cuda")],
            lambda: torch.cat([x, y]),
            lambda: torch.randn(3, device="cuda", generator=torch.Generator()),
            lambda: x.uniform_(generator=torch.Generator()),
        ]
        for mistake in mistakes:
            with pytest.raises(RuntimeError):
                mistake()
        with pytest.raises(TypeError):
            x.numpy()
        torch.randn(3, device="cuda", generator=torch.Generator(device="cuda"))
