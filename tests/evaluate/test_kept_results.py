"""Kept results: killed lines, several processes, and what each of them computes."""

import json
import threading

from compress.evaluate.store import Results, Store, digest_of
from compress.passes.contract.processes import Processes


class Together(Processes):
    """Processes that are threads of one test and exchange values through a list."""

    def gather(self, value):
        MET[self.rank] = value
        MEETING.wait()
        return list(MET)


MET: list = [None, None]
MEETING = threading.Barrier(2)


def test_each_process_computes_a_share_and_all_know_everything(tmp_path):
    computed, found = [[], []], [[], []]

    def work(rank):
        results = Results(tmp_path, Together(rank, 2))

        def compute(items):
            computed[rank] += items
            results.put((str(item), item * item) for item in items)

        found[rank] = results.fill([1, 2, 3, 4, 5, 3], str, compute)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert computed == [[1, 3, 5], [2, 4]] and found[0] == found[1] == [1, 4, 9, 16, 25, 9]
    assert {path.name for path in tmp_path.iterdir()} == {"0.jsonl", "1.jsonl"}
    again = Results(tmp_path)  # one process later knows the results of both
    assert again.fill([5, 2], str, lambda items: 1 / 0) == [25, 4]


def test_a_line_that_was_cut_off_is_computed_again(tmp_path):
    Results(tmp_path).put([("a", 1), ("b", [2, None])])
    path = tmp_path / "0.jsonl"
    path.write_text(path.read_text()[:-4])
    results = Results(tmp_path)
    assert "a" in results and "b" not in results
    results.put([("b", [2, None])])
    assert Results(tmp_path)["b"] == [2, None]
    assert [json.loads(line) for line in path.read_text().splitlines()[2:]] == [["b", [2, None]]]


def test_results_of_other_models_and_settings_are_apart(tmp_path):
    one, other = Store(tmp_path, "m" * 20, "b" * 20), Store(tmp_path, "n" * 20, "b" * 20)
    one.results("requests").put([("key", 1)])
    assert "key" not in other.results("requests") and "key" not in one.results("windows")
    assert one.base_folder("text") == other.base_folder("text") == tmp_path / ("b" * 16) / "text"
    assert Store().base_folder("text") is None and "key" not in Store().results("requests")
    assert digest_of("a", (1, 2)) == digest_of("a", [1, 2]) != digest_of("a", [2, 1])
