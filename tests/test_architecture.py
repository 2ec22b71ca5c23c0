"""The rules of the house, read from the source: floors, budgets, words that must not stand there. CONTRIBUTING.md tells why.

Every rule is a function from a source text to the list of places that break it, so that each is also shown a text that
does. One test holds one rule for all modules, and its message names every place that breaks it.
"""

import ast
import re
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from compress.passes import KINDS
from compress.passes.contract.context import Run

ROOT = Path(__file__).parents[1]
PACKAGE = "compress"
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / PACKAGE).rglob("*.py"))
}
"""Every module of the package by its dotted name."""

FOLDERS = {
    "errors": "the small tree of errors that a user can meet",
    "version": "one number",
    "native": "the shared library of C++ code and its C interface; loops over columns, on GPUs in Triton; trellis paths",
    "numerics": "`quant/` (grids, codes, scales, rounding), `sparse/` (masks, scores, schedules), linear algebra: pure functions",
    "kernels": "the forward pass of packed weights, and its reference in plain torch",
    "layers": "what a compressed layer is: `parts/`, `transforms/`, its scheme, `CompressedLinear`, the embedding",
    "models": "`structure/`, `reshape/`, `kinds/` (inputs, loss and agreement of each kind of model), `caches/` of attention",
    "decode": "decoding by traced steps, without Python",
    "checkpoint": "`Checkpoint` and `CheckpointWriter`, `formats/` and `containers/` on disk, `sources/` of models, the bridge to transformers",
    "roofline": "operations and bytes of a model's products, and their least time on a device",
    "data": "texts and calibration batches",
    "passes.contract": "the contract of a pass: the sizes of a pass, observers, options, facts, the journal",
    "blockwise": "the sweep over the blocks: capture, calibration in lockstep, installing, the activation store",
    "train": "the one training loop: objectives, teachers, parametrizations, schedules",
    "passes.families": "what kinds of passes share: quantizing, pruning, allocation, training, reconstruction, reshaping",
    "passes": "one file per algorithm in folders by kind, found by their names; passes never import each other",
    "authoring": "the public names for authors of passes",
    "recipe": "the frozen value that YAML spells; its order is checked before anything loads",
    "results": "the tree of results as values without torch: report.json, the JSON of `compress eval`, `measurements/` of evaluators",
    "evaluation": "evaluators, one file each",
    "report": "renders a result: sections (one file each) of report.md and report.html, charts, `page/`: blocks and templates",
    "pipeline": "a recipe from its model to its evidence: plan, resolve, run, resume, verify",
    "testing": "what authors of passes test them with: the contract as checks, on a small model built in code",
    "cli": "parse, call, print; no logic",
    "__main__": "`python -m compress`",
}
"""The folders and top files of the package and what is in them, from the lowest to the highest."""

FLOORS = {PACKAGE: len(FOLDERS)} | {f"{PACKAGE}.{name}": floor for floor, name in enumerate(FOLDERS)}
"""A module stands on the floor of its folder; it imports from its own folder and from lower ones."""

TOP = {"__init__", "__main__", "authoring", "errors", "version"}
"""The files at the top of the package; all others are in folders."""

LATE_IMPORTS = {
    "compress.cli.bench": "as in compress.cli.commands",
    "compress.cli.commands": "torch takes seconds to import, which `compress --help` should not",
    "compress.cli.compare": "as in compress.cli.commands",
    "compress.cli.complete": "as in compress.cli.commands",
    "compress.cli.eval": "as in compress.cli.commands",
    "compress.cli.export": "as in compress.cli.commands",
    "compress.cli.generate": "as in compress.cli.commands",
    "compress.cli.group": "as in compress.cli.commands",
    "compress.cli.imatrix": "as in compress.cli.commands",
    "compress.cli.init": "as in compress.cli.commands",
    "compress.cli.inspect": "as in compress.cli.commands",
    "compress.cli.model_free": "as in compress.cli.commands",
    "compress.cli.passes": "as in compress.cli.commands",
    "compress.cli.report": "as in compress.cli.commands",
    "compress.cli.roofline": "as in compress.cli.commands",
    "compress.cli.sensitivity": "as in compress.cli.commands",
    "compress.cli.sweep": "as in compress.cli.commands",
    "compress.cli.options": "as in compress.cli.commands",
    "compress.cli.show": "as in compress.cli.commands",
    "compress.checkpoint.inspection": "headers need no torch; layers of format native, cache policies and zeros do",
}
"""Modules that may import the package's own modules inside functions, and why."""

