"""Checkpoint: a model on disk, dense or compressed by any program that compress reads.

The value states what the files hold, from headers and config.json alone. Weights are memory-mapped, and brought into
the model block by block, or all at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from os.path import expanduser
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from compress.checkpoint.caches import install_policies, read_policies
from compress.checkpoint.containers.digests import SUMS, verify_digests
from compress.checkpoint.containers.safetensors import Header
from compress.checkpoint.formats import format_of
from compress.checkpoint.formats.base import Format
from compress.checkpoint.formats.native import WEIGHTS, Native
from compress.checkpoint.inference import keeps_narrow, narrow_weights, put_narrow
from compress.checkpoint.layers import DequantizedWeight, StoredLayers, StoredTensor, check_finite
from compress.checkpoint.recognize import recognize
from compress.checkpoint.sources.files import answers_digest_of, fingerprint_of
from compress.checkpoint.sources.gguf_codes import folder_of_file
from compress.checkpoint.sources.gguf_parts import gguf_of
from compress.checkpoint.sources.hub import fetch_code, safetensors_folder
from compress.checkpoint.sources.limits import limited_modules, stored_bytes
from compress.checkpoint.sources.matching import lacking, match, undeclared
from compress.checkpoint.sources.skeleton import empty_model, read_config
from compress.checkpoint.sources.stated import MLX_KEY, stated_quantization
from compress.checkpoint.sources.stored import Place, stored_in, stored_tensors
from compress.checkpoint.sources.untrusted import check_folder, read_json, unread_files
from compress.checkpoint.tensors import Reading, StoredTensors
from compress.errors import CannotRun, ModelError, call_foreign
from compress.layers.embedding import layer_of
from compress.layers.linear import linears, shape_of
from compress.layers.scheme import LayerScheme
from compress.models.caches.base import CachePolicy, tensor_names
from compress.models.computation import compute_dtype, inference_dtype, kept_dtype, reads_weight, to_device
from compress.models.experts import open_experts, renamed, unstacked
from compress.models.quiet import one_thread_at_a_time
from compress.models.structure.blocks import Block
from compress.models.structure.ends import End, find_ends, replace_end, tie
from compress.models.tensors import assign
from compress.models.terms import CACHE_KEY
from compress.numerics.dtypes import SAFETENSORS

MASKED_KEY = "compress_masked"
"""The entry of config.json that lists the linears whose zeros are pruned weights."""
UNDECLARED = "compress_undeclared"
"""The attribute of a loaded model with `Checkpoint.undeclared`."""
STATED = ("quantization_config", MLX_KEY, CACHE_KEY)
"""The entries of config.json of a compressed checkpoint."""
NARROW = (torch.bfloat16, torch.float16)
"""The stored dtypes whose numbers float32 holds exactly."""
CPU = torch.device("cpu")
SMALL_MODEL = 1 << 24
"""Numbers of a model that may be missing in its files before transformers is asked, which allocates them."""


@dataclass(frozen=True)
class Statement:
    """What config.json states.

    Attributes:
        config: configuration of the model, without the entries below.
        format: None for a checkpoint without a `quantization_config`.
        quantization: the `quantization_config`.
        caches: entry of the cache policies.
        masked: linears whose zeros are pruned weights.
    """

    config: PretrainedConfig
    format: Format | None
    quantization: Mapping[str, Any]
    caches: Any
    masked: frozenset[str]


@dataclass(eq=False)
class Checkpoint:
    """A model on disk.

    What is derived from the files is computed when it is asked for, and raises ModelError.

    Attributes:
        folder: folder of config.json, weights, tokenizer and digests.
        source: name of the model in messages.
        requested: dtype of computation; 'auto': that of the checkpoint, or a wider one that the device computes faster.
        inference: the model is used as it is, so 'auto' may widen the activations of a packed model.
        notes: what was changed in the skeleton, for the journal.
        undeclared: tensors of parts that the class of the model does not have, known after `places` or `converted`.
    """

    folder: Path
    source: str
    requested: str = "auto"
    device: torch.device = CPU
    trust_remote_code: bool = False
    inference: bool = False
    notes: list[str] = field(default_factory=list)
    undeclared: dict[str, StoredTensor] = field(default_factory=dict)
    _model: PreTrainedModel | None = None

    @classmethod
    def open(
        cls,
        source: str | Path,
        dtype: str = "auto",
        device: torch.device | str = "cpu",
        trust_remote_code: bool = False,
        codes: bool = True,
        inference: bool = False,
    ) -> Checkpoint:
        """Open a model, dense or compressed.

        Args:
            source: hub id (also OWNER/NAME@REVISION), local folder, or path of a .gguf file; a Path is no hub id.
            dtype: dtype of computation: 'auto', 'float32', 'bfloat16' or 'float16'.
            codes: a .gguf file of another program keeps its codes, if they are known; otherwise it is a dense model.
            inference: as the attribute.

        Raises:
            ModelError: if the source does not exist, or cannot be fetched or converted.
        """
        if (file := gguf_of(source)) is not None:
            folder = folder_of_file(file, codes)
        elif isinstance(source, Path):
            folder = source
            if not folder.is_dir():
                raise ModelError(f"model: no folder {folder}; use a local folder, or a .gguf file")
        else:
            folder = safetensors_folder(source)
            if trust_remote_code:
                fetch_code(source)
        notes = unread_files(folder)
        return cls(folder, str(source), dtype, torch.device(device), trust_remote_code, inference, notes)

    @classmethod
    def of_model(cls, model: PreTrainedModel, files: Sequence[Path], config: Mapping[str, Any]) -> Checkpoint:
        """Describe safetensors files for a model without weights that is built already.

        Args:
            config: the `quantization_config`.
        """
        checkpoint = cls(files[0].parent, model.config.name_or_path or "this model", _model=model)
        record = getattr(model.config, CACHE_KEY, None)
        stated_format, values = _format_of(config, checkpoint.source)
        checkpoint.stated = Statement(model.config, stated_format, values, record, frozenset())
        checkpoint.stored = {name: place for path in files for name, place in stored_in(path).items()}
        return checkpoint

    def verify(self) -> None:
        """Compare the sha256 of every file with SHA256SUMS. Raises ModelError with a line for each damaged file."""
        check_folder(self.folder)
        verify_digests(self.folder)

    # ---- what the files state ----

    @cached_property
    def stated(self) -> Statement:
        """The content of config.json."""
        config = read_config(self.folder, self.source, self.trust_remote_code)
        quantization = stated_quantization(vars(config), self.folder)
        caches = vars(config).get(CACHE_KEY)
        for key in (*STATED, WEIGHTS):
            vars(config).pop(key, None)
        format_, quantization = _format_of(quantization, self.source)
        return Statement(config, format_, quantization, caches, masked_in(config))

    @property
    def format(self) -> Format | None:
        """The format of compressed layers; None for a checkpoint without them."""
        return self.stated.format

    @cached_property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype | None]:
        """The dtype of computation, and that of the checkpoint if 'auto' chose a wider one for the computation."""
        dtype, widened_from = compute_dtype(self.stated.config, self.requested, self.device)
        if not self.inference or self.requested != "auto" or self.format is None:
            return dtype, widened_from
        wider = inference_dtype(dtype, self.device)
        return wider, widened_from or (dtype if wider != dtype else None)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of computation."""
        return self.dtypes[0]

    @property
    def narrow_dtype(self) -> torch.dtype | None:
        """The 16-bit dtype that config.json states, before a model is built, whose dtype is that of computation."""
        stated = getattr(self.stated.config, "dtype", None)
        return stated if isinstance(stated, torch.dtype) and stated.itemsize == 2 else None

    @cached_property
    def stored(self) -> dict[str, Place]:
        """File and name of every stored tensor."""
        return stored_tensors(self.folder)

    @property
    def foreign(self) -> bool:
        """Whether another program has quantized the model."""
        return self.format is not None and not isinstance(self.format, Native) and not (self.folder / SUMS).exists()

    @cached_property
    def fingerprint(self) -> str:
        """A digest of config.json and samples of the weights."""
        return fingerprint_of(self.folder, self._files)

    @cached_property
    def answers_digest(self) -> str:
        """A digest of all that the answers of the model depend on (`answers_digest_of`)."""
        return answers_digest_of(self.folder, self.fingerprint, self._files)

    @property
    def _files(self) -> list[Path]:
        """The files of the stored tensors."""
        return sorted({place.path for place in self.stored.values()})

    @one_thread_at_a_time
    def skeleton(self) -> PreTrainedModel:
        """Return the model, without weights until they are brought; experts are linears. It is built once."""
        if self._model is None:
            config, _ = self.stated.config, self.stored  # a folder without weights is an error before all others
            self._model = empty_model(self.folder, config, self.dtype, self.trust_remote_code)
            with limited_modules(self.folder / "config.json", stored_bytes(self.folder)):
                self.notes += open_experts(self._model)
        return self._model

    @cached_property
    def named(self) -> dict[str, Place]:
        """`stored` by the names of the model, where a format stores layers.

        Tensors that hold those of all experts are divided. The codes of tied weights have the name of the head, where
        the model has their layer.
        """
        if self.format is None:
            return self.stored
        model, places = self.skeleton(), self.stored
        names = {old: new for old, new in renamed(model, list(places)).items() if new not in places}
        places = {names.get(name, name): place for name, place in places.items()}
        for name, parts in unstacked(model, places, self.format.stacked).items():
            path, key, header, _ = places.pop(name)
            if header.shape[:1] != (len(parts),):
                raise ModelError(
                    f"model: {name} in {path} is {list(header.shape)}, but the model has {len(parts)} experts by its "
                    "config.json; fetch both again"
                )
            slice_header = Header(header.dtype, header.shape[1:])
            places |= {part: Place(path, key, slice_header, index) for index, part in enumerate(parts)}
        if not self.format.embeddings:
            return places
        names = {name: name for name in places}
        for end in self.ends:
            weight = places.get(f"{end.embedding}.weight")
            if end.role == "tied" and weight is not None and not weight.header.floating:
                start = f"{end.embedding}."
                names |= {n: f"{end.name}.{n.removeprefix(start)}" for n in places if n.startswith(start)}
        return {names[name]: place for name, place in places.items()}

    @cached_property
    def ends(self) -> list[End]:
        """The embedding and the LM head of the model."""
        return find_ends(self.skeleton())

    @cached_property
    def schemes(self) -> dict[str, LayerScheme]:
        """Return the scheme of every compressed layer, by name."""
        if self.format is None:
            return {}
        model = self.skeleton()
        shapes = {name: shape_of(module) for name, module in linears(model).items()}
        ends = {end.name: end for end in self.ends}
        end_shapes = {name: layer_of(model.get_submodule(name)).shape for name in ends}
        offered = shapes | end_shapes if self.format.embeddings else shapes
        schemes = self._read_schemes(self.format, offered, self.named, shapes | end_shapes)
        return {n: replace(scheme, role=ends[n].role) if n in ends else scheme for n, scheme in schemes.items()}

    def _read_schemes(
        self,
        stated_format: Format,
        shapes: Mapping[str, tuple[int, int]],
        places: Mapping[str, StoredTensor],
        model_shapes: Mapping[str, tuple[int, int]],
    ) -> dict[str, LayerScheme]:
        """Read the schemes of layers from config.json, and check them.

        Args:
            shapes: (out, in) of the modules that a config without a list of layers may mean.
            places: stored tensors.
            model_shapes: (out, in) of all modules that may be compressed.
        """
        stored_shapes = {name: place.header.shape for name, place in places.items()}
        try:
            schemes = call_foreign(stated_format.schemes, self.stated.quantization, shapes, stored_shapes)
            for name, scheme in schemes.items():
                if name not in model_shapes:
                    raise ValueError(f"{name} is no linear of the model")
                if scheme.shape != model_shapes[name]:
                    model_shape, stored_shape = list(model_shapes[name]), list(scheme.shape)
                    raise ModelError(
                        f"model: {name} is {stored_shape} in the checkpoint, but {model_shape} by its config.json"
                    )
                try:
                    scheme.check()
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from error
        except (ValueError, CannotRun) as error:
            raise _unreadable(self.source, error) from error
        return schemes

    @cached_property
    def packed(self) -> set[str]:
        """Names of the modules whose weight is stored in another form: the layers, and both modules of tied ends."""
        schemes = self.schemes
        ends = self.ends if schemes else []
        return {*schemes, *(name for end in ends if end.name in schemes for name in end.names)}

    @cached_property
    def caches(self) -> dict[str, CachePolicy]:
        """Cache policies, by the names of the attention modules."""
        return read_policies(self.skeleton(), self.stated.caches, self.format, self.stated.quantization)

    @cached_property
    def places(self) -> dict[str, Place] | None:
        """File and name of every tensor of the model; None if some are missing or have another shape.

        Raises ModelError for stored tensors that are not read.
        """
        places = match(self.skeleton(), self.named, self.packed)
        if places is None:
            return None
        matched = {(place.path, place.key, place.member) for place in places.values()}
        names_read = set(tensor_names(self.caches))
        stated_format = self.format
        if stated_format is not None:
            for name, scheme in self.schemes.items():
                names_read |= {f"{name}.{inside}" for inside in stated_format.readable(scheme)}
        self._divide(
            n for n, p in self.named.items() if n not in names_read and (p.path, p.key, p.member) not in matched
        )
        if stated_format is not None:
            self.notes += stated_format.left_out(self.named, self.stated.quantization)
        return places

    def _divide(self, unread: Iterable[str]) -> None:
        """Divide stored tensors that are not read into those that a checkpoint of the model copies, and others."""
        names = undeclared(self.skeleton(), self.folder, unread)
        self.notes += names.notes
        self.undeclared = {self.named[name].key: self.named[name] for name in names.parts if name in self.named}
        self.undeclared = self._dequantized(self.undeclared) if self.foreign else self.undeclared

    def _dequantized(self, places: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Replace the tensors of quantized layers by their dense weights, which a checkpoint in any format can hold."""
        stated_format = self.format
        assert stated_format is not None
        headers: dict[str, dict[str, Header]] = {}
        for name, place in places.items():
            owner, _, leaf = name.rpartition(".")
            headers.setdefault(owner, {})[leaf] = place.header
        recognized = {owner: recognize(tensors, self.stated.quantization) for owner, tensors in headers.items()}
        shapes = {
            owner: (layer.shape[0], layer.shape[1])
            for owner, layer in recognized.items()
            if layer.shape is not None and len(layer.shape) == 2
        }
        if not shapes:
            return dict(places)
        schemes = self._read_schemes(stated_format, shapes, places, shapes)
        layers = StoredLayers(StoredTensors(self.stored, self.dtype, CPU), (), stated_format, schemes)
        spelled = {dtype: name for name, dtype in SAFETENSORS.items()}[self.dtypes[1] or self.dtype]
        copied: dict[str, StoredTensor] = {}
        for name, place in places.items():
            owner, _, leaf = name.rpartition(".")
            if owner not in schemes or leaf not in stated_format.readable(schemes[owner]):
                copied[name] = place
        weights = {n: DequantizedWeight(layers, n, Header(spelled, scheme.shape)) for n, scheme in schemes.items()}
        return copied | {f"{name}.weight": weight for name, weight in weights.items()}

    @cached_property
    def dense_names(self) -> list[str]:
        """Names of the model's tensors that are stored as they are."""
        codes = {f"{name}.weight" for name in self.schemes}  # some layouts store codes under this name
        return [name for name in self.places or () if name not in codes]

    @cached_property
    def tensors(self) -> StoredTensors:
        """All tensors, by the names of the files, and by those of the model."""
        model, dtype = self.skeleton(), self.dtype
        dtypes = {name: kept_dtype(model, name, dtype) for name in self.places or ()}
        wider_dtypes = {name: wider for name, wider in dtypes.items() if wider != dtype}
        return StoredTensors(self.named | (self.places or {}), dtype, self.device, wider_dtypes)

    def lacking(self) -> ModelError:
        """Return the error for files that do not hold the model."""
        return lacking(self.skeleton(), self.folder, self.named, self.packed)

    # ---- bringing weights into the model ----

    @cached_property
    def layers(self) -> StoredLayers:
        """The stored layers and the dense tensors, which are brought into blocks."""
        return StoredLayers(self.tensors, self.dense_names, self.format, self.schemes)

    def block(self, block: Block, masked: Collection[str] = (), reading: Reading | None = None) -> None:
        """Bring the tensors of a block into its module (`StoredLayers.bring`)."""
        self.layers.bring(block, masked, reading)

    @one_thread_at_a_time
    def outside(self, blocks: Collection[Block], reading: Reading, narrow_ends: bool = False) -> dict[str, End]:
        """Bring the tensors outside of the blocks into the model.

        Args:
            reading: the time of waiting for the files is added here.
            narrow_ends: embedding and LM head stay in a narrower dtype of their file (`narrow_ends`).

        Returns:
            Those ends, by the names of their weights.

        Raises:
            ModelError: as `block`, and for a compressed layer that is neither in a block nor an end.
        """
        model, prefixes = self.skeleton(), tuple(f"{block.name}." for block in blocks)
        schemes = {name: scheme for name, scheme in self.schemes.items() if not name.startswith(prefixes)}
        end_names = {end.name for end in self.ends} if schemes else set()
        if misplaced := [name for name in schemes if name not in end_names]:
            raise ModelError(
                f"model: {self.source} has a quantized {misplaced[0]}, outside of its blocks, where passes do not "
                "work; start from its dense model"
            )
        install_policies(model, "", self.tensors, self.caches)
        ends = self.narrow_ends(model) if narrow_ends and self.format is None else {}
        names = [name for name in self.dense_names if not name.startswith(prefixes) and name not in ends]
        tensors = self.tensors.read(names, reading)
        check_finite(tensors | self.tensors.read_raw(ends, reading), self.tensors)
        assign(model, tensors)
        self.map_ends(ends)
        tie(model)
        to_device(model, self.device)
        self.layers.fill(model, "", schemes, reading)
        return ends

    @one_thread_at_a_time
    def fill(self) -> PreTrainedModel:
        """Bring all weights into the model for inference, and return it. Raises ModelError."""
        if self.places is None:
            model = self.converted()
        else:
            model, names = self.skeleton(), self.dense_names
            self.layers.fill(model, "", self.schemes)
            if self.format is not None and keeps_narrow(self.dtype, self.device):
                weights = self.tensors.read_raw(narrow_weights(model, names))
                narrow = {name: tensor for name, tensor in weights.items() if tensor.dtype is torch.bfloat16}
                check_finite(narrow, self.tensors)
                put_narrow(model, narrow)
                names = [name for name in names if name not in narrow]
            tensors = self.tensors.read(names)
            check_finite(tensors, self.tensors)
            assign(model, tensors)
            tie(model)
            to_device(model, self.device)
        install_policies(model, "", self.tensors, self.caches)
        vars(model)[UNDECLARED] = self.undeclared
        return model

    @one_thread_at_a_time
    def converted(self) -> PreTrainedModel:
        """Load a dense model with transformers, which converts stored layouts to those of the model.

        transformers gets the tensors, and opens no files itself.

        Raises:
            ModelError: for tensors that are missing or have another shape, and for compressed layers.
        """
        model = self.skeleton()
        expected_count = sum(tensor.numel() for tensor in model.state_dict(keep_vars=True).values())
        stored = sum(place.header.count for place in self.stored.values())
        if self.schemes or expected_count > 2 * stored + SMALL_MODEL:
            raise self.lacking()
        files = StoredTensors(self.stored, self.dtype, CPU)
        tensors = files.read_raw(self.stored)
        check_finite(tensors, files)
        try:
            options: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # reported below
            options |= {"config": model.config, "state_dict": tensors, "dtype": self.dtype}
            loaded: Any = call_foreign(type(model).from_pretrained, None, **options)
        except CannotRun as error:
            raise ModelError(f"model: transformers cannot load {self.folder}: {error.cause}") from error
        built, info = loaded
        if info["mismatched_keys"]:
            name, stored_shape, model_shape = min(info["mismatched_keys"])
            raise ModelError(
                f"model: {name} is {list(stored_shape)} in {self.folder}, but {list(model_shape)} by its config.json"
            )
        if missing := sorted(info["missing_keys"]):
            raise ModelError(
                f"model: {self.folder} lacks {len(missing)} tensors, the first {missing[0]}; fetch it again"
            )
        self._divide(info["unexpected_keys"])
        built.generation_config = model.generation_config
        return built.eval().requires_grad_(False).to(self.device)

    def narrow_ends(self, model: PreTrainedModel) -> dict[str, End]:
        """Return the ends by the names of their weights, if these are narrower than float32 in which they are computed.

        A copy in the dtype of the computation is often the largest tensor of a run. Few rows of an embedding are read,
        and a product with the head casts some rows at a time, so neither needs one.
        """
        if self.dtype is not torch.float32:
            return {}
        ends_by_name = {f"{end.embedding or end.head}.weight": end for end in find_ends(model)}
        ends = {n: end for n, end in ends_by_name.items() if not any(reads_weight(model, part) for part in end.names)}
        files = self.tensors.files
        places = {name: files[name] for name in ends if name in files and files[name].path.suffix == ".safetensors"}
        return {name: ends[name] for name, place in places.items() if SAFETENSORS.get(place.header.dtype) in NARROW}

    def map_ends(self, ends: Mapping[str, End]) -> None:
        """Map the weights of `narrow_ends`. If they are mapped already, pages that were read leave the process."""
        for name, end in ends.items():
            replace_end(self.skeleton(), end).put(self.tensors.read_raw([name])[name])


def is_compressed(source: str) -> bool:
    """Return whether a model is a local folder with quantized weights or a quantized KV cache."""
    try:
        config = read_json(Path(expanduser(source)) / "config.json")
    except ValueError:
        return False
    return any(config.get(key) is not None for key in STATED)


def masked_in(config: PretrainedConfig) -> frozenset[str]:
    """Remove from a configuration the names of the linears whose zeros are pruned weights, and return them."""
    names = vars(config).pop(MASKED_KEY, None)
    return frozenset(name for name in names if isinstance(name, str)) if isinstance(names, list) else frozenset()


def state_masks(config: PretrainedConfig, names: Collection[str]) -> None:
    """State in a configuration which linears have pruned weights that no tensor tells, if there are any."""
    vars(config).pop(MASKED_KEY, None)
    if names:
        setattr(config, MASKED_KEY, sorted(names))


def _format_of(quantization: Any, source: str) -> tuple[Format | None, Mapping[str, Any]]:
    if quantization is None:
        return None, {}
    if not isinstance(quantization, dict) and not hasattr(quantization, "to_dict"):
        raise ModelError(f"model: quantization_config in config.json of {source} is no object; fetch the file again")
    values = quantization if isinstance(quantization, dict) else quantization.to_dict()
    method = values.get("quant_method")
    format_ = format_of(method)
    if format_ is None:
        raise ModelError(
            f"model: {source} is quantized by {method!r}, which compress does not read; start from its dense model, or "
            "dequantize it with the program that wrote it"
        )
    try:
        return call_foreign(format_.of_config, values), values
    except CannotRun as error:
        raise _unreadable(source, error) from error


def _unreadable(source: str, error: Exception) -> ModelError:
    """Return an error for a `quantization_config` that cannot be read."""
    cause = error.cause if isinstance(error, CannotRun) else error
    reason = str(cause) if isinstance(cause, ValueError) else f"{type(cause).__name__}: {cause}"
    if isinstance(cause, KeyError):
        reason = f"it lacks {cause}, or does not know it"
    return ModelError(f"model: quantization_config in config.json of {source} cannot be read ({reason})")
