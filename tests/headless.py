"""Random models without a language-model head, tiny, of several architectures and of every kind."""

import copy

import torch
import transformers

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
DISTILLED = {
    "vocab_size": 64,
    "dim": 32,
    "hidden_dim": 48,
    "n_layers": 2,
    "n_heads": 4,
    "max_position_embeddings": 66,
    "pad_token_id": 0,
}
KINDS = {
    "encoder": ("BertModel", SIZES),
    "sentence encoder": ("MPNetModel", SIZES),
    "decoder without a head": ("LlamaModel", {**SIZES, "num_key_value_heads": 2}),
    "classes": ("DistilBertForSequenceClassification", {**DISTILLED, "num_labels": 5}),
    "labels": (
        "BertForSequenceClassification",
        {**SIZES, "num_labels": 3, "problem_type": "multi_label_classification"},
    ),
    "score": ("BertForSequenceClassification", {**SIZES, "num_labels": 1}),
    "tokens": ("RobertaForTokenClassification", {**SIZES, "num_labels": 4}),
    "spans": ("BertForQuestionAnswering", SIZES),
}
"""The class and the configuration of a model by name."""

_made: dict[str, transformers.PreTrainedModel] = {}


def headless(name: str, **changes) -> transformers.PreTrainedModel:
    """A model of `KINDS`; changes: of its configuration."""
    kind, config = KINDS[name]
    key = f"{name} {changes}"
    if key not in _made:
        torch.manual_seed(0)
        cls = getattr(transformers, kind)
        made = cls(cls.config_class(**{**config, **changes})).eval().requires_grad_(False)
        for parameter in made.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
        _made[key] = made
    return copy.deepcopy(_made[key])