MOST_IMPORTS = 15
"""The most modules of this package that a file imports: a file with more has several responsibilities."""
MANY_IMPORTS: dict[str, str] = {
    "compress": "the public names",
    "compress.cli.commands": "one command for each task",
    "compress.report.card": "a card from every part of a report, for each kind of checkpoint",
    "compress.pipeline.apply": "every step of a run on a model in memory",
    "compress.pipeline.finish": "verifies, evaluates and reports a checkpoint",
    "compress.pipeline.prepare": "opens everything that a run reads",
    "compress.pipeline.run": "the course of a run under its lock and in its processes",
    "compress.pipeline.evaluation": "evaluates models of every source",
    "compress.pipeline.checkpoint": "writes the checkpoint of a run and resumes it",
    "compress.pipeline.plan": "collects every check of a recipe before a run",
    "compress.pipeline.sweep_plan": "plans every combination of a recipe",
    "compress.pipeline.sensitivity": "runs trials of passes on a model",
    "compress.pipeline.export": "saves a model in memory",
    "compress.pipeline.imatrix": "runs a model on a text, and names the sums as llama.cpp does",
    "compress.pipeline.counted": "counts every part of a run",
    "compress.pipeline.footprint": "adds up the memory of every stage of a run",
    "compress.pipeline.resolve": "resolves a recipe against a model",
    "compress.pipeline.sources": "opens every model that a run compares with",
    "compress.pipeline.trial": "tries passes on one block",
    "compress.pipeline.rooflines": "builds the model that a roofline describes from every source",
    "compress.pipeline.conversions": "converts, publishes and verifies a checkpoint in further formats",
    "compress.pipeline.convert": "converts the layers of a model from any format to any other",
    "compress.pipeline.model_free": "reads, quantizes, writes and verifies a folder of tensors",
    "compress.pipeline.verify": "compares a checkpoint with its source through every reader",
    "compress.checkpoint.checkpoint": "everything that a checkpoint states, and its weights in a model",
    "compress.passes.contract.context": "every service that a run offers its passes",
    "compress.passes.prepare.rotate": "rotates every kind of link of a block",
    "compress.passes.reshape.narrow": "removes channels, heads and experts",
    "compress.passes.families.learned_rotations": "trains rotations of every link of a model",
    "compress.passes.families.training": "the options and the course of every training pass",
    "compress.passes.quantize.omniquant": "learns clipping, scales and shifts",
    "compress.passes.quantize.spqr": "outliers and two levels of scales in one solver",
    "compress.passes.quantize.lorc": "low-rank terms after any quantizer",
    "compress.passes.quantize.qllm": "splits and merges channels, then learns low-rank terms",
    "compress.passes.quantize.squeezellm": "codebooks and outliers",
    "compress.recipe.schema": "the value that YAML spells",
    "compress.blockwise.sweep": "the one loop over the blocks",
    "compress.passes.families.bits": "what every choice costs, and the budget that the choices share",
    "compress.passes.families.quantizing": "joins grids, overrides, budgets and rounding in the options of passes",
}
MOST_PARAMETERS = 7
"""The most parameters of a function, without self and cls; those that belong together are one value."""
MANY_PARAMETERS: dict[str, str] = {
    "compress.checkpoint.load:load": "a public function: its arguments are named options",
    "compress.decode.attention:attend": "the operands of one instruction",
    "compress.decode.products:codes_linear": "the operands of one instruction",
    "compress.decode.products:rotate": "the operands of one instruction",
    "compress.decode.prompts:attention": "the signature of transformers' attention functions",
    "compress.kernels.cpu.codes:_codes_linear": "the operands of one product",
    "compress.kernels.cpu.packed:of_bytes": "the operands of one product",
    "compress.layers.linear:_check_scheme": "every condition of a scheme",
    "compress.layers.transforms.rounding:of": "the options of activation quantization",
    "compress.native.gpu_columns:round_columns": "the operands of one program",
    "compress.numerics.quant.codes:fit": "the options of a quantizer",
    "compress.numerics.quant.codes:fit_blocks": "the options of a quantizer",
    "compress.numerics.quant.codes:quantize": "the options of a quantizer",
    "compress.numerics.quant.inputs:round_in_groups": "the options of activation quantization",
    "compress.numerics.quant.refine:refined": "the options of a refinement",
    "compress.passes.prepare.rotate:_rotate_further": "every rotation of a block",
    "compress.pipeline.evaluation:evaluate": "the options of `compress eval`",
    "compress.pipeline.export:save": "the public options of a saved model",
    "compress.pipeline.model_free:quantize_folder": "the options of `compress quantize --model-free`",
    "compress.pipeline.run:run": "the public options of a run",
    "compress.pipeline.apply:apply": "the public options of passes in memory",
    "compress.pipeline.imatrix:imatrix": "the options of `compress imatrix`",
    "compress.pipeline.sensitivity:sensitivity": "the options of `compress sensitivity`",
    "compress.pipeline.starting:_spelled": "the options of `compress init`",
    "compress.recipe.targets:recipe_text": "the fields of a recipe",
}
"""'module' and 'module:function' that exceed a budget, and what their one responsibility is."""
OF_THE_LANGUAGE = ("compress.cli", "compress.kernels.triton", "compress.native.gpu_programs")
"""Modules without the budget of parameters: click passes every option of a command, and Triton has no structures."""

CACHES = f"{PACKAGE}.models.caches"
NAME_POLICIES = (f"{PACKAGE}.passes.cache", f"{PACKAGE}.checkpoint.formats")
"""Folders that may name a cache policy."""

ENVIRONMENT = {
    "compress.cli.sweep": "turns the reports of Ray to its authors off, unless the user has decided",
    "compress.cli.commands": "sets the defaults of libraries for the process that it owns",
    "compress.models.child_process": "hands the environment on, without relative places of modules",
    "compress.native.choice": "COMPRESS_KERNELS forces an instruction set or plain torch, for tests and comparisons",
}
CHILDREN = {
    "compress.models.child_process:run_function": "leaves untrusted places out of the path of the process",
    "compress.models.child_process:start_function": "as run_function",
    "compress.models.child_process:_command": "the command of both",
}
"""'module:function' that starts processes, and why."""
BROAD = {
    "compress.passes.contract.processes:together": "tells the other processes of any error, and raises it on",
    "compress.pipeline.attempts:attempt": "a run of a sweep may fail in any way; told as one failed row, with the traceback in its log",
    "compress.cli.group:main": "an error that is a bug is one line with its type too; --debug shows the traceback",
    "compress.models.chat_template:serve": "templates of others may raise anything; told as one line",
    "compress.evaluation.harness.tasks:attempt": "tasks and data sets of others may raise anything; told as one failed task",
    "compress.pipeline.finish:measure": "reports what was measured before an evaluator failed, and raises its error",
    "compress.pipeline.evaluation:reported_on_failure": "reports what was measured whatever happened, and raises on",
    "compress.checkpoint.sources.hub:fetch": "the hub's client raises errors of several HTTP libraries; told as one ModelError",
    "compress.checkpoint.sources.files:read_tokenizer": "the tokenizers library raises Exception itself; told as one ModelError",
    "compress.recipe.plugins:executed": "the code of others may raise anything; told as one RecipeError",
    "compress.errors:call_foreign": "code of others on any input may raise anything; raised as one CannotRun",
    "compress.checkpoint.containers.files:atomic": "removes the partial file whatever happened, and raises on",
}
"""'module:function' with a broad except, and why."""

MOST_CAUGHT = 3
"""The most classes that a handler catches: more of them are a broad except. `call_foreign` is for code of others."""
MANY_CAUGHT = {
    "compress.data.dataset_rows": "the library of data sets and its HTTP client raise classes without a common base",
}
"""Modules with such handlers, and why."""

TENSOR_WRITERS = {"save_file", "write_shard", "serialize_file", "GGUFWriter"}
"""Functions that write a file of tensors."""
TENSOR_FILES = {
    "compress.checkpoint.writer": "the only code that writes a model",
    "compress.checkpoint.containers.safetensors_writing": "the container of shards",
    "compress.checkpoint.containers.gguf": "the container of one-file checkpoints",
    "compress.checkpoint.containers.imatrix": "importance matrices, which hold no weights",
    "compress.checkpoint.sources.gguf_parts": "merges the parts of a file of another program",
    "compress.checkpoint.sources.gguf": "converts a GGUF file to a folder of the cache, with the container of shards",
    "compress.evaluation.divergence": "logits of the original model",
    "compress.blockwise.store": "activations between blocks",
    "compress.train.checkpoint": "the state of a training pass",
    "compress.train.teacher": "targets of a teacher",
    "compress.pipeline.runtime_check": "token ids for the process of another program",
    "compress.pipeline.onnx_process": "logits of another program",
    "compress.pipeline.openvino_process": "logits of another program",
    "compress.pipeline.openvino": "codes for the process of another program",
}
"""Modules that write files of tensors, and what they hold."""

