"""A sweep: planned first, one row per run, failures and interrupts, continuing, the base measured once; Ray."""

import json
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

import compress
from compress.cli import main
from compress.errors import Failure, OutputError, QualityError, RecipeError, SeveralErrors, ShortageError, UserError
from compress.evaluation.store import Store
from compress.passes.contract.journal import Journal
from compress.pipeline import on_ray
from compress.pipeline.attempts import Outcome, Serial
from compress.pipeline.on_ray import OnRay
from compress.pipeline.sweep import FILE, PAGE
from compress.pipeline.sweep_plan import SweepOptions, plan_sweep
from compress.report.sweep import SweepResult

OVER = {"passes.0.rtn.weights": ["int8", "int2"]}


class Scripted(Serial):
    """A serial executor that names the runs it was given, and stops with an error before one of them."""

    def __init__(self, stop_before: str = "", error: BaseException | None = None):
        self.stop_before, self.error, self.names = stop_before, error, []

    def outcomes(self, tasks):
        for task in tasks:
            if task.name == self.stop_before:
                raise self.error
            self.names.append(task.name)
            yield from super().outcomes([task])


@pytest.fixture
def rtn(recipe):
    return recipe(compress.RTN(weights="int4", group_size=32), save={"verify": "own"})


@pytest.fixture(scope="module")
def swept(recipe, tmp_path_factory):
    """A finished sweep over two grids: its folder and its result."""
    folder = tmp_path_factory.mktemp("sweep")
    made = recipe(compress.RTN(weights="int4", group_size=32), save={"verify": "own"})
    return made, folder, compress.sweep(made, OVER, folder, executor=Serial())


def test_every_run_is_a_row_with_its_measurements(swept):
    _, folder, result = swept
    large, small = result.runs
    assert (large.name, small.name) == ("weights=int8", "weights=int2")
    assert large.size_bytes > small.size_bytes and large.variant.kl < small.variant.kl
    report = json.loads((folder / small.name / "report.json").read_text())
    assert small.variant.loss == report["perplexity"][0]["difference"]["loss"]
    assert SweepResult.model_validate_json((folder / FILE).read_text()) == result
    page = (folder / PAGE).read_text()
    assert page.count("<g><title>") == 2 and "weights=int2" in page
    assert "perplexity of the compressed model" in (folder / "logs" / "weights=int2.log").read_text()
    assert "int2" in repr(result) and "<table>" in result._repr_html_()
    [table] = result.tables()
    assert table.head[0] == "weights" and [row[0] for row in table.rows] == ["int8", "int2"]
    result.check()


def test_the_same_call_runs_nothing_that_is_complete(swept):
    made, folder, result = swept
    executor = Scripted()
    assert compress.sweep(made, OVER, folder, executor=executor) == result and executor.names == []
    more = {"passes.0.rtn.weights": ["int2", "int3"]}
    runs = compress.sweep(made, more, folder, executor=executor).runs
    assert executor.names == ["weights=int3"] and runs[0] == result.runs[1]
    compress.sweep(made, OVER, folder, executor=executor)  # the rows of the other sweep are read from its file


def test_a_run_whose_files_changed_is_not_complete(rtn, tmp_path):
    over, executor = {"seed": [1]}, Scripted()
    compress.sweep(rtn, over, tmp_path, executor=executor)
    (tmp_path / "seed=1" / "config.json").unlink()
    compress.sweep(rtn, over, tmp_path, executor=executor)
    assert executor.names == ["seed=1"] * 2 and (tmp_path / "seed=1" / "config.json").exists()


