"""Report: the typed content of one report.json.

The fields below describe the run and its checkpoint. Every evaluator adds one key of its own (`Report.evaluations`),
whose value has the `result_type` of that evaluator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, create_model, model_validator
from typing_extensions import Self

from compress.data.ids import TextUse
from compress.evaluate import EVALUATORS
from compress.evaluate.base import Record
from compress.numerics.histogram import LayerHistograms
from compress.recipe.sensitivities import Sensitivities


class ModelIdentity(Record):
    """The base model: where it comes from, its class, the digest of its files, and its commit if the hub has it."""

    source: str
    class_name: str = Field(alias="class")
    fingerprint: str
    commit: str | None = None


class Sizes(Record):
    """Bytes of the dense model, of the checkpoint's tensors and of its weight files; number of layers that passes
    worked on, their weights, and their bytes and bits per weight in the checkpoint.
    """

    dense_bytes: int
    tensor_bytes: int
    checkpoint_bytes: int
    compressed_layers: int
    compressed_weights: int
    compressed_bytes: int
    bits_per_weight: float


class LayerRow(Record):
    """The result of one pass on one layer.

    error: ||(W' - W) X|| / ||W X|| on sampled inputs, None where no token reached the layer. sparsity: share of zeros
    afterwards. asked, due: of a pruning pass, the sparsity asked of the layer, and in whole units of the pattern.
    histograms: of weights and inputs before and after the pass, for the layers of each block with the largest errors.
    """

    layer: str
    by: str
    error: float | None
    sparsity: float
    asked: float | None = None
    due: float | None = None
    histograms: LayerHistograms | None = None


class Cost(Record):
    """Time of a phase of the run, peak memory of the host, and of the accelerator: 0 where none was used."""

    seconds: float
    peak_bytes: int
    device_bytes: int = 0


class Reading(Record):
    """The time in which the run waited for the disk to read weights of the uncompressed model, and their bytes."""

    seconds: float
    size_bytes: int


class HeldOut(Record):
    """The best loss on held-out sequences, and the training step that it belongs to."""

    step: int
    held_out: float


class Training(Record):
    """A pass that trained: mean loss of the first and the last quarter of its steps, steps done of all steps, number of
    trained parameters by kind, seconds, indices of held-out sequences, best held-out loss, and the values of each step.
    """

    first_loss: float
    last_loss: float
    steps: int
    of: int
    trained: dict[str, int]
    seconds: float
    held_out: list[int]
    best: HeldOut | None
    curve: list[dict[str, int | float]]


class Predicted(Record):
    """The prediction of the plan: bytes of all tensors, and peak memory."""

    tensor_bytes: int
    memory_bytes: int


class Verification(Record):
    """layers: compressed layers that were read back bit for bit. own, transformers: largest absolute difference of
    logits between the computed model and the one read by compress.load, by transformers. skipped: why transformers did
    not read it.
    """

    layers: int
    own: float
    transformers: float | None
    skipped: str | None


class JournalEntry(Record):
    """One `Entry` of the run's journal."""

    kind: str
    where: str
    message: str
    figures: dict[str, Any]


class Journal(Record):
    """The entries of the run's journal, and their number by kind."""

    counts: dict[str, int]
    entries: list[JournalEntry]


class Reproduction(Record):
    """Inputs of the bytes: the resolved recipe, digests of run and calibration data, dtypes, machine, versions.

    code: sha256 of the source of each pass by its key, and of this package; 'unknown' where there is no source.
    texts: those read for calibration and evaluation. packages: version of each, None where it is not installed.
    """

    recipe: dict[str, Any]
    fingerprint: str
    code: dict[str, str] = Field(default_factory=dict)
    calibration_sha256: str
    texts: list[TextUse] = []
    compute_dtype: str
    storage_dtype: str
    device: str
    threads: int
    python: str
    platform: str
    packages: dict[str, str | None]


class Report(BaseModel):
    """One report.json.

    compress: version of this package. training: by the label of the pass. costs: by phase. files: sha256 of each file
    of the checkpoint. checkpoint_sha256: one digest of all of them. masked: linears with pruned weights, by full name.
    sensitivity: of the base model, if its folder holds a file of `compress sensitivity`.
    reading: of weights from the disk.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    compress: str
    model: ModelIdentity
    size: Sizes
    layers: list[LayerRow]
    costs: dict[str, Cost]
    training: dict[str, Training]
    predicted: Predicted
    verified: Verification
    journal: Journal
    reproduce: Reproduction
    files: dict[str, str]
    checkpoint_sha256: str
    masked: list[str] = []
    sensitivity: Sensitivities | None = None
    reading: Reading | None = None

    @model_validator(mode="after")
    def _typed(self) -> Self:
        """Give the results of known evaluators their types."""
        for key, value in self.evaluations.items():
            if key in EVALUATORS and value is not None:
                self.evaluations[key] = TypeAdapter(EVALUATORS[key].result_type).validate_python(value)
        return self

    @property
    def evaluations(self) -> dict[str, Any]:
        """The result of each evaluator by its key; None where the measurement does not apply."""
        assert self.__pydantic_extra__ is not None
        return self.__pydantic_extra__

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Report:
        """Validate the parsed JSON of a report.json. Raises pydantic's ValidationError."""
        return cls.model_validate(values)

    def to_json(self) -> dict[str, Any]:
        """Plain values, as report.json holds them."""
        return self.model_dump(by_alias=True)


def json_schema() -> dict[str, Any]:
    """The JSON schema of report.json (draft 2020-12), with the result of every evaluator."""
    results: dict[str, Any] = {key: (kind.result_type | None, None) for key, kind in EVALUATORS.items()}
    found = create_model("Report", __base__=Report, **results).model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}