VAGUE = {
    "found",
    "one",
    "where",
    "before",
    "known",
    "first",
    "kept",
    "seen",
    "own",
    "given",
    "after",
    "held",
    "asked",
    "wanted",
    "others",
    "other",
    "last",
    "done",
    "made",
    "named",
    "taken",
    "told",
    "whole",
    "rest",
    "every",
    "each",
    "gone",
    "left",
    "here",
    "there",
    "now",
    "then",
    "what",
    "which",
    "some",
    "both",
    "same",
}
"""Pronouns and participles: a name says what a thing is."""
VAGUE_SHARE = 0.015
"""The largest share of such names among the names that a folder binds."""
LARGER_VAGUE_SHARES = {"results": 0.02}
"""Folders with a larger share: the names of `results` are the keys of report.json, which stay."""

REPORT = "report.json"
REPORT_FILES = {
    "compress.report.write": "reads it for `compress report` and `compress compare`",
    "compress.report.pareto": "`compress compare` draws runs from their reports",
    "compress.cli.report": "`compress report` prints it",
    "compress.pipeline.sweep": "`compress sweep` compares its runs by their reports",
    "compress.evaluation.evidence": "leaves it out of the digest of a checkpoint",
    "compress.checkpoint.containers.digests": "leaves it out of the files of a model",
    "compress.pipeline.output": "an output folder may hold one",
    "compress.pipeline.publish": "its presence shows that a run was verified",
}
"""Modules that read report.json or name the file: it is evidence, never an input of a run or of loading a model."""

LU = {
    "solve",
    "solve_ex",
    "inv",
    "inv_ex",
    "inverse",
    "lu",
    "lu_factor",
    "lu_factor_ex",
    "lu_solve",
    "lu_unpack",
    "tensorsolve",
    "tensorinv",
    "det",
    "slogdet",
    "logdet",
    "matrix_power",
}
"""Names of torch that compute LU factors; NumPy has some of them. On the CPU, batches of them are wrong above 150 rows after
`torch.set_num_threads`."""
SOLVER = "compress.numerics.linalg:solve_general"
"""The function that may: it takes one matrix."""

RUNTIME = "llama.cpp"
"""A program that is called like an architecture."""
NAMED = {
    "compress.pipeline.rate_trials": "models to measure a machine with have to have some architecture",
    "compress.testing.model": "a model to try passes on has to have some architecture",
    "compress.checkpoint.formats.gguf_files.vocabulary": "GGUF files call their two kinds of tokenizers gpt2 and llama",
    "compress.checkpoint.sources.gguf_contents": "names a program and a function of llama.cpp",
    "compress.checkpoint.formats.gguf_files.architecture": "one kind of rotary embedding is called llama3 in configurations",
}
"""Modules that name an architecture, and why."""

ORDINARY = {
    "align",
    "beam",
    "bit",
    "canary",
    "clip",
    "encoderdecoder",
    "funnel",
    "git",
    "informer",
    "led",
    "opt",
    "radio",
    "rag",
    "sam",
}
"""Model types that are also words one needs."""

FOREIGN = {
    "_buffers",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_get_default_store",
    "_int_mm",
    "_is_view",
    "_name_or_path",
    "_parameters",
    "_protected_args",
    "_repr_html_",
    "_repr_svg_",
    "_shared_state",
}
"""Private names of torch, transformers, accelerate, click and Jupyter, for which they have no public ones."""

DOCUMENTED_ELSEWHERE = {"forward", "extra_repr", "model_post_init"}
"""Methods of torch and pydantic that are overridden here."""


# Reading the source


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text(encoding="utf-8"))


def floor_of(module: str) -> int | None:
    parts = module.split(".")
    names = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((FLOORS[name] for name in names if name in FLOORS and (name != PACKAGE or module == PACKAGE)), None)


def functions(tree: ast.AST):
    """(name, node) of every function, methods and inner ones, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node


def type_checking(tree: ast.AST) -> set[ast.AST]:
    """Everything under `if TYPE_CHECKING:`."""
    tests = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test).endswith("TYPE_CHECKING")]
    return {inner for test in tests for statement in test.body for inner in ast.walk(statement)}


def own_imports(tree: ast.AST, known=FILES) -> list[tuple[str, ast.AST]]:
    """(module of the package, node) for every import of the package itself."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node) for alias in node.names if alias.name.split(".")[0] == PACKAGE]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import hides the floor"
            if (node.module or "").split(".")[0] == PACKAGE:
                full = [f"{node.module}.{alias.name}" for alias in node.names]
                found += [(name if name in known else node.module, node) for name in full]
    return found


def dotted(node: ast.AST) -> str:
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


# The rules


def late_imports(tree: ast.AST) -> list[str]:
    """Imports of the package itself that are inside functions."""
    inside = {inner for _, function in functions(tree) for inner in ast.walk(function)}
    return [f"line {node.lineno}: {name}" for name, node in own_imports(tree) if node in inside]


def upward(module: str, tree: ast.AST) -> list[str]:
    """Imports of a higher floor; what only type checkers see, too."""
    here = floor_of(module)
    return [f"line {node.lineno}: {name}" for name, node in own_imports(tree) if floor_of(name) > here]


def many_parameters(tree: ast.AST, most: int) -> list[str]:
    """Functions with more parameters than `most`, without self and cls."""
    found = []
    for name, node in functions(tree):
        every = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        count = len([*every[every[:1] in (["self"], ["cls"]) :]])
        if count > most:
            found.append(f"{name}: {count} parameters")
    return found


def switched_off(text: str) -> list[str]:
    """Comments that keep the formatter away."""
    return [f"line {n}" for n, line in enumerate(text.splitlines(), 1) if re.search(r"#\s*fmt:\s*(?:skip|off)", line)]


def bound_names(tree: ast.AST) -> list[str]:
    """The names that are assigned or are parameters."""
    stored = [n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    return stored + [n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)]


def vague_share(trees: Iterable[ast.AST]) -> float:
    """The share of vague names among those that are bound."""
    names = [name for tree in trees for name in bound_names(tree)]
    return sum(name in VAGUE for name in names) / max(1, len(names))


def prints(tree: ast.AST) -> list[str]:
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [f"line {c.lineno}" for c in calls if dotted(c.func) in ("print", "sys.stdout.write", "sys.stderr.write")]


def environment(tree: ast.AST) -> list[str]:
    names = ("os.environ", "os.getenv", "os.putenv", "environ", "getenv")
    return [f"line {node.lineno}" for node in ast.walk(tree) if dotted(node) in names]


def unchecked_statuses(tree: ast.AST) -> list[str]:
    """Calls of the kernel library in an assert, and their results in one: `python -O` removes both."""
    found = []
    for _, function in functions(tree):
        assigned = [node for node in ast.walk(function) if isinstance(node, ast.Assign) and of_library(node.value)]
        statuses = {target.id for node in assigned for target in node.targets if isinstance(target, ast.Name)}
        for node in ast.walk(function):
            if isinstance(node, ast.Assert):
                inner = list(ast.walk(node))
                names = {part.id for part in inner if isinstance(part, ast.Name)}
                found += [f"line {node.lineno}"] if names & statuses or any(map(of_library, inner)) else []
    return found