def test_a_failed_run_is_a_row_and_the_others_go_on(rtn, tmp_path):
    compress.run(rtn, tmp_path / "weights=int8", progress=False)  # of another recipe: int4
    result = compress.sweep(rtn, OVER, tmp_path, executor=Serial())
    failed, complete = result.runs
    assert failed.state == "failed" and "contains another run" in failed.error and "\n" not in failed.error
    assert complete.state == "complete"
    assert "OutputError" in (tmp_path / "logs" / "weights=int8.log").read_text()
    assert "failed: " in repr(result) and "contains another run" in (tmp_path / PAGE).read_text()
    with pytest.raises(Failure, match="1 of 2 runs failed: weights=int8"):
        result.check()
    again = compress.sweep(rtn, OVER, tmp_path, executor=(executor := Scripted()), overwrite=True)
    assert executor.names == ["weights=int8"] and [run.state for run in again.runs] == ["complete"] * 2


def test_a_run_below_its_limits_is_complete(rtn, tmp_path):
    stated = rtn.stated()
    strict = compress.Recipe.from_data(stated | {"eval": stated["eval"] | {"fail_if": {"kl": 1e-9}}})
    result = compress.sweep(strict, {"seed": [0]}, tmp_path, executor=Serial())
    [run] = result.runs
    assert run.state == "complete" and run.variant is not None and "kl" in run.error
    with pytest.raises(QualityError, match="1 of 1 runs exceed a limit of fail_if: seed=0"):
        result.check()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("lost")])
def test_what_is_complete_when_a_sweep_ends_early_is_kept(rtn, tmp_path, error):
    with pytest.raises(type(error)):
        compress.sweep(rtn, OVER, tmp_path, executor=Scripted("weights=int2", error))
    stored = SweepResult.model_validate_json((tmp_path / FILE).read_text())
    assert [run.state for run in stored.runs] == ["complete", "unfinished"] and (tmp_path / PAGE).exists()
    again = Scripted()
    assert [run.state for run in compress.sweep(rtn, OVER, tmp_path, executor=again).runs] == ["complete"] * 2
    assert again.names == ["weights=int2"]


def test_all_invalid_combinations_are_named_before_any_run(rtn, tmp_path):
    over = {"passes.0.rtn.group_size": [32, -1], "passes.0.rtn.weights": ["int4", "int99"]}
    executor = Scripted()
    with pytest.raises(SeveralErrors) as error:
        compress.sweep(rtn, over, tmp_path / "new", executor=executor)
    text = str(error.value)
    for name in ("group_size=32,weights=int99", "group_size=-1,weights=int4", "group_size=-1,weights=int99"):
        assert f"- {name}: " in text
    assert "group_size=32,weights=int4:" not in text and executor.names == [] and not (tmp_path / "new").exists()
    with pytest.raises(RecipeError, match=r"^model=none: model: .*none"):
        compress.sweep(rtn, {"model": [str(tmp_path / "none")]}, tmp_path, executor=executor)
    with pytest.raises(ShortageError, match="^seed=1: memory: "):
        compress.sweep(rtn, {"seed": [1]}, tmp_path, executor=executor, memory="1MB")


def test_variants_of_two_models_have_a_chart_each(rtn, recipe, tiny_folder, tmp_path):
    other = recipe(compress.RTN(weights="int4", group_size=32), model=tiny_folder("llama"), save={"verify": "own"})
    text = other.calibration.source
    plain = compress.Recipe.from_data(
        rtn.stated()
        | {"calibration": {"source": text, "sequences": None, "length": None}, "eval": other.stated()["eval"]}
    )
    result = compress.sweep(plain, {"model": [rtn.model, other.model]}, tmp_path, executor=Serial())
    assert [run.state for run in result.runs] == ["complete"] * 2, result
    assert len(result.groups) == 2 and len(result.charts()) == 2
    assert [row[result.table().head.index("front")] for row in result.table().rows] == [
        "yes",
        "yes",
    ]  # a front for each
    assert str(result.picture()).count("<title>") == 1 + 2


def test_without_an_evaluation_there_are_sizes_and_no_plot(rtn, tmp_path):
    plain = rtn.model_copy(update={"eval": None})
    result = compress.sweep(plain, OVER, tmp_path, executor=Serial())
    assert all(run.variant is None and run.size_bytes for run in result.runs) and result.charts() == []
    assert (tmp_path / PAGE).exists() and "MB" in result.table().head


