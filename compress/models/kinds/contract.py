"""`ModelKind`: the adapter of a kind of models, and what all kinds share to run a model and to read its answer.

An adapter is one file of this folder. It knows how a model of its kind is recognized, how token ids, a batch of
transformers or the line of a list become examples, what the targets of its loss are, and what two models are compared
by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
import transformers
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import Seq2SeqLMOutput

from compress.errors import CalibrationError
from compress.models.kinds.batch import IDS, IGNORED, MASK, Batch, Examples
from compress.models.structure.ends import vocabulary_size
from compress.models.terms import Compared

ANSWERS = (("logits",), ("start_logits", "end_logits"), ("last_hidden_state",))
"""The fields of an output that are the answer of a model; the first that an output has."""

SUPPORTED = (
    "supported are models that predict next, masked or target tokens, or transcripts of recordings, and without a "
    "language-model head encoders, sequence classifiers, token classifiers and models for extractive question answering"
)

SAMPLE_TOKENS = 4  # of a sample with which a model is checked


class LineReader(Protocol):
    """Makes examples of the lines of a list."""

    def example(self, line: Mapping[str, Any], place: str, length: int | None) -> Batch:
        """Return the example of a line.

        Args:
            line: columns of the line.
            place: place of the line, for messages.
            length: most target tokens of the example; None for all.

        Raises:
            CalibrationError: for a line that the model cannot read.
        """
        ...


@dataclass(frozen=True)
class Lists:
    """Lists of files, from which examples of a kind are read.

    Attributes:
        line: a line as a user writes it.
        column: column that names a file.
        plural: what the examples are called, in the plural.
        only: whether the kind reads nothing else, such as texts.
    """

    line: str
    column: str
    plural: str
    only: bool


@dataclass(frozen=True)
class ModelKind:
    """A kind of models: its inputs, its loss, and what is compared of two models.

    Attributes:
        name: what a model of it is or does, as messages say it.
        auto: transformers' auto class, by which it is recognized.
        task: the hub's name for its task.
        predicts: the predicted tokens, as reports name them.
        learns: whether there is a loss on the data alone.
        compared: what is compared by default.
        per_token: whether the answer has a row for every token; otherwise one for every sequence.
        texts: the texts of a sequence: 2 for a model with an encoder and a decoder, a recording and its transcript
            included.
        streams: whether a sequence is a part of a stream of text, not a text between special tokens.
        shift: places between the logits of a token and its own place in the sequence.
        masks: whether its targets are masked tokens.
        prompts: whether a model that generates answers prompts of text.
        media: what a model reads, in messages.
        processor: transformers' auto class of what prepares its inputs.
        lists: the lists of files that it reads; None if it reads texts alone.
    """

    name: ClassVar[str]
    auto: ClassVar[str]
    task: ClassVar[str]
    predicts: ClassVar[str]
    learns: ClassVar[bool] = True
    compared: ClassVar[Compared] = "tokens"
    per_token: ClassVar[bool] = True
    texts: ClassVar[int] = 1
    streams: ClassVar[bool] = False
    shift: ClassVar[int] = 0
    masks: ClassVar[bool] = False
    prompts: ClassVar[bool] = True
    media: ClassVar[str] = "token ids"
    processor: ClassVar[str] = "AutoTokenizer"
    lists: ClassVar[Lists | None] = None

    # Recognition

    def matches(self, model: nn.Module) -> bool:
        """Return whether a model is of this kind. Only its class, its configuration and its modules are read."""
        config = getattr(model, "config", None)
        if not isinstance(model, PreTrainedModel) or not isinstance(config, PretrainedConfig):
            return False
        return not getattr(config, "is_encoder_decoder", False) and listed(type(model), config, self.auto)

    def bound(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, seed: int) -> ModelKind:
        """Return the adapter with what it knows of a model and its tokenizer.

        Args:
            model: the model.
            tokenizer: its tokenizer.
            seed: of random choices.

        Raises:
            ModelError: without a token that the loss needs.
        """
        return self

    def unreadable(self, model: PreTrainedModel, arguments: Mapping[str, Any]) -> str | None:
        """Return why the inputs of this kind cannot be given to a model; None if they can.

        Args:
            model: the model.
            arguments: the parameters of its forward pass.
        """
        return unreadable_text(model, arguments)

    def features(self, model: PreTrainedModel) -> object | None:
        """Return the features that a model reads besides token ids, which two compared models share; None for none."""
        return None

    def compared_in(self, config: Any) -> Compared:
        """Return what is compared of models with this configuration."""
        return self.compared

    # Examples

    def examples(self, model: PreTrainedModel, texts: Sequence[Int[Tensor, "sequences length"]]) -> Examples:
        """Return the examples of token ids.

        Args:
            model: the model.
            texts: the texts of each sequence, `ModelKind.texts` of them.
        """
        return Examples.of_ids(texts[0])

    def of_ids(self, model: PreTrainedModel, ids: Int[Tensor, "sequences length"]) -> Examples:
        """Return the examples of rows of token ids, which are cut into the texts of a sequence."""
        return self.examples(model, ids.split(text_lengths(self.texts, ids.shape[1]), dim=1))

    def of_mapping(self, model: PreTrainedModel, mapping: Mapping[str, Any], place: str) -> Examples:
        """Return the examples in a batch as a data collator of transformers returns it.

        Args:
            model: the model.
            mapping: tensors by name.
            place: beginning of messages.

        Raises:
            CalibrationError: for tensors that are none of this kind.
        """
        raise CalibrationError(
            f"{place}: {type(model).__name__} {self.name}, and this is a mapping with "
            f'{", ".join(map(str, mapping)) or "nothing"}; give token ids, such as batch["{IDS}"]'
        )

    def check(self, model: PreTrainedModel, examples: Examples, places: Sequence[str]) -> None:
        """Check examples of lists.

        Args:
            model: the model.
            examples: the examples.
            places: place of each, for messages.

        Raises:
            CalibrationError: for examples that the model cannot read.
        """

    def reader(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, column: str, folder: Path, place: str
    ) -> LineReader:
        """Return the reader of the lines of a list.

        Args:
            model: the model.
            tokenizer: its tokenizer.
            column: column with the text.
            folder: folder of relative paths.
            place: beginning of messages.

        Raises:
            CalibrationError: for a model without the files of its processor.
        """
        raise NotImplementedError

    def samples(self, model: PreTrainedModel) -> list[Batch]:
        """Return sequences of the fewest tokens with which a model may run; at least one of them must."""
        return [self.probe(model, None, SAMPLE_TOKENS)]

    def probe(self, model: PreTrainedModel, sample: Batch | None, tokens: int) -> Batch:
        """Return the sequence on which passes without calibration prove their rewrites.

        Args:
            model: the model.
            sample: one of `samples`, with which the model runs.
            tokens: number of tokens.
        """
        return self.of_ids(model, torch.arange(tokens)[None] % vocabulary_size(model)).batch()

    # Sizes

    def stack_lengths(self, model: PreTrainedModel, length: int) -> list[int]:
        """Return the tokens of a sequence in each stack of blocks; of examples of lists, the most that may be."""
        return text_lengths(self.texts, length)

    def feature_bytes(self, model: PreTrainedModel, tokens: int) -> int:
        """Return the bytes of one example of a list, with so many target tokens; 0 for texts, which are small."""
        return 0

    # Loss

    def shown(self, examples: Examples, rows: Sequence[int]) -> Examples:
        """Return the examples as a model reads them in training, such as with masked tokens.

        Args:
            examples: the examples.
            rows: their numbers among all examples, on which random choices depend.
        """
        return examples

    def read(self, model: nn.Module, examples: Examples, rows: Sequence[int], **options: Any) -> Any:
        """Run a model on the inputs of some examples and return its output.

        Examples of several shapes take a forward pass for each. Then all logits, one example after the other, count as
        those of one sequence, so that no place is padding.

        Args:
            model: the model.
            examples: the examples.
            rows: their numbers among all examples.
            options: further arguments of the model.
        """
        shown = self.shown(examples, rows)
        groups = shown.by_shape(labels=False)
        equal = len({example.places for example in shown}) == 1
        if len(groups) == 1 and equal:
            return run_on(model, shown.batch(), **options)
        logits_by_row: dict[int, Tensor] = {}
        for group in groups:
            logits = run_on(model, shown[group].batch(), **options).logits
            logits_by_row |= {
                row: row_logits[: shown[row].places] for row, row_logits in zip(group, logits, strict=True)
            }
        parts = [logits_by_row[row] for row in range(len(shown))]
        return Seq2SeqLMOutput(logits=torch.stack(parts) if equal else torch.cat(parts)[None])  # pyright: ignore

    def labels(self, example: Batch) -> Int[Tensor, "sequences places"]:
        """Return the target token at each place of an example as it is shown; `IGNORED` where there is none."""
        assert example.labels is not None
        return example.labels

    def targets(self, examples: Examples, rows: Sequence[int]) -> Int[Tensor, "sequences places"]:
        """Return the target tokens of some examples for the logits of `read`; `IGNORED` where there is none."""
        labels = [self.labels(example) for example in self.shown(examples, rows)]
        return torch.cat(labels) if len({len(row[0]) for row in labels}) == 1 else torch.cat(labels, dim=1)

    def answers(
        self, logits: Float[Tensor, "sequences places vocabulary"], examples: Examples, rows: Sequence[int]
    ) -> tuple[Float[Tensor, "targets vocabulary"], Int[Tensor, " targets"]]:
        """Return the logits at the places with a target, and the targets: views if these are one run of a sequence."""
        targets = self.targets(examples, rows)
        is_target = targets != IGNORED
        if len(targets) == 1 and bool(is_target.any()):
            first, last = is_target[0].nonzero()[[0, -1], 0].tolist()
            if bool(is_target[0, first : last + 1].all()):  # a copy of all logits of a text may be gigabytes
                return logits[0, first : last + 1], targets[0, first : last + 1]
        return logits[is_target], targets[is_target]

    def predictions(self, output: Any) -> Float[Tensor, "sequences places cells"] | None:
        """Return the logits of all distributions in an output of the model; None if it has none."""
        return output.logits

    def values(self, output: Any) -> Float[Tensor, "*sequences width"]:
        """Return the values of an answer without distributions: hidden states of tokens, or the scores of a batch."""
        return required_answer(output)

    def with_masks(self, seed: int, probability: float | None) -> ModelKind:
        """Return the adapter with other masks; the same if it masks nothing.

        Args:
            seed: of the masks.
            probability: fraction of masked tokens; None for the usual one.
        """
        return self


def listed(kind: type, config: PretrainedConfig | None, auto: str) -> bool:
    """Return whether transformers, or the configuration of a model with its own code, names a class for `auto`."""
    auto_class: Any = getattr(transformers, auto)
    class_name = own_classes(config).get(auto, "").rpartition(".")[2]
    return kind.__name__ == class_name or issubclass(kind, auto_class._model_mapping.get(type(config), ()))


def own_classes(config: PretrainedConfig | None) -> dict[str, str]:
    """Return the model classes of a model's own code by auto class, such as 'modeling_my.MyForCausalLM'."""
    names: Any = getattr(config, "auto_map", None) or {}
    references = {auto: name for auto, name in names.items() if auto.startswith("AutoModel") and isinstance(name, str)}
    return dict(sorted(references.items(), key=lambda item: item[0] != "AutoModelForCausalLM"))


