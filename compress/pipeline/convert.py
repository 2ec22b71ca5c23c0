"""Convert the layers of a checkpoint to another format, without calibration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.blockwise.quantized_embeddings import embeddings_of, quantized_embeddings
from compress.checkpoint.blocks import BLOCK_TYPES
from compress.checkpoint.formats import FORMATS, RUNTIMES
from compress.checkpoint.formats.base import Format
from compress.checkpoint.load import load
from compress.checkpoint.opened import OpenModel
from compress.checkpoint.save import compressed_layers
from compress.errors import TargetError, UserError, VerificationError, did_you_mean
from compress.layers.linear import CompressedLinear
from compress.layers.names import kind_of
from compress.layers.parts.codes import CodesPart, CodesScheme
from compress.layers.scheme import LayerScheme
from compress.layers.transforms.rounding import InputRounding, RoundingScheme
from compress.models.computation import widened_from
from compress.models.experts import open_experts
from compress.numerics.dtypes import DTYPES, dtype_name
from compress.numerics.quant.codes import groups_in, quantize, spread, store
from compress.numerics.quant.grids import GRIDS, IntGrid
from compress.passes.contract.context import Run
from compress.pipeline.export import check_new_folder, save
from compress.report.card import write_export_card

ROUNDED_TYPE = "Q8_0"
DENSE_TYPES: Mapping[str, tuple[str | None, str]] = {
    "auto": (None, "dense"),
    "F32": ("float32", "dense"),
    "F16": ("float16", "dense"),
    "BF16": ("bfloat16", "dense"),
    ROUNDED_TYPE: (None, ROUNDED_TYPE),
}
"""Number types of files for dense models: the dtype of dense tensors, and the type of the embedding and the LM head."""
SIZES = (16, 32, 64, 128, 256, 512, 1024)
OUTLIER = 6.0  # LLM.int8: the threshold of outliers, for formats whose readers always round the inputs of int8 weights


@dataclass(frozen=True)
class Exported:
    """The layers of one kind after an export: equal names but for numbers, and equal schemes.

    before, after: the schemes. count: the number of layers. error: ||W - W'|| / ||W|| over all of them; 0: lossless.
    """

    name: str
    before: str
    after: str
    count: int
    error: float


@dataclass(frozen=True)
class ExportOptions:
    """The options of `compress.export`.

    Attributes:
        requantize: Whether weights are rounded again where the format cannot store their codes.
        dtype: Of dense tensors; 'auto': that of the checkpoint.
        trust_remote_code: Whether code in the folder runs.
        type: Number type of the matrices of a dense model; 'auto': that of `dtype`.
    """

    requantize: bool = False
    dtype: str = "auto"
    trust_remote_code: bool = False
    type: str = "auto"


@dataclass
class _Error:
    """Sums over the layers of one kind."""

    count: int = 0
    difference: float = 0.0
    norm: float = 0.0


def export_checkpoint(folder: str | Path, out: Path, format: str, options: ExportOptions) -> list[Exported]:
    """Write the checkpoint in `folder` in a format that `compress.load` reads; `compress.export` says more.

    Args:
        folder: The checkpoint.
        out: The new folder.
        format: A name of `FORMATS`.
        options: The options.

    Returns:
        A line for each kind of layer.

    Raises:
        TargetError: For a layer that the format cannot store, and for weights outside of the range of `type`.
        UserError: For an unknown format or type.
    """
    type, requantize, trust_remote_code = options.type, options.requantize, options.trust_remote_code
    if format not in FORMATS:
        raise UserError(f"export: format {format!r} is not known{did_you_mean(format, [*FORMATS, *RUNTIMES])}")
    dtype = _dtype_of(type, options.dtype, format)
    check_new_folder(out)
    # a type is that of matrices: vectors keep the precision of the checkpoint
    model, tokenizer = load(folder, dtype if type == "auto" else "auto", "cpu", trust_remote_code)
    form = FORMATS[format]
    if form.ends_typed:
        _store_dense(model)
    if not coded_layers(model):
        if not form.ends_typed:
            raise TargetError(
                f"export: {folder} holds no compressed layers; compress it first, for example with compress quantize, "
                "or use format: gguf, which stores dense models too"
            )
        if (narrow := widened_from(model)) is not None:  # loaded for computation in float32: load it as it is stored
            model, tokenizer = load(folder, dtype_name(narrow), "cpu", trust_remote_code)
            _store_dense(model)
        return _export_dense(OpenModel.in_memory(model, tokenizer), str(folder), out, form, type, dtype)
    if type != "auto":
        raise UserError(f"export: type {type} is for a dense model, but {folder} holds codes; leave type out")
    storage = next(model.parameters()).dtype if dtype == "auto" else DTYPES[dtype]
    form = form.stored_in(storage)
    exported = convert(model, Conversion(form, requantize), storage)
    exported += rounded_ends(OpenModel.in_memory(model, tokenizer), Run(torch.device("cpu"), storage, format=form))
    save(model, out, format, tokenizer, dtype)
    programs = form.programs_run([layer.scheme for layer in coded_layers(model).values()])
    write_export_card(out, str(folder), format, table_rows(exported), programs)
    return exported


def _export_dense(opened: OpenModel, source: str, out: Path, form: Format, type: str, dtype: str) -> list[Exported]:
    """Write a model without compressed layers in a format that holds dense models, and compare the file with it.

    Args:
        opened: the model, as it is stored.
        source: its folder, for the card.
        out: the new folder.
        form: the format.
        type: a key of `DENSE_TYPES`.
        dtype: of dense tensors; 'auto': that of the model.

    Returns:
        As `export`.
    """
    model = opened.model
    storage = next(model.parameters()).dtype if dtype == "auto" else DTYPES[dtype]
    end_type = DENSE_TYPES[type][1]
    form = form.stored_in(storage).configured(embedding=end_type, head=end_type)
    _check_range(model, storage)
    open_experts(model)
    exported = _round_all(model, form, storage) if type == ROUNDED_TYPE else []
    rounded = rounded_ends(opened, Run(torch.device("cpu"), storage, format=form))
    rounded_names = {line.name for line in rounded}
    exported += rounded
    if type == ROUNDED_TYPE:
        embeddings = embeddings_of(opened)
        names = [name.removesuffix(".weight") for name in embeddings.weights]
        text = _dense_text(embeddings.config.hidden_size)
        exported += [Exported(name, "dense", text, 1, 0.0) for name in names if name not in rounded_names]
    save(model, out, form.name, opened.tokenizer, dtype, embedding=end_type, head=end_type)
    layers = coded_layers(model)
    _compare_dense(model, out, storage, rounded_names | set(layers))
    programs = form.programs_run([layer.scheme for layer in layers.values()]) if layers else []
    write_export_card(out, source, form.name, table_rows(exported), programs)
    return exported


def _dtype_of(type: str, dtype: str, format: str) -> str:
    """Return the dtype of dense tensors for a number type. Raises UserError for one that cannot be written."""
    if type not in DENSE_TYPES:
        choices = ", ".join(DENSE_TYPES)
        raise UserError(f"export: type {type!r} is not written for dense models; use one of {choices}")
    if type != "auto" and not FORMATS[format].ends_typed:
        raise UserError(f"export: type {type} is for format gguf; format {format} has dtype: float16 and others")
    typed = DENSE_TYPES[type][0]
    if typed is not None and dtype not in ("auto", typed):
        raise UserError(f"export: type {type} and dtype {dtype} contradict each other; leave one of them out")
    return typed or dtype


def _store_dense(model: PreTrainedModel) -> None:
    """Replace packed sparse weights by dense ones with zeros in place."""
    for layer in coded_layers(model).values():
        if len(layer.all_parts) == 1 and not layer.scheme.quantized and layer.scheme.maps_inputs is None:
            layer.put(layer.weight, layer.mask)


def _dense_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the parameters of a model by name, with the weights of layers that passes have left dense."""
    tensors = {name: tensor for name, tensor in model.named_parameters() if ".parts." not in name}
    layers = compressed_layers(model).items()
    return tensors | {f"{name}.weight": layer.weight for name, layer in layers if layer.scheme.plain}


