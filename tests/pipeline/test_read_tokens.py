"""A run reads the calibration text as far as its passes need it."""

import pytest
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import compress
from compress.passes.contract.passes import ERROR_TOKENS


@pytest.mark.parametrize(
    ("step", "tokens"),
    [(compress.RTN(weights="int4", group_size=32), ERROR_TOKENS), (compress.Wanda(sparsity=0.5), 3 * 192)],
    ids=["without data", "calibrated"],
)
def test_a_run_without_data_reads_a_part_of_one_sequence(step, tokens, recipe, tmp_path, monkeypatch):
    read, forward = [], LlamaDecoderLayer.forward

    def counted(self, hidden_states, *args, **kwargs):
        if self.self_attn.layer_idx == 0:
            read.append(hidden_states.shape[:2].numel())
        return forward(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", counted)
    calibration = compress.Calibration(source="embedded", sequences=3, length=192, batch=3)
    compress.run(recipe(step, calibration=calibration, eval=None), tmp_path / "out", progress=False)
    assert max(read) == tokens
