"""Uploading: after the run, without its work folder, to a hub that is given; every refusal is one error."""

import json
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import yaml
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, RepositoryNotFoundError

import compress
from compress import Recipe
from compress.errors import OutputError, SaveError
from compress.pipeline.publish import check_login


class FakeHub:
    """Records what it is asked; `refuses` maps the name of a method to the error that it raises."""

    def __init__(self, private=True, **refuses: Exception) -> None:
        self.private, self.refuses, self.asked, self.contents = private, refuses, [], {}

    def take(self, name: str, *what) -> None:
        self.asked.append((name, *what))
        if name in self.refuses:
            raise self.refuses[name]

    def whoami(self):
        self.take("whoami")
        return {"name": "me"}

    def repo_info(self, repo_id):
        self.take("repo_info", repo_id)
        return MagicMock(private=self.private)

    def create_repo(self, repo_id, *, private, exist_ok):
        self.take("create_repo", repo_id, private, exist_ok)

    def create_commit(self, repo_id, operations, *, commit_message):
        self.contents = {operation.path_in_repo: operation.path_or_fileobj for operation in operations}
        self.take("create_commit", repo_id)


REFUSED = HfHubHTTPError("401 Unauthorized", response=MagicMock(headers={}))


@pytest.fixture(scope="module")
def finished(recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    compress.run(recipe(compress.RTN(group_size=32), eval=None, save={"verify": "own"}), folder, progress=False)
    return folder


NEW = RepositoryNotFoundError("404", response=MagicMock(headers={}))


@pytest.mark.parametrize("hub", [FakeHub(), FakeHub(repo_info=NEW)])
def test_what_the_run_wrote_is_uploaded_and_nothing_else(hub, finished):
    for mine in ("notes.txt", ".env", "model.safetensors", "plugins/secret.py", "sensitivity.json"):
        (finished / mine).parent.mkdir(exist_ok=True)
        (finished / mine).write_text("mine")
    assert compress.push_to_hub(finished, "small", hub=hub) == "https://huggingface.co/small"
    assert hub.asked[1:] == [
        ("repo_info", "me/small"),
        ("create_repo", "small", True, True),
        ("create_commit", "small"),
    ]
    names = {"README.md", "SHA256SUMS", "config.json", "generation_config.json", "model.safetensors.index.json"}
    names |= {"recipe.yaml", "report.json", "report.md", "report.html", "tokenizer.json", "tokenizer_config.json"}
    assert {name for name in hub.contents if not name.startswith("model-0")} == names


def test_a_public_repository_has_to_be_asked_for(finished):
    with pytest.raises(OutputError, match="me/small: exists and is public"):
        compress.push_to_hub(finished, "me/small", hub=FakeHub(private=False))
    hub = FakeHub(private=False)
    compress.push_to_hub(finished, "me/small", private=False, hub=hub)
    assert ("create_repo", "me/small", False, True) in hub.asked


def test_no_file_that_is_uploaded_names_a_folder_of_this_machine(pico, tmp_path):
    """The text is near the output folder, so its path is relative; the model is not, so only its name is published."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "words.txt").write_text("The quick brown fox jumps over the lazy dog. " * 200)
    (tmp_path / "recipe.yaml").write_text(
        f"model: {pico}\ncalibration: {{source: texts/words.txt, sequences: 2, length: 32}}\n"
        "passes: [{gptq: {group_size: 32}}]\neval: {perplexity: [texts/words.txt], windows: 2, length: 32}\n"
    )
    compress.run(Recipe.from_yaml(tmp_path / "recipe.yaml"), tmp_path / "out", progress=False)
    hub = FakeHub()
    compress.push_to_hub(tmp_path / "out", "me/small", hub=hub)
    for name, content in hub.contents.items():
        data = content if isinstance(content, bytes) else Path(content).read_bytes()
        for private in (pico, str(tmp_path), str(Path.home())):
            assert private.encode() not in data, (name, private)
    recipe = yaml.safe_load(hub.contents["recipe.yaml"])
    assert recipe["model"] == Path(pico).name and recipe["calibration"]["source"] == "../texts/words.txt"
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["perplexity"][0]["text"] == "words.txt" and report["model"]["fingerprint"]
    local = yaml.safe_load((tmp_path / "out" / "recipe.yaml").read_text())
    assert local["model"] == pico and local["calibration"]["source"] == "../texts/words.txt"


@pytest.mark.parametrize(
    ("refuses", "error", "message"),
    [
        ({"whoami": LocalTokenNotFoundError()}, OutputError, "not logged in to the hub; log in with `hf auth login`"),
        ({"whoami": REFUSED}, OutputError, "the hub refuses the login"),
        ({"create_repo": HFValidationError("bad name")}, OutputError, "me/small: bad name"),
        ({"create_commit": REFUSED}, SaveError, "the upload failed .*the same command tries again"),
        ({"create_commit": OSError("no route")}, SaveError, "the upload failed .no route"),
    ],
)
def test_a_refusal_is_one_error(refuses, error, message, finished):
    with pytest.raises(error, match=message):
        compress.push_to_hub(finished, "me/small", hub=FakeHub(**refuses))


def test_an_unfinished_folder_is_not_uploaded(tmp_path):
    hub = FakeHub()
    with pytest.raises(OutputError, match="holds no finished run; finish `compress run`"):
        compress.push_to_hub(tmp_path, "me/small", hub=hub)
    assert hub.asked == []


@pytest.mark.parametrize("name", ["a/b/c", "/b", "a/", ""])
def test_a_name_that_is_none_is_refused_before_the_run(name):
    with pytest.raises(OutputError, match="write NAME or OWNER/NAME"):
        check_login(name, FakeHub())