def _check_range(model: PreTrainedModel, storage: torch.dtype) -> None:
    """Raise TargetError for a finite weight that `storage` cannot represent."""
    for name, tensor in _dense_weights(model).items():
        if tensor.ndim > 1 and bool((tensor.isfinite() & ~tensor.to(storage).isfinite()).any()):
            raise TargetError(
                f"export: {name} has values outside of the range of {dtype_name(storage)}; use type BF16 or F32"
            )


def _compare_dense(model: PreTrainedModel, out: Path, storage: torch.dtype, rounded_names: Set[str]) -> None:
    """Reload a dense checkpoint, and compare all tensors that were not rounded. Raises VerificationError."""
    loaded, _ = load(out, dtype_name(storage))
    stored = dict(loaded.named_parameters(remove_duplicate=False))
    for name, tensor in _dense_weights(model).items():
        if name.removesuffix(".weight") in rounded_names:
            continue
        expected = tensor.to(storage)
        if tensor.ndim == 1:  # norms that are stored with 1 added lose the last bits of small numbers
            rtol = torch.finfo(storage).eps
            is_equal = name in stored and torch.allclose(stored[name].float(), expected.float(), rtol, atol=1e-6)
        else:
            is_equal = name in stored and torch.equal(stored[name], expected)
        if not is_equal:
            raise VerificationError(f"{out}: {name} differs after reloading")


