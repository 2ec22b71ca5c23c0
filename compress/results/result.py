"""The tree of measurements: of one model (`Measurements`, `ModelResult`), and of a run (`RunResult`).

A `Measurements` holds one key for each evaluator, whose value has the `value_type` of its measurement. A `RunResult` is
the content of report.json; it adds facts about the run and its checkpoint. Reports and figures render these values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, create_model, model_validator
from typing_extensions import Self

from compress.data.records import CalibrationSketch, TextUse
from compress.data.text_source import PYTHON
from compress.passes.contract.journal import JournalEntry
from compress.passes.contract.records import LayerResult, PhaseCost
from compress.recipe.sensitivities import Sensitivities
from compress.results.measurements import MEASUREMENTS
from compress.results.measurements.agreement import TextAgreement
from compress.results.measurements.base import Record
from compress.results.measurements.perplexity import TextQuality
from compress.results.measurements.tasks import TaskScore


class Measurements(BaseModel):
    """The results of evaluators on one model, by their keys.

    A value is None where the measurement does not apply. Values of unknown evaluators stay plain JSON.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    @model_validator(mode="after")
    def _typed(self) -> Self:
        for key, value in self.evaluations.items():
            if key in MEASUREMENTS and value is not None:
                adapter = TypeAdapter(MEASUREMENTS[key].value_type)
                self.evaluations[key] = adapter.validate_python(value)
        return self

    @property
    def evaluations(self) -> dict[str, Any]:
        """The result of each evaluator by its key."""
        assert self.__pydantic_extra__ is not None
        return self.__pydantic_extra__

    @property
    def texts(self) -> list[TextQuality]:
        """The loss on each text; empty for a model without a language-model head."""
        return self.evaluations.get("perplexity") or []

    @property
    def agreements(self) -> list[TextAgreement]:
        """The agreement with the base model on each text, of a model without a language-model head."""
        return self.evaluations.get("agreement") or []


class ModelIdentity(Record):
    """The base model of a run.

    Attributes:
        source: Hub id, folder or file.
        class_name: Its class in transformers; in JSON `class`.
        fingerprint: Digest of its files.
        commit: Its commit if it comes from the hub.
    """

    source: str
    class_name: str = Field(alias="class")
    fingerprint: str
    commit: str | None = None


HEADERS_SHARE = 0.01
"""Fraction of a weight file that its headers stay below."""


class Sizes(Record):
    """Sizes of a checkpoint.

    Attributes:
        source_bytes: Bytes of the weight files of the model as it was given; None if they are unknown.
        dense_bytes: Bytes of the uncompressed model in the storage dtype.
        tensor_bytes: Bytes of the checkpoint's tensors.
        checkpoint_bytes: Bytes of its weight files.
        compressed_layers: Number of layers that passes worked on.
        compressed_weights: Number of weights of these layers.
        compressed_bytes: Bytes of these layers in the checkpoint.
        bits_per_weight: Of these layers.
    """

    dense_bytes: int
    tensor_bytes: int
    checkpoint_bytes: int
    compressed_layers: int
    compressed_weights: int
    compressed_bytes: int
    bits_per_weight: float
    source_bytes: int | None = None

    @property
    def other_source_bytes(self) -> int | None:
        """`source_bytes` if they differ from `dense_bytes` by more than headers of files do, else None."""
        source_bytes = self.source_bytes
        differs = source_bytes is not None and abs(source_bytes / self.dense_bytes - 1) > HEADERS_SHARE
        return source_bytes if differs else None


class DiskReading(Record):
    """Reading of the uncompressed model's weights.

    Attributes:
        seconds: Time in which the run waited for the disk.
        size_bytes: Bytes read.
    """

    seconds: float
    size_bytes: int


class HeldOut(Record):
    """The best loss on held-out sequences, and its training step."""

    step: int
    held_out: float


class StreamRecord(Record):
    """What one process of a training has read of a stream.

    Attributes:
        text: Name of the text.
        rank: Number of the process.
        sequences: Number of sequences.
        documents: Number of documents.
        tokens: Number of tokens of these documents.
        rounds: How often the text was begun.
        sha256: Hash of the sequences in order, each with the hash of those before.
    """

    text: str
    rank: int
    sequences: int
    documents: int
    tokens: int
    rounds: int
    sha256: str