def of_library(node: ast.AST) -> bool:
    """Whether a node calls a function of the kernel library, by its name or by a name that is computed."""
    if not isinstance(node, ast.Call):
        return False
    by_name = isinstance(node.func, ast.Attribute) and node.func.attr.startswith("compress_")
    return by_name or (isinstance(node.func, ast.Call) and dotted(node.func.func) == "getattr")


def child_processes(tree: ast.AST) -> list[str]:
    """'function' of every call that starts a process, and modules that start some."""
    modules = {"multiprocessing", "torch.multiprocessing", "concurrent.futures.process", "pty", "asyncio.subprocess"}
    system = re.compile(
        r"os\.(system|popen|fork|forkpty|(exec|spawn|posix_spawn)\w*)|sys\.executable|subprocess\.[a-z]\w+"
    )
    of_system = {name.removeprefix("os.") for name in ("os.system", "os.popen", "os.fork", "os.posix_spawn")}
    owners = {inner: name for name, function in functions(tree) for inner in ast.walk(function)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name in modules]
        elif isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            started = {"os": of_system, "sys": {"executable"}, "subprocess": names, "torch": {"multiprocessing"}}
            pools = {"ProcessPoolExecutor"} if node.module == "concurrent.futures" else set()
            if node.module in modules or names & (started.get(node.module or "", set()) | pools):
                found.append(f"line {node.lineno}: {node.module}")
        elif system.fullmatch(dotted(node)) or dotted(node) in (
            "subprocess.Popen",
            "concurrent.futures.ProcessPoolExecutor",
            "torch.multiprocessing",
        ):
            found.append(owners.get(node, f"line {node.lineno}"))
    return found


def assigned_attributes(tree: ast.AST, names: set[str]) -> list[str]:
    """'run.name' of every assignment to an attribute with one of these names of a variable or attribute called run."""
    stored = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and not isinstance(n.ctx, ast.Load)]
    places = [dotted(n) or "" for n in stored if n.attr in names]
    return [place for place in places if place.split(".")[-2:-1] == ["run"]]


def broad_excepts(tree: ast.AST) -> list[str]:
    """'function' of every handler that takes all errors."""
    found = []
    for name, function in functions(tree):
        for node in ast.walk(function):
            if isinstance(node, ast.ExceptHandler):
                kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
                if any(kind is None or dotted(kind) in ("Exception", "BaseException") for kind in kinds):
                    found.append(name)
    return found


def many_caught(tree: ast.AST) -> list[str]:
    """Handlers, `suppress` and names that they use, with more than `MOST_CAUGHT` classes."""
    tuples = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def count(kind: ast.AST) -> int:
        if isinstance(kind, ast.Starred):
            return count(kind.value)
        if isinstance(kind, ast.Name) and kind.id in tuples:
            return count(tuples[kind.id])
        return sum(count(element) for element in kind.elts) if isinstance(kind, ast.Tuple) else 1

    imported = {a.asname or a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
    found = []
    for node in ast.walk(tree):
        kinds = [node.type] if isinstance(node, ast.ExceptHandler) and node.type is not None else []
        if isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] == "suppress":
            kinds = node.args
        several = {n.id for kind in kinds for n in ast.walk(kind) if isinstance(n, ast.Name) and n.id.isupper()}
        if sum(count(kind) for kind in kinds) > MOST_CAUGHT or several & imported:
            found.append(f"line {node.lineno}")
    return found


def tensor_writers(tree: ast.AST) -> list[str]:
    """Calls of functions that write tensors to a file, by any name of their module."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [f"line {c.lineno}" for c in calls if dotted(c.func).rpartition(".")[2] in TENSOR_WRITERS]


def report_readers(tree: ast.AST) -> list[str]:
    """Constants that name report.json, docstrings aside, and imports of functions that read a report."""
    readers = {"read_report", "from_report"}
    found = []
    for node in ast.walk(tree):
        if (isinstance(node, ast.Constant) and node.value == REPORT) or (
            isinstance(node, ast.ImportFrom) and readers & {alias.name for alias in node.names}
        ):
            found.append(f"line {node.lineno}")
    return found


def unsafe_readers(tree: ast.AST) -> list[str]:
    """Whatever can run code that comes in a file."""
    modules = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
    calls = {"torch.load", "yaml.load", "yaml.full_load", "yaml.unsafe_load", "eval", "exec"}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in modules]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in modules:
            found.append(node.module)
        elif isinstance(node, ast.Call) and dotted(node.func) in calls:
            found.append(dotted(node.func))
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            found.append("allow_pickle")
    return found


def lu_factors(tree: ast.AST) -> list[str]:
    """'function: name' of what computes LU factors: attributes of anything, and names imported from torch.

    `solve`, which methods of our own are called, too, counts as one of linalg.
    """
    inside = {node: name for name, function in functions(tree) for node in ast.walk(function)}
    found = []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Attribute) and (node.attr != "solve" or dotted(node.value).endswith("linalg")):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = [alias.name for alias in node.names]
        found += [f"{inside.get(node, '')}: {name}" for name in names if name in LU]
    return found


RENDERER = "compress.models.chat_template"
"""The module that renders chat templates, within limits."""


def template_calls(tree: ast.AST) -> list[str]:
    """Attributes and imports of functions of transformers that render chat templates without limits."""
    names = {"apply_chat_template", "render_jinja_template"}
    calls = [node.func.attr for node in ast.walk(tree) if isinstance(node, ast.Call) and hasattr(node.func, "attr")]
    imports = [alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
    return [name for name in (*calls, *imports) if name in names]


MODEL_TYPES = {re.sub(r"[-_]", "", name.lower()) for name in CONFIG_MAPPING_NAMES} - ORDINARY


def architectures(text: str) -> set[str]:
    """Model types of transformers that the text names, in any spelling: gpt_neox, GPTNeoX, gpt-neox."""
    found = set()
    for word in re.findall(r"[A-Za-z][A-Za-z0-9]*(?:[-_][A-Za-z0-9]+)*", text):
        pieces = [p for part in re.split(r"[-_]", word) for p in re.findall(r"[A-Z]*[a-z0-9]+|[A-Z]+[0-9]*", part)]
        lowered = [piece.lower() for piece in pieces]
        spans = {"".join(lowered[i:j]) for i in range(len(lowered)) for j in range(i + 1, min(i + 6, len(lowered)) + 1)}
        spans |= {re.sub(r"[-_]", "", word.lower())}
        found |= spans & MODEL_TYPES
        found |= {span for span in (s.rstrip("0123456789") for s in spans) if len(span) > 3 and span in MODEL_TYPES}
    return found


def asked_class_names(tree: ast.AST) -> list[str]:
    """Comparisons with the name of an object's class."""
    comparisons = (node for node in ast.walk(tree) if isinstance(node, ast.Compare))
    asked = re.compile(r"type\(.*\)\.__name__|\.__class__\.__name__|\.model_type\b")
    return [f"line {c.lineno}" for c in comparisons if asked.search(ast.unparse(c))]