def _dense_text(width: int) -> str:
    """Return the scheme in the line of a layer that `ROUNDED_TYPE` cannot hold."""
    size = BLOCK_TYPES[ROUNDED_TYPE].size
    return f"dense ({width} inputs are no multiple of {size})" if width % size else "dense"


def _round_all(model: PreTrainedModel, form: Format, storage: torch.dtype) -> list[Exported]:
    """Round all linears of the blocks of a dense model to `ROUNDED_TYPE` in place, where their width allows it."""
    scheme, scales = BLOCK_TYPES[ROUNDED_TYPE].scheme(), form.scales_in(storage)
    errors: dict[tuple[str, str], _Error] = {}
    for name in OpenModel.in_memory(model, None).linear_names():
        layer = CompressedLinear.of(model.get_submodule(name))
        if form.stores_dense(name) or form.refuses(LayerScheme(layer.shape, (scheme,))) is not None:
            errors.setdefault((kind_of(name), _dense_text(layer.shape[1])), _Error()).count += 1
            continue
        weight, mask = layer.weight_as(torch.float32), layer.mask
        layer.put(quantize(weight, scheme.grid, scheme.group_size, scheme.symmetric, mask=mask, dtype=scales), mask)
        layer.change_parts(lambda part: part.in_storage(scales))
        model.set_submodule(name, layer)
        error = errors.setdefault((kind_of(name), scheme.text), _Error())
        error.difference += float((layer.weight_as(torch.float32) - weight).double().square().sum())
        error.norm += float(weight.double().square().sum())
        error.count += 1
    return [
        Exported(name, "dense", text, error.count, math.sqrt(error.difference / max(error.norm, 1e-30)))
        for (name, text), error in errors.items()
    ]


def coded_layers(model: nn.Module) -> dict[str, CompressedLinear]:
    """Return the layers of a model that are not stored as one dense weight, the embedding and the LM head included."""
    return {name: layer for name, layer in compressed_layers(model).items() if not layer.scheme.plain}


def table_rows(exported: Sequence[Exported]) -> list[tuple[str, str, str, int, float]]:
    """Return the rows of a card: name, scheme before, scheme after, number and relative weight error."""
    return [(line.name, line.before, line.after, line.count, line.error) for line in exported]


def convert(model: PreTrainedModel, conversion: Conversion, storage: torch.dtype) -> list[Exported]:
    """Convert the layers of a model in place to schemes that a format stores; returns their kinds.

    storage: the dtype of scales, unless the format fixes theirs.

    Raises TargetError for a layer that the format cannot store.
    """
    layers = coded_layers(model)
    for layer in layers.values():
        _without_constant_zeros(layer)
    targets = conversion.targets({name: layer.scheme for name, layer in layers.items()})
    errors: dict[tuple[str, str, str], _Error] = {}
    for name, layer in layers.items():
        conversion.convert(name, layer, targets[name], storage, errors)
    return [
        Exported(name, old_scheme, new_scheme, error.count, math.sqrt(error.difference / max(error.norm, 1e-30)))
        for (name, old_scheme, new_scheme), error in errors.items()
    ]