class TrainingRecord(Record):
    """A pass that trained.

    Attributes:
        first_loss: Mean loss of the first quarter of the steps.
        last_loss: Mean loss of the last quarter of the steps.
        steps: Number of steps done.
        of: Number of steps of the recipe.
        trained: Number of trained parameters by kind.
        seconds: Wall time.
        held_out: Indices of held-out sequences.
        best: The best loss on these sequences.
        curve: Values of each step by name.
        streams: What each process has read of each stream; empty if the training read the sequences of the calibration.
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
    streams: list[StreamRecord] = []


class Predicted(Record):
    """The prediction of the plan: bytes of all tensors, and peak memory."""

    tensor_bytes: int
    memory_bytes: int


class Verification(Record):
    """The comparison of the stored checkpoint with the computed model.

    Attributes:
        layers: Number of compressed layers that were read back bit for bit.
        own: Largest absolute difference of the logits of `compress.load`.
        transformers: Largest absolute difference of the logits of transformers; None if it did not read the checkpoint.
        skipped: Why transformers did not read it.
    """

    layers: int
    own: float
    transformers: float | None
    skipped: str | None


class ConvertedLayers(Record):
    """The layers of one kind in a further format: equal names but for numbers, and equal schemes.

    Attributes:
        name: Their name, with `*` for numbers.
        before: Scheme in the first format.
        after: Scheme in the further format.
        count: Number of layers.
        error: ||W - W'|| / ||W|| over all of them; 0: lossless.
    """

    name: str
    before: str
    after: str
    count: int
    error: float


class FormatResult(Record):
    """The checkpoint in a further format, which was converted from that of the first format.

    Attributes:
        folder: Its folder, inside of the output folder; the name of the format.
        tensor_bytes: Bytes of its tensors.
        checkpoint_bytes: Bytes of its weight files.
        layers: A row for each kind of layers.
        verified: Its comparison with the converted model.
        files: sha256 of each of its files.
        checkpoint_sha256: One digest of all files.
    """

    folder: str
    tensor_bytes: int
    checkpoint_bytes: int
    layers: list[ConvertedLayers]
    verified: Verification
    files: dict[str, str]
    checkpoint_sha256: str

    @property
    def rounded(self) -> list[ConvertedLayers]:
        """The layers whose weights differ from those of the first format."""
        return [row for row in self.layers if row.error]


class JournalRecord(Record):
    """The journal of a run: its entries, and their number by kind."""

    counts: dict[str, int]
    entries: list[JournalEntry]


class Reproduction(Record):
    """Everything that determines the bytes of a checkpoint.

    Attributes:
        recipe: The resolved recipe.
        fingerprint: Digest of the run.
        code: sha256 of the source of each pass by its key, and of this package; 'unknown' without a source.
        calibration_sha256: Digest of the calibration data.
        calibration_runs: Hashes of runs of the calibration tokens, to find them in other texts; None without
            calibration.
        texts: Texts of calibration and evaluation.
        compute_dtype: Dtype of computation.
        storage_dtype: Dtype of stored tensors.
        device: Device of computation.
        threads: Number of threads of torch.
        kernels: Instruction set of the kernels on the CPU; 'none' without them.
        python: Version of Python.
        platform: Operating system and processor.
        packages: Version of each package; None if it is not installed.
    """

    recipe: dict[str, Any]
    fingerprint: str
    code: dict[str, str] = Field(default_factory=dict)
    calibration_sha256: str
    calibration_runs: CalibrationSketch | None = None
    texts: list[TextUse] = []
    compute_dtype: str
    storage_dtype: str
    device: str
    threads: int
    kernels: str
    python: str
    platform: str
    packages: dict[str, str | None]

    @property
    def given_data(self) -> list[TextUse]:
        """The calibration data that a program passed to the run, which the recipe does not hold."""
        is_given = self.recipe.get("calibration", {}).get("source") == PYTHON
        return [use for use in self.texts if is_given and use.part == "calibration"]


class RunResult(Measurements):
    """The result of a run: the content of report.json.

    Attributes:
        compress: Version of this package.
        model: The base model.
        size: Sizes of the checkpoint.
        layers: A row for each pass and layer.
        costs: Cost of each phase.
        training: Passes that trained, by label.
        predicted: The prediction of the plan.
        verified: The comparison of the checkpoint with the computed model.
        journal: The journal of the run.
        reproduce: Everything that determines the bytes.
        files: sha256 of each file of the checkpoint.
        checkpoint_sha256: One digest of all files.
        masked: Full names of linears with pruned weights.
        sensitivity: Sensitivities of the base model, if the folder has a file of `compress sensitivity`.
        reading: Reading of weights from the disk.
        failed: The reason by the key of an evaluator that failed; what follows it was not measured. Also of a format
            that could not be written.
        formats: The checkpoint in further formats, by the name of the format.
    """

    compress: str
    model: ModelIdentity
    size: Sizes
    layers: list[LayerResult]
    costs: dict[str, PhaseCost]
    training: dict[str, TrainingRecord]
    predicted: Predicted
    verified: Verification
    journal: JournalRecord
    reproduce: Reproduction
    files: dict[str, str]
    checkpoint_sha256: str
    masked: list[str] = []
    sensitivity: Sensitivities | None = None
    reading: DiskReading | None = None
    failed: dict[str, str] = {}
    formats: dict[str, FormatResult] = {}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunResult:
        """Validate the parsed JSON of a report.json.

        Raises:
            ValidationError: of pydantic, if a field is missing or unknown.
        """
        return cls.model_validate(values)

    def to_json(self) -> dict[str, Any]:
        """Return the plain values of report.json."""
        return self.model_dump(by_alias=True)


class ModelResult(Measurements):
    """The measurements of one model of several. The base model has no comparisons.

    Attributes:
        source: Folder, hub id or file.
        digest: Of its files and the dtype.
        size_bytes: Bytes of its weight files.
        failed: The reason for each task that failed.
        items: The metrics of each task with the value of every item.
    """

    source: str
    digest: str
    size_bytes: int
    failed: dict[str, str] = {}
    items: dict[str, TaskScore] = {}


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of report.json (draft 2020-12), with the result of every evaluator."""
    fields: dict[str, Any] = {key: (kind.value_type | None, None) for key, kind in MEASUREMENTS.items()}
    schema = create_model("Report", __base__=RunResult, **fields).model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
