"""The rules of the house, read from the source: floors, sizes, words that must not stand there. CONTRIBUTING.md tells why.

Every rule is a function from a source text to what breaks it, so that each is also shown a text that does.
"""

import ast
import re
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

ROOT = Path(__file__).parents[1]
PACKAGE = "compress"
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / PACKAGE).rglob("*.py"))
}
"""Every module of the package by its dotted name."""

ORDER = (
    "errors", "version", "numerics", "kernels", "weights", "formats", "model", "data", "api", "train", "stream", "families",
    "passes", "recipe", "evaluate", "report", "pipeline", "cli", "__main__",
)  # fmt: skip
"""The folders and top files of the package from the lowest to the highest; a module imports from lower ones only."""

FLOORS = {PACKAGE: len(ORDER)} | {f"{PACKAGE}.{name}": floor for floor, name in enumerate(ORDER)}
"""A module stands on the floor of the longest name here that it begins with; imports go down or stay."""

LATE_IMPORTS = {
    "compress.cli": "torch takes seconds to import, which `compress --help` should not",
}
"""Modules that may import the package's own modules inside functions, and why."""

FILE_LINES, USUAL_FILE_LINES = 400, 300
FUNCTION_LINES, USUAL_FUNCTION_LINES = 50, 30
USUAL = 0.9  # the share of files and of functions that keep to the usual size
LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}
"""'module' and 'module:function' that are longer, and why."""

ENVIRONMENT = {"compress.cli": "sets the defaults of libraries for the process that it owns"}
BROAD = {
    "compress.model.open.opening:folder_of": "the hub's client raises errors of several HTTP libraries; told as one ModelError",
    "compress.formats.containers.files:atomic": "removes the partial file whatever happened, and raises on",
}
"""'module:function' with a broad except, and why."""

ORDINARY = {
    "align", "beam", "bit", "canary", "clip", "encoderdecoder", "funnel", "git", "informer", "led", "opt", "radio", "rag",
    "sam",
}  # fmt: skip
"""Model types that are also words one needs."""

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


def long_functions(tree: ast.AST, most: int) -> list[str]:
    """Functions with more lines than `most`, their docstring not counted."""
    found = []
    for name, node in functions(tree):
        first = node.body[0]
        record = (
            isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
        )
        lines = node.end_lineno - node.lineno + 1 - (first.end_lineno - first.lineno + 1 if record else 0)
        if lines > most:
            found.append(f"{name}: {lines} lines")
    return found


def prints(tree: ast.AST) -> list[str]:
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [f"line {c.lineno}" for c in calls if dotted(c.func) in ("print", "sys.stdout.write", "sys.stderr.write")]


def environment(tree: ast.AST) -> list[str]:
    names = ("os.environ", "os.getenv", "os.putenv", "environ", "getenv")
    return [f"line {node.lineno}" for node in ast.walk(tree) if dotted(node) in names]


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


# The tests: every module, each rule


modules = pytest.mark.parametrize("module", FILES)


@modules
def test_every_module_stands_on_a_floor(module):
    assert floor_of(module) is not None, f"{module}: give it a floor in FLOORS, as DESIGN has it"


@modules
def test_imports_only_go_down(module):
    assert upward(module, tree_of(module)) == []


def test_imports_make_no_cycle():
    """Not even on one floor."""
    below = {
        module: {n for n, node in own_imports(tree_of(module)) if node not in type_checking(tree_of(module))} - {module}
        for module in FILES
        if module != PACKAGE
    }
    done: set[str] = set()

    def descend(module, path):
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for name in below.get(module, ()):
                descend(name, [*path, module])
            done.add(module)

    for module in below:
        descend(module, [])


@modules
def test_the_package_is_not_imported_inside_functions(module):
    assert module in LATE_IMPORTS or late_imports(tree_of(module)) == []


@pytest.mark.parametrize("module", [name for name in FILES if name.startswith("compress.passes.")])
def test_passes_do_not_know_each_other(module):
    imported = [name for name, _ in own_imports(tree_of(module))]
    assert [name for name in imported if name.startswith("compress.passes")] == []