@dataclass(frozen=True)
class Conversion:
    """The conversion of layers to a format.

    Attributes:
        form: the format.
        requantize: whether weights are rounded again where the format cannot store their codes.
        rescale: whether codes are rounded again where the format fixes a dtype that cannot represent their scales.
        label: the beginning of errors.
        remedy: the end of errors, besides the formats that store all layers.
    """

    form: Format
    requantize: bool = False
    rescale: bool = False
    label: str = "export"
    remedy: str = "To round the weights again, add requantize"

    def targets(self, schemes: Mapping[str, LayerScheme]) -> dict[str, LayerScheme]:
        """Return the schemes of layers in the format, by name.

        Args:
            schemes: of the layers before the conversion.

        Raises:
            TargetError: for a layer that the format cannot store, unless weights are rounded again.
        """
        fitting = {name: self._split(scheme) or scheme for name, scheme in schemes.items()}
        reasons = {name: self.form.refuses(scheme) for name, scheme in fitting.items()}
        refused = {name: reason for name, reason in reasons.items() if reason is not None}
        clash = None if refused else self._clash(fitting)
        if not refused and clash is None:
            return fitting
        if not self.requantize:
            prefix = "" if not refused else f"{next(iter(refused))}: "
            reason = clash or next(iter(refused.values()))
            raise TargetError(f"{self.label}: {prefix}{reason}. {self._lossless(schemes)}{self.remedy}")
        nearest = {name: self._nearest(fitting[name]) if name in refused else fitting[name] for name in fitting}
        if self._clash(nearest) is not None:
            nearest = self._one_for_all(fitting)
        return nearest

    def _split(self, scheme: LayerScheme) -> LayerScheme | None:
        """Return the codes in the largest smaller groups that the format stores; None if there are none, or no need."""
        codes = scheme.codes
        if codes is None or self.form.refuses(scheme) is None or codes.grid.scaling.stored is not None:
            return None
        width = scheme.shape[1]
        current_size = codes.group_size if isinstance(codes.group_size, int) else width
        finer = (
            replace(codes, group_size=n)
            for n in sorted(SIZES, reverse=True)
            if n < current_size and current_size % n == 0
        )
        candidates = (scheme.with_parts(smaller) for smaller in finer)
        return None if codes.indexed else next((new for new in candidates if self.form.refuses(new) is None), None)

    def _clash(self, schemes: Mapping[str, LayerScheme]) -> str | None:
        adapted = {name: self.form.adapt(scheme) for name, scheme in schemes.items() if scheme.quantized}
        return self.form.clash({name: scheme for name, scheme in adapted.items() if scheme is not None})

    def _lossless(self, schemes: Mapping[str, LayerScheme]) -> str:
        """Return the formats that store all layers as they are."""
        able = []
        for name, format_ in FORMATS.items():
            other = replace(self, form=format_)
            stored = {name: other._split(scheme) or scheme for name, scheme in schemes.items()}
            if not any(format_.refuses(scheme) for scheme in stored.values()) and other._clash(stored) is None:
                able.append(name)
        return f"Lossless formats: {', '.join(able)}. "

    def _candidates(self, scheme: LayerScheme) -> list[LayerScheme]:
        """Return schemes of one part of codes that the format stores, the nearest to a layer's own first."""
        old = scheme.all_codes[0] if scheme.all_codes else CodesScheme(GRIDS["int4"], 32)
        rounded: list[tuple[RoundingScheme, ...]] = [() if scheme.rounding is None else (scheme.rounding,), ()]
        rounded.append((RoundingScheme(GRIDS["int8"], "token", OUTLIER),))
        own_schemes = [LayerScheme(scheme.shape, scheme.parts, inputs) for inputs in rounded]
        candidates: list[tuple[tuple[float, ...], int, LayerScheme]] = [
            ((-1.0,), i, new) for i, new in enumerate(own_schemes) if self.form.refuses(new) is None
        ]
        for grid in (grid for grid in GRIDS.values() if grid.run == 1):
            for size in (grid.group_size,) if grid.group_size else (*SIZES, "channel"):
                for symmetric in (True,) if grid.symmetric_only else (old.symmetric, not old.symmetric):
                    if isinstance(size, int) and size > scheme.shape[1]:
                        continue
                    for inputs in rounded:
                        new = LayerScheme(scheme.shape, (CodesScheme(grid, size, symmetric),), inputs)
                        if self.form.refuses(new) is None:
                            candidates.append((_distance(old, new, scheme), len(candidates), new))
        return [new for *_, new in sorted(candidates, key=lambda item: item[:2])]

    def _nearest(self, scheme: LayerScheme) -> LayerScheme:
        """Return the nearest scheme that the format stores. Raises TargetError."""
        candidates = self._candidates(scheme)
        if not candidates:
            raise TargetError(
                f"{self.label}: format {self.form.name} stores no codes for layers of {scheme.shape[0]} x "
                f"{scheme.shape[1]}; use format: native, or dense"
            )
        return candidates[0]

    def _one_for_all(self, schemes: Mapping[str, LayerScheme]) -> dict[str, LayerScheme]:
        """Return one target for all layers, for formats whose layers must agree. Raises TargetError."""
        for new in self._candidates(next(iter(schemes.values()))):
            targets = {name: LayerScheme(old.shape, new.parts, new.transforms) for name, old in schemes.items()}
            if not any(self.form.refuses(scheme) for scheme in targets.values()) and self._clash(targets) is None:
                return targets
        raise TargetError(
            f"{self.label}: no scheme of format {self.form.name} fits all layers; use format: native, or dense"
        )

    def convert(
        self,
        name: str,
        layer: CompressedLinear,
        target: LayerScheme,
        storage: torch.dtype,
        errors: dict[tuple[str, str, str], _Error],
    ) -> None:
        """Convert one layer, and add its error to those of its kind.

        Raises:
            TargetError: for scales that the format cannot represent.
        """
        scheme = layer.scheme
        split = target == self._split(scheme)
        if target.parts != scheme.parts and not split:
            layer.absorb_inputs()
        original_weight = layer.weight_as(torch.float32)
        if split:
            layer.put(_in_groups(layer.codes, target), layer.mask)
            self._check_scales(name, layer, storage)
        elif target != scheme:
            _requantize(layer, target, self.form.scales_in(storage))
        elif self.form.adapt(scheme) is not None:
            self._check_scales(name, layer, storage)
        layer.change_transforms(self.form.adapt_transform)
        new_weight = layer.weight_as(torch.float32)
        stored = self.form.adapt(layer.scheme)
        text = "dense" if stored is None else stored.text
        kind = kind_of(name), scheme.text, text
        error = errors.setdefault(kind, _Error())
        error.difference += float((new_weight - original_weight).double().square().sum())
        error.norm += float(original_weight.double().square().sum())
        error.count += 1

    def _check_scales(self, name: str, layer: CompressedLinear, storage: torch.dtype) -> None:
        """Convert the scales to the dtype of the format; codes are rounded again where this changes scales.

        A format that fixes the dtype of scales rounds them, and the codes stay. Raises TargetError if codes must be
        rounded again, but that is not asked for.
        """
        part, dtype = layer.codes, self.form.scales_in(storage)
        if part is None or part.grid.scaling.stored is not None or part.scale.dtype == dtype:
            return
        stored = part.in_storage(dtype)
        if torch.equal(stored.scale.to(part.scale.dtype), part.scale):
            layer.put(stored)
        elif self.requantize:
            layer.put(_rounded_again(part, stored))
        elif self.form.scale_dtype is not None and _nearly_equal(stored.scale, part.scale):
            layer.put(stored)
        elif self.rescale:
            layer.put(_rounded_again(part, stored))
        else:
            larger = "" if self.form.scale_dtype is not None else "use dtype float32, or "
            raise TargetError(
                f"{self.label}: {name}: its scales are {part.scale.dtype}, which {dtype}, the dtype of scales in "
                f"format {self.form.name}, cannot represent; {larger}add requantize to round its weights again"
            )


