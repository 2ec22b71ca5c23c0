"""The public surface is a list: what `import compress` promises, and nothing that came along by accident."""

import ast
import inspect
import json
import re
import subprocess
import sys
import textwrap
from importlib import import_module
from pathlib import Path

import pytest

import compress
from compress import authoring, errors, testing
from compress.passes.contract.passes import Pass

ROOT = Path(__file__).parents[1]

NAMES = [
    "Calibration",
    "CompressError",
    "Evaluate",
    "PASSES",
    "Recipe",
    "Result",
    "Save",
    "__version__",
    "apply",
    "compare",
    "distill",
    "evaluate",
    "export",
    "imatrix",
    "load",
    "plan",
    "prune",
    "push_to_hub",
    "quantize",
    "quantize_folder",
    "run",
    "save",
    "sensitivity",
    "sweep",
    "upload",
]
"""All public names, the classes of the passes apart: those are found by their files."""

AUTHORING = [
    "BlockInputs",
    "BlockPass",
    "Codes",
    "CompressedLinear",
    "CrossGram",
    "Effects",
    "Gram",
    "InputAbsMax",
    "InputNorm",
    "InputRange",
    "Layer",
    "LayerPass",
    "LayerScheme",
    "ModelPass",
    "Nothing",
    "Observer",
    "Preparation",
    "ProblemSize",
    "PruningPass",
    "QuantizingPass",
    "RequiredSparsity",
    "Requirements",
    "ReshapingPass",
    "Run",
    "Solution",
    "SparseTrainingPass",
    "TrainingPass",
    "linears",
]
"""The names of `compress.authoring`, for authors of passes."""

MODULES = {"compress", "compress.authoring", "compress.errors", "compress.testing"}
"""The public modules."""

ERRORS = {
    "CompressError": 1,
    "UserError": 2,
    "ProcessError": 1,
    "RecipeError": 2,
    "SeveralErrors": 2,
    "ModelError": 2,
    "NotThisFormat": 2,
    "CannotRun": 2,
    "CalibrationError": 2,
    "TargetError": 2,
    "OutputError": 2,
    "Failure": 1,
    "NumericError": 1,
    "QualityError": 3,
    "SaveError": 1,
    "DeviceError": 1,
    "ShortageError": 1,
    "VerificationError": 1,
}
"""Every error a user can meet, and the exit code of the command line."""


def test_the_public_names():
    classes = {step.__name__ for step in compress.PASSES.values()}
    assert compress.__all__ == sorted({*NAMES, *classes})
    assert not classes & set(NAMES)
    assert {name for name in dir(compress) if not name.startswith("_")} >= {*NAMES, *classes} - {"__version__"}


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_there_and_documented(name):
    found = getattr(compress, name)
    if callable(found):
        assert inspect.getdoc(found)


def test_a_pass_is_public_under_the_name_of_its_class():
    for step in compress.PASSES.values():
        assert getattr(compress, step.__name__) is step
        assert issubclass(step, Pass)


@pytest.mark.parametrize("name", ["Sweep", "gptq_", "GTPQ", "runner_", "Annotated"])
def test_other_names_are_not_there(name):
    with pytest.raises(AttributeError, match=f"module 'compress' has no attribute '{name}'"):
        getattr(compress, name)


def test_the_function_plan_is_not_hidden_by_its_module():
    import_module("compress.pipeline.plan")
    assert callable(compress.plan) and compress.plan.__module__ == "compress.pipeline.plan"


def test_type_checkers_see_the_same_names():
    """What is imported under TYPE_CHECKING is what is imported on first use, from the same places."""
    tree = ast.parse(Path(compress.__file__).read_text(encoding="utf-8"))
    seen = {
        alias.asname: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if node.module.startswith("compress.") and alias.asname
    }
    assert sorted(seen) == NAMES
    for name, module in seen.items():
        assert getattr(import_module(module), name) is getattr(compress, name)


def test_importing_the_package_imports_nothing_slow():
    code = "import sys, compress; print(sorted({'torch', 'transformers', 'pydantic', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_names_for_authors_of_passes():
    names = {name: value for name, value in vars(authoring).items() if not name.startswith("_")}
    assert sorted(names) == AUTHORING
    assert [name for name, value in names.items() if not inspect.getdoc(value)] == []
    assert inspect.getdoc(testing.check_pass)


def shown_python():
    """(place, Python) of every cell of a notebook, and of every Python block of README and docs/."""
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
            if cell["cell_type"] == "code":
                yield f"{path.name}, cell {number}", "".join(cell["source"])
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for block in re.findall(r"^ *```python[^\n]*\n(.*?)^ *```", path.read_text(encoding="utf-8"), re.M | re.S):
            yield path.relative_to(ROOT).as_posix(), textwrap.dedent(block)


def private_imports(text):
    """The imports of modules of the package that are not public, in Python and in Python that it writes to files."""
    modules = re.findall(r"^\s*(?:from|import) (compress[\w.]*)", text, re.MULTILINE)
    names = [name for module, name in re.findall(r"^\s*from (compress) import (\w+)", text, re.MULTILINE)]
    hidden = [name for name in names if f"compress.{name}" not in MODULES and name not in compress.__all__]
    return [module for module in modules if module not in MODULES] + hidden


def test_what_is_shown_imports_public_modules_only():
    shown = list(shown_python())
    assert len(shown) > 40
    assert [(place, found) for place, text in shown if (found := private_imports(text))] == []


def test_imports_of_private_modules_would_be_found():
    text = "import compress\nfrom compress.data.ids import token_ids\nfrom compress import GPTQ, testing, gptq"
    assert private_imports(text) == ["compress.data.ids"]
    assert private_imports("from compress import blockwise") == ["blockwise"]


def test_the_tree_of_errors():
    found = {
        name: kind.exit_code
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if kind.__module__ == errors.__name__
    }
    assert found.pop("Terminated") == 1 and not issubclass(errors.Terminated, Exception)
    assert found == ERRORS
    assert all(issubclass(getattr(errors, name), compress.CompressError) for name in found)
    assert all(issubclass(getattr(errors, n), errors.UserError) == (code == 2) for n, code in found.items())