def classes_in(*places: str) -> frozenset[str]:
    """The names of all classes that modules in these folders define."""
    modules = [name for name in FILES if name.startswith(tuple(f"{place}." for place in places))]
    return frozenset(n.name for module in modules for n in ast.walk(tree_of(module)) if isinstance(n, ast.ClassDef))


def kinds_of_parts() -> frozenset[str]:
    """The classes of parts and transforms."""
    return classes_in(f"{PACKAGE}.layers.parts", f"{PACKAGE}.layers.transforms")


def kinds_of_passes() -> frozenset[str]:
    return classes_in(f"{PACKAGE}.passes.families", *(f"{PACKAGE}.passes.{kind}" for kind in KINDS))


def asked_kinds(tree: ast.AST, kinds: Iterable[str]) -> list[str]:
    """The classes among `kinds` that code asks for: with isinstance, issubclass, `type(x) is` or a case of match."""
    found = []
    for node in ast.walk(tree):
        asked: list[ast.AST] = []
        if isinstance(node, ast.Call) and dotted(node.func) in ("isinstance", "issubclass"):
            asked = node.args[1:]
        elif isinstance(node, ast.Compare) and ast.unparse(node.left).startswith("type("):
            asked = node.comparators
        elif isinstance(node, ast.MatchClass):
            asked = [node.cls]
        names = {dotted(inner).rpartition(".")[2] for part in asked for inner in ast.walk(part)}
        found += sorted(names & set(kinds))
    return found


PRIVATE = re.compile(r"_[a-z]\w*")
PRIVATE_PATH = re.compile(r"[A-Za-z]\w*(?:\.\w+)*\._[a-z]\w*")
PATCHERS = {"setattr", "getattr", "delattr", "hasattr", "setitem", "delitem", "object"}


def private_names(tree: ast.AST) -> list[str]:
    """Private names that are imported, read from another object, or written as text for those who patch."""
    found = []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            own = PRIVATE.fullmatch(node.attr) and dotted(node.value) in ("self", "cls")
            names = [] if own else [node.attr]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and PRIVATE_PATH.fullmatch(node.value):
            names = [node.value.rpartition(".")[2]]
        elif isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] in PATCHERS:
            names = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        found += [f"line {node.lineno}: {name}" for name in names if PRIVATE.fullmatch(name) and name not in FOREIGN]
    return found