def _nearly_equal(rounded: Tensor, scale: Tensor) -> bool:
    """Return whether scales are rounded to the nearest number of their new dtype, without overflow or underflow."""
    difference = (rounded.double() - scale.double()).abs()
    return bool((difference <= torch.finfo(rounded.dtype).eps * scale.double().abs()).all())


def _distance(old: CodesScheme, new: LayerScheme, scheme: LayerScheme) -> tuple[float, ...]:
    """Return how far a scheme is from a layer's: bits, grid, kind of grid, group size, zero points and inputs."""
    codes, width = new.all_codes[0], scheme.shape[1]
    sizes = [size if isinstance(size, int) else width for size in (old.group_size, codes.group_size)]
    bits = codes.grid.bits - old.grid.bits
    return (
        abs(bits) + (0.5 if bits < 0 else 0),
        codes.grid is not old.grid,
        isinstance(codes.grid, IntGrid) is not isinstance(old.grid, IntGrid),
        abs(math.log2(sizes[1] / sizes[0])),
        codes.symmetric is not old.symmetric,
        new.rounding != scheme.rounding,
    )


def _without_constant_zeros(layer: CompressedLinear) -> None:
    """Drop zero points that are all in the middle of the grid: the same weight without them."""
    part = layer.codes
    if part is not None and part.zero is not None and not part.scheme.float_zeros and not bool(part.zero.any()):
        layer.put(part.changed(replace(part.scheme, symmetric=True), zero=None))