def is_masked(kind: type, config: PretrainedConfig | None) -> bool:
    """Return whether transformers lists a class among the masked language models and not among the causal ones."""
    masked, causal = (listed(kind, config, auto) for auto in ("AutoModelForMaskedLM", "AutoModelForCausalLM"))
    return masked and not causal and not getattr(config, "is_encoder_decoder", False)


def unreadable_text(model: PreTrainedModel, arguments: Mapping[str, Any]) -> str | None:
    """Return why token ids cannot be given to a model; None if they can."""
    if IDS not in arguments:
        return f"does not take token ids ({IDS}); {SUPPORTED}"
    try:
        model.get_input_embeddings()
    except NotImplementedError:
        return f"has no one table of token embeddings; {SUPPORTED}"
    return None


def text_lengths(texts: int, length: int) -> list[int]:
    """Return the lengths of the texts in a sequence; the first ones are longer where they cannot be equal."""
    return [length // texts + (i < length % texts) for i in range(texts)]


def cut_padding(
    features: Sequence[Tensor], mask: Any, place: str, axis: int | None, noun: str = "features"
) -> Sequence[Tensor]:
    """Return the features of each example without the padding after them.

    Args:
        features: features of each example, of equal shapes.
        mask: ones for the features of each example, and zeros for its padding; None if nothing is padded.
        place: beginning of messages.
        axis: axis of an example's features that the mask is of; None: padding is read, too.
        noun: what the mask is of, in messages.

    Raises:
        CalibrationError: for a mask of another shape, or one that does not end with its zeros.
    """
    if mask is None or axis is None:
        return list(features)
    ones = torch.as_tensor(mask)
    shape = [len(features), features[0].shape[axis]]
    if list(ones.shape) != shape:
        raise CalibrationError(
            f"{place}: {MASK} has the shape {list(ones.shape)}, but the {noun} have {shape} positions; write one "
            "number for each of them"
        )
    counts = ones.bool().sum(1).tolist()
    for i, (row, count) in enumerate(zip(ones.bool(), counts, strict=True)):
        if not count or not bool(row[:count].all()):
            raise CalibrationError(
                f"{place}: {MASK}[{i}] is not ones and then zeros; write padding after the end of each example"
            )
    return [feature.narrow(axis, 0, count) for feature, count in zip(features, counts, strict=True)]


def transcript_of(labels: Int[Tensor, " longest"], place: str) -> Int[Tensor, " tokens"]:
    """Return labels without `IGNORED` after their end. Raises CalibrationError for others than token ids."""
    tokens = labels[: int((labels != IGNORED).sum())]
    if not len(tokens) or int(tokens.min()) < 0:
        reason = "has -100, or another negative number, before its end" if len(tokens) else "is no transcript"
        raise CalibrationError(f"{place} {reason}; write token ids, and -100 only after them")
    return tokens


def text_config(config: Any) -> Any:
    """Return the part of a configuration that describes the language model; the configuration itself without parts."""
    return config.get_text_config() if isinstance(config, PretrainedConfig) else config


def without_cache(model: nn.Module) -> dict[str, Any]:
    """Return the argument that turns a model's cache off; empty if its text configuration has no `use_cache`."""
    config = getattr(model, "config", None)
    return {"use_cache": False} if config is None or hasattr(text_config(config), "use_cache") else {}


def with_cache(model: nn.Module) -> dict[str, Any]:
    """Return the argument that turns a model's cache on; empty if its text configuration has no `use_cache`.

    Without data (device meta) some models run with a cache alone: otherwise they read the positions of packed texts.
    """
    return {"use_cache": True} if without_cache(model) else {}


def run_on(model: nn.Module, batch: Batch, **options: Any) -> Any:
    """Run a model on a batch, without a cache; features are cast to the dtype of its weights.

    Args:
        model: also as several processes that train it hold it.
        batch: its inputs.
        options: further arguments of the model.
    """
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    inputs = dict(batch.inputs)
    if any(tensor.is_floating_point() for tensor in inputs.values()):
        dtype = next(parameter.dtype for parameter in inner.parameters() if parameter.is_floating_point())
        inputs = {name: t.to(dtype) if t.is_floating_point() else t for name, t in inputs.items()}
    return model(**inputs, **without_cache(inner), **options)


def answer_of(output: Any) -> Tensor | None:
    """Return the answer in the output of a model: logits, [sequences, length, 2] for the two ends of a span, or states.

    None for an output without any of `ANSWERS`.
    """
    for names in ANSWERS:
        values: list[Any] = [getattr(output, name, None) for name in names]
        if all(isinstance(value, Tensor) for value in values):
            return values[0] if len(values) == 1 else torch.stack(values, dim=-1)
    return None


def required_answer(output: Any) -> Tensor:
    """Return the answer in the output of a model that was checked before."""
    answer = answer_of(output)
    assert answer is not None  # a model is checked before it is used
    return answer


def _of_labels(answer: Tensor) -> Tensor:
    """softmax over (x, 0) is the sigmoid of x, the probability of a label for itself."""
    return torch.stack([answer, torch.zeros_like(answer)], dim=-1).flatten(1, -2)


DISTRIBUTIONS: dict[Compared, Callable[[Tensor], Tensor | None]] = {
    "tokens": lambda answer: answer,
    "classes": lambda answer: answer if answer.dim() == 3 else answer[:, None],
    "labels": _of_labels,
    "spans": lambda answer: answer.transpose(1, 2),  # a distribution over the positions for each end
    "score": lambda answer: None,
    "embeddings": lambda answer: None,
}
"""The logits [sequences, places, cells] of the distributions in an answer; None for an answer without probabilities."""