def test_one_sweep_at_a_time_works_in_a_folder(rtn, tmp_path):
    class Nested(Serial):
        def outcomes(self, tasks):
            compress.sweep(rtn, OVER, tmp_path, executor=Serial())
            yield from ()

    with pytest.raises(OutputError, match="another sweep works in this folder"):
        compress.sweep(rtn, OVER, tmp_path, executor=Nested())


def test_a_recipe_file_is_read_once_with_its_paths(pico, tmp_path, monkeypatch):
    """A change of the file during the sweep has no effect; its paths are relative to its folder."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "model").symlink_to(pico)
    path = tmp_path / "here" / "small.yaml"
    path.write_text("model: ./model\npasses: [{rtn: {weights: int4}}]\neval: null\nsave: {verify: own}\n")
    monkeypatch.chdir(tmp_path)
    planned = plan_sweep("here/small.yaml", {"seed": [1, 2]}, options=SweepOptions(memory="4GB"))
    assert planned.folder == Path("out/small-sweep") and not planned.folder.exists()
    assert [run.task.memory_bytes for run in planned.runs] == [4 * 10**9] * 2
    path.write_text("model: gone\n")
    assert planned.runs[0].task.recipe.read(planned.runs[0].task.settings).model == str(tmp_path / "here" / "model")
    [table] = planned.tables()
    assert [row[0] for row in table.rows] == ["1", "2"]


def test_runs_at_the_same_time_measure_the_base_once(tmp_path):
    measured, entries = [], []
    journals = [Journal(listeners=[entries.append]) for _ in range(2)]
    store = Store(tmp_path, "m" * 20, "b" * 20, shared=tmp_path)

    def run(journal):
        with store.base_locked(journal):
            if not store.has_base_results():
                time.sleep(0.3)
                measured.append(journal)
                store.of_base().results("text").put([("window", 1.0)])

    threads = [threading.Thread(target=run, args=(journal,)) for journal in journals]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    assert measured == [journals[0]]
    assert [entry.message for entry in entries] == ["waiting for another run, which measures the base model"]
    with Store().base_locked(Journal()):  # nothing is shared
        pass


# Ray: what it is asked for, with a stand-in


class FakeRay:
    """The part of Ray that the executor uses: tasks run in the order of their start, when they are waited for."""

    def __init__(self, *nodes, lost=()):
        self.resources, self.lost, self.asked, self.started, self.cancelled = nodes, lost, [], [], []
        self.exceptions = SimpleNamespace(RayError=LostError)
        self.initialized = None

    def is_initialized(self):
        return False

    def init(self, **options):
        self.initialized = options

    def shutdown(self):
        self.initialized = None

    def nodes(self):
        return [{"Alive": True, "Resources": node} for node in self.resources] + [
            {"Alive": False, "Resources": {"CPU": 99}}
        ]

    def remote(self, **options):
        assert options == {"max_calls": 1, "max_retries": 0}
        return lambda function: SimpleNamespace(options=lambda **asked: self.task(function, asked))

    def task(self, function, asked):
        def start(*arguments):
            self.asked.append(asked | {"limit": arguments[1], "threads": arguments[2]})
            self.started.append(arguments[0].name)
            return arguments[0].name

        return SimpleNamespace(remote=start)

    def wait(self, references, num_returns, timeout):
        return references[:1], references[1:]

    def get(self, reference):
        if reference in self.lost:
            raise LostError("the worker died\n  unexpectedly")
        return Outcome(reference, 1.0)

    def cancel(self, reference, force):
        self.cancelled.append(reference)


class LostError(Exception):
    pass


@pytest.fixture
def tasks(rtn, tmp_path):
    planned = plan_sweep(rtn, {"seed": [1, 2, 3]}, tmp_path)
    return [replace(run.task, needed_bytes=10**9) for run in planned.runs]


def on(monkeypatch, ray, tasks, **options):
    monkeypatch.setattr(on_ray, "imported", lambda: ray)
    return list(OnRay(**options).outcomes(tasks))


@pytest.mark.parametrize(
    ("node", "options", "asked"),
    [
        ({"CPU": 8.0, "memory": 1e12}, {}, (2, 2.5e11)),  # three runs on eight cores
        ({"CPU": 2.0, "memory": 1e12}, {}, (1, 5e11)),
        ({"CPU": 8.0, "memory": 2.5e9}, {}, (4, 1.25e9)),  # two fit into the memory
        ({"CPU": 8.0, "memory": 1.5e9}, {}, (8, 1.5e9)),
        ({"CPU": 8.0, "memory": 1e12}, {"cpus": 4}, (4, 5e11)),
    ],
)
def test_cores_and_memory_are_divided_by_the_runs_that_fit(monkeypatch, tasks, node, options, asked):
    ray = FakeRay(node)
    assert [outcome.name for outcome in on(monkeypatch, ray, tasks, **options)] == ["seed=1", "seed=2", "seed=3"]
    for options in ray.asked:
        assert (options["num_cpus"], options["memory"]) == asked and options["num_gpus"] == 0
        assert options["threads"] == asked[0] and options["limit"] == asked[1]
    assert ray.initialized is None and ray.cancelled == []


def test_a_limit_of_the_user_is_what_is_asked_for(monkeypatch, tasks):
    ray = FakeRay({"CPU": 2.0, "memory": 8e9})
    on(monkeypatch, ray, [replace(task, memory_bytes=3 * 10**9) for task in tasks])
    assert {(asked["memory"], asked["limit"]) for asked in ray.asked} == {(3 * 10**9, 3 * 10**9)}
    ray = FakeRay({"CPU": 2.0, "memory": 8e9})
    on(monkeypatch, ray, [replace(task, has_limit=False) for task in tasks])
    assert {(asked["memory"], asked["limit"]) for asked in ray.asked} == {(10**9, None)}


def test_on_a_cluster_runs_ask_for_what_they_need(monkeypatch, tasks):
    ray = FakeRay({"CPU": 1.0, "memory": 5e8}, {"CPU": 16.0, "memory": 8e9, "GPU": 2.0})
    on(monkeypatch, ray, tasks, address="auto", gpus=0.5)
    assert {(asked["memory"], asked["num_gpus"], asked["limit"]) for asked in ray.asked} == {(10**9, 0.5, None)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": 1}, "^seed=1: needs .* and 1 GPU, and the largest machine has 2 cores, 2000 MB and 0 GPUs"),
        ({"cpus": 3}, "^seed=1: needs 3 cores"),
    ],
)
def test_a_run_that_no_machine_can_take_is_an_error_before_any_run(monkeypatch, tasks, options, message):
    ray = FakeRay({"CPU": 2.0, "memory": 2e9})
    with pytest.raises(ShortageError, match=message):
        on(monkeypatch, ray, tasks, **options)
    assert ray.started == []
    with pytest.raises(ShortageError, match="9000 MB of memory"):
        on(monkeypatch, ray, [replace(tasks[0], needed_bytes=9 * 10**9)])
    with pytest.raises(UserError, match="use device: cuda$"):
        on(monkeypatch, ray, [replace(tasks[0], device="cuda:1")])


def test_a_run_whose_process_ended_has_failed(monkeypatch, tasks):
    lost = on(monkeypatch, FakeRay({"CPU": 2.0, "memory": 8e9}, lost=["seed=2"]), tasks)
    assert [outcome.complete for outcome in lost] == [True, False, True]
    assert lost[1].error == "the process of the run ended: the worker died unexpectedly"


def test_an_interrupt_cancels_the_other_runs(monkeypatch, tasks):
    ray = FakeRay({"CPU": 2.0, "memory": 8e9})
    monkeypatch.setattr(on_ray, "imported", lambda: ray)
    outcomes = OnRay().outcomes(tasks)
    assert next(outcomes).name == "seed=1"
    outcomes.close()
    assert ray.cancelled == ["seed=2", "seed=3"] and ray.initialized is None


# The command


def call(*arguments):
    return CliRunner().invoke(main, ["sweep", *map(str, arguments)])


@pytest.fixture
def file(pico, texts, tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(
        f"model: {pico}\ncalibration: {{source: {texts['calibration']}, sequences: null, length: null}}\n"
        f"passes: [{{rtn: {{weights: int4, group_size: 32}}}}]\nsave: {{verify: own}}\n"
        f"eval: {{perplexity: [{texts['test']}], windows: 2, length: null}}\n"
    )
    return path


def test_the_plan_needs_no_ray_and_runs_nothing(file, tmp_path):
    done = call(file, "--over", "passes.0.rtn.weights=int8,int2", "-o", tmp_path / "out", "--plan", "--json")
    assert done.exit_code == 0, done.output
    large, small = json.loads(done.stdout)
    assert (large["weights"], small["weights"]) == ("int8", "int2")
    assert float(large["checkpoint, MB"]) > float(small["checkpoint, MB"]) and not (tmp_path / "out").exists()
    done = call(file, "--over", "passes.0.rtn.weights=int8,int2", "--set", "passes.0.rtn.group_size=64", "--plan")
    assert done.exit_code == 0 and "2 runs of" in done.output


def test_without_ray_the_command_says_how_to_install_it(file, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    done = call(file, "--over", "seed=1,2", "-o", tmp_path / "out")
    assert done.exit_code == 2 and not (tmp_path / "out").exists()
    assert (
        done.stderr
        == 'error: many runs need Ray, which is not installed; install it with pip install "compress-llm[sweep]"\n'
    )
    assert call(file).exit_code == 2


def test_the_command_prints_rows_and_ends_with_an_error_if_a_run_failed(file, tmp_path, monkeypatch):
    monkeypatch.setattr(on_ray, "imported", lambda: None)
    monkeypatch.setattr(OnRay, "outcomes", lambda self, tasks: Serial().outcomes(tasks))
    out = tmp_path / "out"
    done = call(file, "--over", "passes.0.rtn.weights=int8,int2", "-o", out, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == json.loads((out / FILE).read_text())
    assert "1 of 2: weights=int8: complete: " in done.stderr
    done = call(file, "--over", "passes.0.rtn.weights=int8,int2", "--set", "seed=4", "-o", out)
    assert done.exit_code == 1 and "error: 2 of 2 runs failed: weights=int8, weights=int2" in done.stderr
    assert str(out / PAGE) in " ".join(done.stdout.split())


@pytest.mark.slow
def test_ray_runs_a_sweep_that_is_interrupted_and_continues(file, tmp_path):
    pytest.importorskip("ray")
    command = [sys.executable, "-m", "compress", "sweep", str(file), "--over", "passes.0.rtn.weights=int8,int3,int2"]
    command += ["--cpus", "1", "-o", str(tmp_path / "out")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if line.startswith("1 of 3"):
            process.send_signal(2)
            break
    assert process.wait(120) == 130
    states = [run["state"] for run in json.loads((tmp_path / "out" / FILE).read_text())["runs"]]
    assert "complete" in states and "unfinished" in states
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"1 of {states.count('unfinished')}: " in done.stderr
    rows = json.loads((tmp_path / "out" / FILE).read_text())["runs"]
    assert [row["state"] for row in rows] == ["complete"] * 3
    logs = [(tmp_path / "out" / "logs" / f"{row['name']}.log").read_text() for row in rows]
    assert (
        sum(text.count("of the base model on") for text in logs) <= 2 * 2
    )  # two windows; the interrupt may repeat them
