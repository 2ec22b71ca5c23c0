"""Token ids as batches."""

from compress.models.kinds.batch import Batch
from compress.models.kinds.kinds import adapter_of


def batch_of(ids, model=None):
    """The batch of rows of token ids, of one text each or as a model reads them."""
    return Batch({"input_ids": ids}) if model is None else adapter_of(model).of_ids(model, ids).batch()


def ids_of(examples):
    """The token ids of examples of one text, [sequences, length]."""
    return examples.batch().inputs["input_ids"]