@modules
def test_sizes(module):
    lines = len(FILES[module].read_text(encoding="utf-8").splitlines())
    assert lines <= FILE_LINES or module in LONG_FILES
    too_long = long_functions(tree_of(module), FUNCTION_LINES)
    assert [f for f in too_long if f"{module}:{f.partition(':')[0]}" not in LONG_FUNCTIONS] == []


def test_most_files_and_functions_are_short():
    lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in FILES.values()]
    assert sum(n <= USUAL_FILE_LINES for n in lines) >= USUAL * len(lines)
    count = sum(1 for module in FILES for _ in functions(tree_of(module)))
    long = sum(len(long_functions(tree_of(module), USUAL_FUNCTION_LINES)) for module in FILES)
    assert long <= (1 - USUAL) * count


@modules
def test_nothing_prints(module):
    assert prints(tree_of(module)) == []


@modules
def test_nothing_reads_the_environment(module):
    assert module in ENVIRONMENT or environment(tree_of(module)) == []


@modules
def test_errors_are_caught_by_their_names(module):
    assert [f for f in broad_excepts(tree_of(module)) if f"{module}:{f}" not in BROAD] == []


@modules
def test_no_file_can_run_code(module):
    assert unsafe_readers(tree_of(module)) == []


@modules
def test_no_architecture_is_named(module):
    assert architectures(FILES[module].read_text(encoding="utf-8")) == set()


@modules
def test_no_class_is_known_by_its_name(module):
    assert asked_class_names(tree_of(module)) == []


@modules
def test_all_that_is_public_is_documented(module):
    assert undocumented(tree_of(module), documented_methods()) == []


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
    assert [m for m in ENVIRONMENT if not environment(tree_of(m))] == []
    for place in BROAD:
        module, _, function = place.partition(":")
        assert function in broad_excepts(tree_of(module))
    for module in LONG_FILES:
        assert len(FILES[module].read_text(encoding="utf-8").splitlines()) > FILE_LINES
    for place in LONG_FUNCTIONS:
        module, _, function = place.partition(":")
        assert function in {f.partition(":")[0] for f in long_functions(tree_of(module), FUNCTION_LINES)}


def test_floors_fall_towards_the_errors():
    """The floors in the order in which DESIGN lists them."""
    floors = [FLOORS[f"{PACKAGE}.{name}"] for name in ORDER]
    assert all(below < above for below, above in pairwise(floors))


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (late_imports, "def f():\n    from compress.model.open import open_model"),
        (late_imports, "class A:\n    def f(self):\n        import compress.recipe"),
        (lambda tree: upward("compress.numerics.quant.grids", tree), "from compress.model.open import OpenModel"),
        (lambda tree: upward("compress.model.open.opening", tree), "from compress.pipeline import run"),
        (
            lambda tree: upward("compress.stream.store", tree),
            "if TYPE_CHECKING:\n    from compress.recipe import Recipe",
        ),
        (lambda tree: long_functions(tree, 3), "def f():\n    '''Doc.'''\n    a = 1\n    b = 2\n    return a + b"),
        (prints, "print('x')"),
        (prints, "import sys\nsys.stdout.write('x')"),
        (environment, "import os\nos.environ['A'] = '1'"),
        (environment, "import os\nos.getenv('A')"),
        (broad_excepts, "def f():\n    try:\n        g()\n    except Exception:\n        pass"),
        (broad_excepts, "def f():\n    try:\n        g()\n    except:\n        pass"),
        (broad_excepts, "def f():\n    try:\n        g()\n    except (OSError, Exception):\n        pass"),
        (unsafe_readers, "import torch\ntorch.load('x')"),
        (unsafe_readers, "from pickle import loads"),
        (unsafe_readers, "import yaml\nyaml.load(text, Loader=yaml.Loader)"),
        (unsafe_readers, "np.load(path, allow_pickle=True)"),
        (asked_class_names, "if type(module).__name__ == 'Attention': pass"),
        (asked_class_names, "if config.model_type in ('a', 'b'): pass"),
        (undocumented, "def public(): pass"),
        (undocumented, "'''Doc.'''\nclass Public:\n    '''Doc.'''\n    def method(self): pass"),
    ],
)
def test_every_rule_finds_what_breaks_it(rule, text):
    assert rule(ast.parse(text))


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