def exact_outputs(tree: ast.AST) -> list[str]:
    """Assertions that outputs of models are equal bit for bit, or that a verification measured less than its tolerance."""

    def is_output(node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute):
            return node.attr == "logits" and isinstance(node.value, ast.Call)
        return isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] in ("logits", "logits_of")

    found = []
    negated = {part for node in ast.walk(tree) if isinstance(node, ast.UnaryOp) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and dotted(node.func) == "torch.equal" and node not in negated:
            found += [f"line {node.lineno}: torch.equal"] if any(map(is_output, node.args)) else []
        elif isinstance(node, ast.Compare) and isinstance(limit := node.comparators[-1], ast.Constant):
            read = re.search(r"verified.*\b(own|transformers)\b", ast.unparse(node.left))
            exact = (
                isinstance(limit.value, int | float)
                and limit.value < 1e-3
                and isinstance(node.ops[-1], ast.Eq | ast.LtE)
            )
            found += [f"line {node.lineno}: {read[1]}"] if read and exact else []
    return found


def undocumented(tree: ast.Module, documented: frozenset[str] = frozenset()) -> list[str]:
    """Public functions and classes, and methods that no class describes, without a docstring."""
    found = [] if ast.get_docstring(tree) else ["the module"]

    def visit(body, prefix, inside):
        for node in body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            elsewhere = inside and node.name in documented | DOCUMENTED_ELSEWHERE
            if not ast.get_docstring(node) and not elsewhere:
                found.append(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{node.name}.", True)

    visit(tree.body, "", False)
    return found


@cache
def documented_methods() -> frozenset[str]:
    """Methods that some class of the package describes: those who override it need not say it again."""
    classes = [n for module in FILES for n in ast.walk(tree_of(module)) if isinstance(n, ast.ClassDef)]
    return frozenset(name for c in classes for name, node in functions(c) if ast.get_docstring(node))


MACHINE_PATH = re.compile(r"(?<![\w.~}/])/(?:" + "|".join(("work", "tmp", "home", "root", "Users", "mnt")) + r")/\w")


# The tests: each rule, all modules


def broken(rule: Callable[[str], Iterable[object]], modules: Iterable[str] = FILES) -> str:
    """A line 'module: place' for every place that breaks the rule; empty when none does."""
    return "\n".join(f"{module}: {place}" for module in modules for place in rule(module))


def holds(rule: Callable[[str], Iterable[object]], remedy: str, modules: Iterable[str] = FILES) -> None:
    found = broken(rule, modules)
    assert not found, f"{remedy}\n{found}"


def test_every_module_is_in_a_folder_that_is_described():
    holds(lambda m: ["no floor"] if floor_of(m) is None else [], "give it a place in FOLDERS, as DESIGN has it")


def test_at_most_five_files_are_at_the_top():
    assert {path.stem for path in (ROOT / PACKAGE).glob("*.py")} == TOP and len(TOP) <= 5


def test_imports_only_go_down():
    holds(lambda m: upward(m, tree_of(m)), "imports of a higher folder")


def test_imports_make_no_cycle():
    """Not even in one folder."""
    below = {}
    for module in FILES.keys() - {PACKAGE}:
        seen_by_checkers = type_checking(tree_of(module))
        below[module] = {n for n, node in own_imports(tree_of(module)) if node not in seen_by_checkers} - {module}
    done: set[str] = set()

    def descend(module, path):
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for name in below.get(module, ()):
                descend(name, [*path, module])
            done.add(module)

    for module in below:
        descend(module, [])


def test_the_package_is_not_imported_inside_functions():
    holds(lambda m: () if m in LATE_IMPORTS else late_imports(tree_of(m)), "imports inside of functions")


FLAG = re.compile(r"(?<![\w-])--[a-z]")
OF_COMMANDS = re.compile(r"compress [a-z]+ |launch |llama-gguf-split |hf auth|pip ")
"""Commands whose options are named in messages."""
OF_THE_COMMAND_LINE = ("compress.cli", "compress.recipe.settings", "compress.recipe.starts")


def raised_flags(tree: ast.AST) -> list[str]:
    """Return the texts of raised errors that name an option of the command line."""
    raised = [node for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    texts = [
        "".join(part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str))
        for node in raised
    ]
    return [text for text in texts if FLAG.search(text) and not OF_COMMANDS.search(text)]


def test_errors_of_the_package_name_no_options_of_the_command_line():
    """They are raised in Python too, where an option is an argument."""
    inner = [name for name in FILES if not name.startswith(OF_THE_COMMAND_LINE)]
    holds(lambda m: raised_flags(tree_of(m)), "an error names an option of the command line", inner)


def test_passes_do_not_know_each_other():
    folders = tuple(f"{PACKAGE}.passes.{kind}." for kind in KINDS)
    passes = [name for name in FILES if name.startswith(folders)]
    imported = lambda m: [n for n, _ in own_imports(tree_of(m)) if n.startswith(folders)]  # noqa: E731
    holds(imported, "a pass imports another", passes)


def test_only_layers_and_kernels_ask_which_kind_a_part_is():
    """They ask the part for what they need; a new kind touches one file."""
    inside = (f"{PACKAGE}.layers", f"{PACKAGE}.kernels")
    outside = [name for name in FILES if not name.startswith(inside)]
    asked = lambda m: asked_kinds(tree_of(m), kinds_of_parts())  # noqa: E731
    holds(asked, "a kind of part is asked for; let the part answer", outside)


def test_the_pipeline_asks_for_no_family_of_passes():
    """It asks a pass for its facts and needs; a new family touches one file."""
    pipeline = [name for name in FILES if name.startswith(f"{PACKAGE}.pipeline")]
    asked = lambda m: asked_kinds(tree_of(m), kinds_of_passes())  # noqa: E731
    holds(asked, "a family of passes is asked for; let the pass answer", pipeline)


def test_decode_is_used_by_its_contract_alone():
    """`compress.decode.accelerate_generation` is public; its modules are internal."""
    outside = [name for name in FILES if not name.startswith(f"{PACKAGE}.decode")]
    internal = lambda m: [n for n, _ in own_imports(tree_of(m)) if n.startswith(f"{PACKAGE}.decode.")]  # noqa: E731
    holds(internal, "import accelerate_generation from compress.decode", outside)


def named_policies(tree: ast.AST) -> list[str]:
    """The imported files of cache policies."""
    contract = {f"{CACHES}.base", f"{CACHES}.attentions"}
    return [name for name, _ in own_imports(tree) if name.startswith(f"{CACHES}.") and name not in contract]


def test_cache_policies_are_used_by_their_contract_alone():
    """A new policy is one file and the pass that installs it. A format names the policy that its config states."""
    outside = [name for name in FILES if not name.startswith((CACHES, *NAME_POLICIES))]
    holds(lambda m: named_policies(tree_of(m)), "a cache policy is named; use `CachePolicy`", outside)


def test_no_file_imports_too_much():
    def imported(module):
        count = len({name for name, _ in own_imports(tree_of(module))})
        return [f"{count} modules"] if count > MOST_IMPORTS and module not in MANY_IMPORTS else []

    holds(
        imported, f"more than {MOST_IMPORTS} modules of the package imported: divide what the file is responsible for"
    )


def test_no_function_has_too_many_parameters():
    def large(module):
        if module.startswith(OF_THE_LANGUAGE):
            return []
        found = many_parameters(tree_of(module), MOST_PARAMETERS)
        return [f for f in found if f"{module}:{f.partition(':')[0]}" not in MANY_PARAMETERS]

    holds(large, f"more than {MOST_PARAMETERS} parameters: make those that belong together one value")


def test_the_formatter_is_never_switched_off():
    files = [path for top in ("compress", "tests", "notebooks", "docs", "eval") for path in (ROOT / top).rglob("*.py")]
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}
    holds(lambda name: switched_off(texts[name]), "let ruff format the code", texts)


def share_of_folder(folder: str) -> float:
    return vague_share(tree_of(module) for module in FILES if f"{module}.".startswith(f"{PACKAGE}.{folder}."))


def test_names_say_what_a_thing_is():
    folders = {module.split(".")[1] for module in FILES if module.count(".") > 1}
    shares = {folder: share_of_folder(folder) for folder in folders}
    assert (
        len(shares) > 8
        and {folder: share for folder, share in shares.items() if share > LARGER_VAGUE_SHARES.get(folder, VAGUE_SHARE)}
        == {}
    )


def test_a_run_does_not_change():
    """Passes, sweeps and readers share one value; what differs between them is another value, made by `replace`."""
    assert Run.__dataclass_params__.frozen
    names = {field.name for field in fields(Run)}
    holds(lambda m: assigned_attributes(tree_of(m), names), "make another Run with dataclasses.replace")


def test_nothing_prints():
    holds(lambda m: prints(tree_of(m)), "only the command line prints, by click")


def test_commands_print_through_one_function():
    """Names of tensors and files are printed, and could command a terminal."""
    allowed = {"compress.cli.show", "compress.cli.completion"}
    echoes = lambda tree: [f"line {n.lineno}" for n in ast.walk(tree) if dotted(n) in ("click.echo", "click.secho")]  # noqa: E731
    holds(lambda m: () if m in allowed else echoes(tree_of(m)), "use compress.cli.show.echo")


def test_nothing_reads_the_environment():
    holds(lambda m: () if m in ENVIRONMENT else environment(tree_of(m)), "only the command line reads the environment")


def test_statuses_of_the_library_are_no_assertions():
    holds(lambda m: unchecked_statuses(tree_of(m)), "check_status raises, also under python -O")
    for line in (
        "assert lib.compress_run(x) == 0",
        "assert getattr(lib, n)(x) == 0",
        "s = lib.compress_a(x); assert not s",
    ):
        assert unchecked_statuses(ast.parse(f"def f(): {line}")) == ["line 1"]


def test_one_function_starts_processes():
    """Each process that is started elsewhere would need the same care for the places that it imports from."""
    holds(lambda m: [f for f in child_processes(tree_of(m)) if f"{m}:{f}" not in CHILDREN], "use run_function")


def test_errors_are_caught_by_their_names():
    holds(lambda m: [f for f in broad_excepts(tree_of(m)) if f"{m}:{f}" not in BROAD], "name the errors")


def test_one_module_writes_models():
    writers = lambda m: () if m in TENSOR_FILES else tensor_writers(tree_of(m))  # noqa: E731
    holds(writers, "write a model with compress.checkpoint.writer")


def test_a_report_is_no_input():
    holds(lambda m: () if m in REPORT_FILES else report_readers(tree_of(m)), "store it in the checkpoint")


def test_a_handler_catches_few_classes():
    holds(lambda m: () if m in MANY_CAUGHT else many_caught(tree_of(m)), "raise a typed error, or use call_foreign")


def test_chat_templates_are_rendered_within_limits():
    holds(lambda m: [] if m == RENDERER else template_calls(tree_of(m)), "use render_chat")


def test_only_one_matrix_at_a_time_has_lu_factors():
    def rule(module):
        return [place for place in lu_factors(tree_of(module)) if f"{module}:{place.partition(':')[0]}" != SOLVER]

    holds(rule, "call solve_positive, or solve_general with one matrix, of compress.numerics.linalg")


def test_no_file_can_run_code():
    holds(lambda m: unsafe_readers(tree_of(m)), "models and recipes are data")


def test_no_architecture_is_named():
    def named(m: str):
        return () if m in NAMED else sorted(architectures(FILES[m].read_text(encoding="utf-8").replace(RUNTIME, "")))

    holds(named, "structure is found, not known")


REFERENCE = re.compile(r"`((?:compress\.)?[a-z_]+(?:\.[a-z_]+)+)\b")


def missing_modules(text: str) -> list[str]:
    """Names in backticks that begin with a folder of the package, but name no module."""
    found = []
    for name in REFERENCE.findall(text):
        parts = name.removeprefix(f"{PACKAGE}.").split(".")
        if parts[-1] in ("md", "html", "json", "py"):
            continue
        least = 1 if name.startswith(f"{PACKAGE}.") else 2
        heads = [".".join([PACKAGE, *parts[:n]]) for n in range(len(parts), least - 1, -1)]
        if (ROOT / PACKAGE / parts[0]).is_dir() and not any(head in FILES for head in heads):
            found.append(name)
    return found


def test_modules_in_the_documentation_exist():
    texts = {module: path.read_text(encoding="utf-8") for module, path in FILES.items()}
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "tests").rglob("*.md")]
    texts |= {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in pages}
    del texts["CHANGELOG.md"]
    holds(lambda name: missing_modules(texts[name]), "name the module where it is now", texts)


