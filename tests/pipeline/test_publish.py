"""Uploading: after the run, without its work folder, to a hub that is given; every refusal is one error."""

from pathlib import Path
from unittest.mock import MagicMock

import pytest
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

import compress
from compress.errors import OutputError, SaveError
from compress.pipeline.publish import check_login


class FakeHub:
    """Records what it is asked; `refuses` maps the name of a method to the error that it raises."""

    def __init__(self, **refuses: Exception) -> None:
        self.refuses, self.asked = refuses, []

    def take(self, name: str, *what) -> None:
        self.asked.append((name, *what))
        if name in self.refuses:
            raise self.refuses[name]

    def whoami(self):
        self.take("whoami")

    def create_repo(self, repo_id, *, private, exist_ok):
        self.take("create_repo", repo_id, private, exist_ok)

    def upload_folder(self, *, repo_id, folder_path, commit_message, ignore_patterns):
        kept = [
            p for p in sorted(Path(folder_path).iterdir()) if not any(p.match(i.split("/")[0]) for i in ignore_patterns)
        ]
        self.take("upload_folder", repo_id, [p.name for p in kept])


REFUSED = HfHubHTTPError("401 Unauthorized", response=MagicMock(headers={}))


@pytest.fixture(scope="module")
def finished(recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    compress.run(recipe(compress.RTN(group_size=32), eval=None, save={"verify": "own"}), folder, progress=False)
    return folder


def test_the_checkpoint_and_its_card_are_uploaded(finished):
    hub = FakeHub()
    assert compress.push_to_hub(finished, "me/small", private=True, hub=hub) == "https://huggingface.co/me/small"
    assert hub.asked[:2] == [("whoami",), ("create_repo", "me/small", True, True)]
    _, repository, names = hub.asked[2]
    assert repository == "me/small" and ".compress" not in names
    assert {"README.md", "config.json", "recipe.yaml", "report.json", "model.safetensors.index.json"} <= set(names)


@pytest.mark.parametrize(
    ("refuses", "error", "message"),
    [
        ({"whoami": LocalTokenNotFoundError()}, OutputError, "not logged in to the hub; log in with `hf auth login`"),
        ({"whoami": REFUSED}, OutputError, "the hub refuses the login"),
        ({"create_repo": HFValidationError("bad name")}, OutputError, "me/small: bad name"),
        ({"upload_folder": REFUSED}, SaveError, "the upload failed .*the same command tries again"),
        ({"upload_folder": OSError("no route")}, SaveError, "the upload failed .no route"),
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