def _requantize(layer: CompressedLinear, target: LayerScheme, dtype: torch.dtype) -> None:
    """Round the weight of a layer to the grid of another scheme if that differs; change the rounding of inputs."""
    if target.parts != layer.scheme.parts:
        codes, weight, mask = target.all_codes[0], layer.weight_as(torch.float32), layer.mask
        layer.put(quantize(weight, codes.grid, codes.group_size, codes.symmetric, mask=mask, dtype=dtype), mask)
        layer.change_parts(lambda part: part.in_storage(dtype))
    if target.rounding != layer.scheme.rounding:
        rounding = target.rounding
        layer.round_inputs(None if rounding is None else InputRounding(rounding, layer.shape, {}))


def _in_groups(part: CodesPart | None, target: LayerScheme) -> CodesPart:
    """Return the codes in the smaller groups of a scheme, which share scales and zero points of the larger ones."""
    assert part is not None and target.codes is not None, "only codes are split"
    codes, size = part.codes(), target.codes.group_size
    assert isinstance(size, int), "smaller groups have a size"
    count = groups_in(part.shape[1], size)
    starts = torch.arange(count, device=codes.scale.device) * size

    def regrouped(per_group: Tensor) -> Tensor:
        old_size = codes.group_size if isinstance(codes.group_size, int) else part.shape[1]
        return per_group[:, starts // old_size].expand(part.shape[0], -1).contiguous()

    zero = None if codes.zero is None else regrouped(codes.zero)
    return CodesPart.of(replace(codes, scale=regrouped(codes.scale), zero=zero, group_size=size))


def rounded_ends(opened: OpenModel, run: Run) -> list[Exported]:
    """Return a line for each dense embedding and LM head that the format of a run rounds."""
    exported = []
    for name, part in quantized_embeddings(opened, run).items():
        weight = opened.model.get_parameter(name).detach().double()
        error = float((part.dense(torch.float32).double() - weight).norm() / weight.norm().clamp(min=1e-30))
        exported.append(Exported(name.removesuffix(".weight"), "dense", part.scheme.text, 1, error))
    return exported


def _rounded_again(part: CodesPart, stored: CodesPart) -> CodesPart:
    """Return the codes of the same weight for the scales of `stored`."""
    width, codes = part.shape[1], stored.codes()

    def per_column(per_group: Tensor) -> Tensor:
        return spread(per_group.float(), width, part.group_size, codes.group_index)

    zero = None if codes.zero is None else per_column(codes.zero)
    new_codes = part.grid.encode(part.dense(torch.float32), per_column(codes.scale), zero)
    codes = replace(codes, codes=store(new_codes, part.grid))
    return CodesPart.of(codes)