FOUND_BY_FILE = {"AWQ", "GPTQ", "KVCache"}
"""Classes of several folders that are found by the name of their file: a pass, and a format or an evaluator."""


def test_a_class_name_is_unique():
    places: dict[str, list[str]] = {}
    for module in FILES:
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module)
    shared = {name: modules for name, modules in places.items() if len(modules) > 1}
    assert {name: modules for name, modules in shared.items() if name not in FOUND_BY_FILE} == {}
    assert shared.keys() >= FOUND_BY_FILE


def test_no_class_is_known_by_its_name():
    holds(lambda m: asked_class_names(tree_of(m)), "structure is found, not known")


def test_all_that_is_public_is_documented():
    holds(lambda m: undocumented(tree_of(m), documented_methods()), "write a docstring")


def test_tests_use_no_private_names():
    """A private name may change with every change of what is inside; tests are about what is outside."""
    files = [path for path in sorted((ROOT / "tests").rglob("*.py")) if path != Path(__file__)]
    trees = {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in files}
    found = {name: private_names(tree) for name, tree in trees.items()}
    holds(found.__getitem__, "make it public where it is a unit of its own, or test what it is for", trees)


def test_outputs_of_models_are_compared_within_tolerances():
    """Another processor, and weights at another address, add in another order."""
    files = sorted((ROOT / "tests").rglob("*.py"))
    trees = {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in files}
    found = {name: exact_outputs(tree) for name, tree in trees.items()}
    holds(found.__getitem__, "use same_logits, near_rounded or LOGITS of tests/tolerances.py", trees)


def required_dependencies() -> list[str]:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    [listed] = re.findall(r"^dependencies = \[(.*?)^\]", project, re.DOTALL | re.MULTILINE)
    return re.findall(r'^\s*"([A-Za-z0-9_.-]+)', listed, re.MULTILINE)


def test_every_required_dependency_is_imported():
    """What few need is an extra."""
    imported = set()
    for module in FILES:
        for node in ast.walk(tree_of(module)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            imported |= {name.partition(".")[0] for name in names}
    given = {plain(d) for name, found in packages_distributions().items() if name in imported for d in found}
    required = required_dependencies()
    assert len(required) > 5 and [name for name in required if plain(name) not in given] == []


def plain(name: str) -> str:
    """The name of a distribution as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def table_of_folders() -> str:
    """CONTRIBUTING.md's table of the folders, from the highest to the lowest."""
    paths = {name: f"{name.replace('.', '/')}{'.py' if name in TOP else '/'}" for name in FOLDERS}
    rows = [f"| `{paths[name]}` | {text} |" for name, text in reversed(FOLDERS.items())]
    return "\n".join(["| `compress/` | |", "|---|---|", *rows])


def test_the_table_of_folders_is_that_of_the_tests():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert table_of_folders() in text, f"put this into CONTRIBUTING.md:\n{table_of_folders()}"


def shipped_files() -> list[Path]:
    kinds = {".py", ".yaml", ".yml", ".md", ".toml", ".txt", ".ipynb", ".json", ".cpp", ".h"}
    kept = [ROOT / "Makefile"]
    for top in ("compress", "recipes", "calibration", "eval", "notebooks", "tests"):
        kept += [path for path in (ROOT / top).rglob("*") if path.suffix in kinds and "__pycache__" not in path.parts]
    return [*kept, *(path for path in ROOT.iterdir() if path.suffix in kinds)]


def test_no_path_of_one_machine_is_written_down():
    found = {}
    for path in shipped_files():
        if path.name != "tokenizer.json":
            hits = MACHINE_PATH.findall(path.read_text(encoding="utf-8"))
            found |= {str(path.relative_to(ROOT)): hits} if hits else {}
    assert found == {}


# The exceptions are used, and the rules can fail


def test_no_exception_has_outlived_its_reason():
    assert [m for m in LATE_IMPORTS if not late_imports(tree_of(m))] == []
    assert [m for m in NAMED if not architectures(FILES[m].read_text(encoding="utf-8"))] == []
    assert [m for m in ENVIRONMENT if not environment(tree_of(m))] == []
    assert [m for m in REPORT_FILES if not report_readers(tree_of(m))] == []
    assert [m for m in MANY_CAUGHT if not many_caught(tree_of(m))] == []
    assert [m for m in TENSOR_FILES if not tensor_writers(tree_of(m))] == []
    for place in CHILDREN:
        module, _, function = place.partition(":")
        assert function in child_processes(tree_of(module))
    for place in BROAD:
        module, _, function = place.partition(":")
        assert function in broad_excepts(tree_of(module))
    assert template_calls(tree_of(RENDERER))
    module, _, function = SOLVER.partition(":")
    assert any(place.startswith(f"{function}: ") for place in lu_factors(tree_of(module)))
    for module in MANY_IMPORTS:
        assert len({name for name, _ in own_imports(tree_of(module))}) > MOST_IMPORTS, module
    for place in MANY_PARAMETERS:
        module, _, function = place.partition(":")
        assert function in {f.partition(":")[0] for f in many_parameters(tree_of(module), MOST_PARAMETERS)}, place


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (late_imports, "def f():\n    from compress.checkpoint.opening import open_model"),
        (late_imports, "class A:\n    def f(self):\n        import compress.recipe"),
        (
            lambda tree: upward("compress.numerics.quant.grids", tree),
            "from compress.checkpoint.opened import OpenModel",
        ),
        (lambda tree: upward("compress.checkpoint.opening", tree), "from compress.pipeline import run"),
        (
            lambda tree: upward("compress.blockwise.store", tree),
            "if TYPE_CHECKING:\n    from compress.recipe import Recipe",
        ),
        (lambda tree: many_parameters(tree, 2), "class A:\n    def f(self, a, b, *, c): pass"),
        (lambda tree: switched_off("x = [1,\n     2]  # fmt: " + "skip"), ""),
        (prints, "print('x')"),
        (prints, "import sys\nsys.stdout.write('x')"),
        (environment, "import os\nos.environ['A'] = '1'"),
        (environment, "import os\nos.getenv('A')"),
        (child_processes, "import subprocess\nsubprocess.run(['x'])"),
        (child_processes, "import subprocess\ndef f():\n    return subprocess.Popen(['x'])"),
        (child_processes, "from subprocess import run"),
        (child_processes, "def f():\n    import multiprocessing"),
        (child_processes, "from torch import multiprocessing"),
        (child_processes, "from torch.multiprocessing import spawn"),
        (child_processes, "from concurrent.futures import ProcessPoolExecutor"),
        (child_processes, "import os\nos.execv('x', [])"),
        (child_processes, "import os\nos.system('x')"),
        (child_processes, "import sys\ncommand = [sys.executable]"),
        (lambda tree: assigned_attributes(tree, {"label"}), "self.run.label = 'x'"),
        (lambda tree: assigned_attributes(tree, {"costs"}), "run.costs |= costs"),
        (broad_excepts, "def f():\n    try:\n        g()\n    except Exception:\n        pass"),
        (broad_excepts, "def f():\n    try:\n        g()\n    except:\n        pass"),
        (broad_excepts, "def f():\n    try:\n        g()\n    except (OSError, Exception):\n        pass"),
        (many_caught, "try:\n    f()\nexcept (A, B, C, D):\n    pass"),
        (many_caught, "MANY = (A, B, C)\ntry:\n    f()\nexcept (OSError, *MANY):\n    pass"),
        (many_caught, "from x import MANY\ntry:\n    f()\nexcept MANY:\n    pass"),
        (many_caught, "with suppress(A, B, C, D):\n    f()"),
        (tensor_writers, "from safetensors.torch import save_file\nsave_file(tensors, path)"),
        (tensor_writers, "import safetensors.torch as st\nst.save_file(tensors, path)"),
        (report_readers, "text = (folder / 'report.json').read_text()"),
        (report_readers, "from compress.report.write import read_report"),
        (unsafe_readers, "import torch\ntorch.load('x')"),
        (unsafe_readers, "from pickle import loads"),
        (unsafe_readers, "import yaml\nyaml.load(text, Loader=yaml.Loader)"),
        (unsafe_readers, "np.load(path, allow_pickle=True)"),
        (lu_factors, "def f(m):\n    return torch.linalg.solve_ex(m, m)"),
        (template_calls, "tokenizer.apply_chat_template(messages)"),
        (template_calls, "from transformers.utils.chat_template_utils import render_jinja_template"),
        (lu_factors, "from torch.linalg import inv"),
        (lu_factors, "solve = torch.linalg.lu_factor"),
        (lu_factors, "x = matrix.inverse()"),
        (asked_class_names, "if type(module).__name__ == 'Attention': pass"),
        (asked_class_names, "if config.model_type in ('a', 'b'): pass"),
        (lambda tree: asked_kinds(tree, {"Kind"}), "isinstance(x, weights.Kind)"),
        (lambda tree: asked_kinds(tree, {"Kind"}), "isinstance(x, Other | Kind)"),
        (lambda tree: asked_kinds(tree, {"Kind"}), "issubclass(kind, (Other, Kind))"),
        (lambda tree: asked_kinds(tree, {"Kind"}), "type(x) is Kind"),
        (lambda tree: asked_kinds(tree, {"Kind"}), "match x:\n    case Kind(): pass"),
        (named_policies, "from compress.models.caches.grid import GridCache"),
        (private_names, "from compress.checkpoint.sources import _fetch"),
        (private_names, "store._items"),
        (private_names, "patch.setattr(loop, '_take', f)"),
        (private_names, "patch.setattr('compress.train.loop.Trainer._take', f)"),
        (exact_outputs, "assert torch.equal(logits(again), wanted)"),
        (exact_outputs, "assert torch.equal(again(ids).logits, model(ids).logits)"),
        (exact_outputs, "assert report['verified']['own'] == 0"),
        (exact_outputs, "assert verified.transformers <= 1e-5"),
        (undocumented, "def public(): pass"),
        (undocumented, "'''Doc.'''\nclass Public:\n    '''Doc.'''\n    def method(self): pass"),
    ],
)
def test_every_rule_finds_what_breaks_it(rule, text):
    assert rule(ast.parse(text))


def test_modules_that_are_gone_are_found():
    text = "as in `layers.gone.of_it`, not `layers.linear.shape_of` or `weights.bring`"
    assert missing_modules(text) == ["layers.gone.of_it"]


def test_vague_names_are_counted():
    assert vague_share([ast.parse("found = f(lambda one: codes)\ncodes, mask = 1, 2")]) == 0.5


@pytest.mark.parametrize(
    "text",
    [
        "LlamaAttention",
        "model_type == 'qwen2'",
        "gpt_neox",
        "GPTNeoXLayer",
        "is_opt or bloom",
        "for Llama-3",
        "gpt2_names",
    ],
)
def test_architectures_are_found_in_every_spelling(text):
    assert architectures(text)


@pytest.mark.parametrize(
    "text", ["4 bits a weight", "the options clip", "git", "GPTQ", "SmoothQuant", "phase philosophy"]
)
def test_ordinary_words_are_no_architectures(text):
    assert architectures(text) == set()


@pytest.mark.parametrize("path", ["/".join(("", "home", "me", "model")), "'" + "/".join(("", "tmp", "x")) + "'"])
def test_paths_of_a_machine_are_found(path):
    assert MACHINE_PATH.search(path)


def test_the_oldest_python_is_the_same_everywhere():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    minors = sorted(int(minor) for minor in re.findall(r'"Programming Language :: Python :: 3\.(\d+)"', project))
    assert f'requires-python = ">=3.{minors[0]}"' in project
    assert minors == list(range(minors[0], minors[-1] + 1))
