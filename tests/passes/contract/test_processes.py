"""Several processes: how they divide work, combine statistics in one order, and end together."""

from functools import partial

import pytest
import torch
from launching import in_threads
from torch import nn

import compress  # noqa: F401  defines all observers
from compress.errors import NumericError, TargetError
from compress.passes.contract.observers import (
    CrossGram,
    Gram,
    InputAbsMax,
    InputNorm,
    Nothing,
    Observer,
    OutlierFrequency,
    UnitGram,
)
from compress.passes.contract.processes import ALONE, EXCHANGED_BYTES, SENT_NUMBERS, divided, moved
from compress.passes.contract.samples import Rows, Sample
from compress.passes.quantize.awq import Moments

WIDTH = 12
CPU = torch.device("cpu")


def subclasses(kind) -> set[type]:
    return {kind}.union(*map(subclasses, kind.__subclasses__()))


def test_the_most_expensive_item_goes_first_to_the_one_with_least_work():
    assert divided([3, 5, 4, 3], 2) == [1, 0, 1, 0]  # 5 and 3, 4 and 3
    assert divided([1, 1, 8], 3) == [1, 2, 0]
    assert divided([], 2) == []


def test_every_item_belongs_to_one_process_whatever_precedes_it():
    def work(processes):
        assert processes.share([10, 11, 12]) == [10, 11, 12][processes.rank :: 2]
        return processes.share(list(range(4, 9)), offset=4)

    assert in_threads(2, work) == [[4, 6, 8], [5, 7]]
    assert ALONE.share([1, 2]) == [1, 2] and ALONE.first and ALONE.gather(3) == [3]


def test_values_are_added_in_the_order_of_ranks():
    parts = [torch.tensor([1e8, 0.0]), torch.tensor([1.0, 2.0]), torch.tensor([-1e8, 5.0])]

    def work(processes):
        own = parts[processes.rank]
        return processes.sum(own), processes.maximum(own), processes.totals(*own.tolist()), processes.gather(len(own))

    for added, largest, totals, gathered in in_threads(3, work):
        assert added.tolist() == [0.0, 7.0]  # 1e8 + 1 is 1e8 in float32
        assert largest.tolist() == [1e8, 5.0] and totals == (1.0, 7.0) and gathered == [2, 2, 2]
    assert parts[0].tolist() == [1e8, 0.0]  # what a process gave is unchanged


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (7, 2, 3)])
def test_tensors_of_any_size_are_added_and_keep_their_shape(shape):
    parts = torch.randn(3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    counts = torch.arange(3)[:, None]
    expected = parts[0] + parts[1] + parts[2]

    for added, count in in_threads(3, lambda p: p.sums([parts[p.rank], counts[p.rank]])):
        assert torch.equal(added, expected) and added.shape == shape and count.tolist() == [3]


@pytest.mark.parametrize("owners", [[0], [1, 2], [2]])
@pytest.mark.parametrize("length", [0, 1, 5, SENT_NUMBERS + 3])
def test_owners_alone_get_the_bits_that_all_would_get(owners, length):
    parts = torch.randn(3, length, generator=torch.Generator().manual_seed(0))

    def work(processes):
        own = parts[processes.rank]
        return [(p.sums([own, own.double()]), p.maximum(own)) for p in (processes, processes.to(owners))]

    for rank, ((sums, largest), (owned_sums, owned_largest)) in enumerate(in_threads(3, work)):
        if rank in owners:
            assert all(map(torch.equal, sums, owned_sums)) and torch.equal(largest, owned_largest)
        else:
            assert torch.equal(owned_sums[0], parts[rank]) and torch.equal(owned_largest, parts[rank])


@pytest.mark.parametrize("missing", [None, 0, 1])
def test_owners_collect_tensors_of_any_size_in_the_order_of_ranks(missing):
    parts = [torch.full((rank + 1, 2), float(rank), dtype=torch.bfloat16) for rank in range(3)]

    def work(processes):
        own = None if processes.rank == missing else parts[processes.rank]
        return processes.collect(own), processes.to([1]).collect(own), processes.to(range(3)).owners

    expected = [part for rank, part in enumerate(parts) if rank != missing]
    for rank, (everywhere, owned, owners) in enumerate(in_threads(3, work)):
        own = [] if rank == missing else [parts[rank]]
        for found, wanted in ((everywhere, expected), (owned, expected if rank == 1 else own)):
            assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))
        assert owners is None
    assert ALONE.collect(None) == [] and ALONE.collect(parts[0])[0] is parts[0] and ALONE.to([0]).owns


def test_values_are_exchanged_a_few_at_a_time():
    sizes = [EXCHANGED_BYTES // 2, EXCHANGED_BYTES // 2, 1, 3 * EXCHANGED_BYTES, 2]

    def work(processes):
        own = {number: 10 * number for number in range(5) if number % 2 == processes.rank}
        return [(portion, len(own)) for portion in processes.exchange(own, sizes)]

    for rank, portions in enumerate(in_threads(2, work)):
        assert [portion for portion, _ in portions] == [{0: 0, 1: 10}, {2: 20}, {3: 30}, {4: 40}]
        assert [left for _, left in portions] == [[2, 1, 1, 0], [1, 1, 0, 0]][rank]  # a process keeps none


def test_each_item_is_computed_once_and_known_to_all():
    computed = []

    def square(item):
        computed.append(item)
        return item * item

    found = in_threads(2, lambda processes: processes.spread([3, 1, 2], square, costs=[3.0, 1.0, 2.0]))
    assert found == [[9, 1, 4]] * 2 and sorted(computed) == [1, 2, 3]
    assert ALONE.spread([2, 3], square) == [4, 9]


@pytest.mark.parametrize(
    "make",
    [
        InputNorm,
        InputAbsMax,
        partial(OutlierFrequency, threshold=1.0),
        Gram,
        UnitGram,
        CrossGram,
        Moments,
        Rows,
        Nothing,
    ],
    ids=lambda make: getattr(make, "__name__", "OutlierFrequency"),
)
def test_statistics_of_parts_are_those_of_the_whole(make):
    rows = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(0))
    whole = make(WIDTH, CPU)

    def feed(observer, part):
        if isinstance(observer, CrossGram):
            observer.compare(part, 2 * part)
        else:
            observer.update(part)

    feed(whole, rows)

    def work(processes):
        own = make(WIDTH, CPU)
        if processes.rank < 2:  # the third one saw no token, as of an expert
            feed(own, rows[:30] if processes.rank == 0 else rows[30:])
        own.merge(processes)
        return own

    for found in in_threads(3, work):
        for name in ("norm", "absmax", "frequency", "hessian", "cross", "diagonal", "mean"):
            if hasattr(whole, name):
                torch.testing.assert_close(getattr(found, name), getattr(whole, name))
        if make is Rows:
            assert torch.equal(found.rows, rows)
        if make is not Nothing:
            assert found.tokens == 40


def test_a_sample_of_many_processes_keeps_to_its_limit():
    def work(processes):
        sample = Sample()
        for _ in range(8):
            sample.update(torch.full((64, 1), float(processes.rank)))
        sample.merge(processes)
        return sample.rows

    for rows in in_threads(3, work):
        assert len(rows) <= Sample.ROWS
        assert rows.unique().tolist() == [0.0, 1.0, 2.0]


def test_every_observer_says_how_it_merges():
    own = {kind for kind in subclasses(Observer) if kind.__module__.startswith("compress.")} - {Observer, Nothing}
    assert own and all(kind.combine is not Observer.combine for kind in own)


def test_an_observer_that_does_not_say_so_is_refused_in_several_processes_only():
    class Last(Observer):
        memory_bytes = classmethod(lambda cls, width: 0)

        def gather(self, rows):
            self.last = rows[-1]

    Last(2, CPU).merge(ALONE)
    with pytest.raises(TargetError, match="Last: does not say how .* define combine, or run in one process"):
        in_threads(2, lambda processes: Last(2, CPU).merge(processes))


def test_an_error_in_one_process_ends_the_others():
    def work(processes):
        with processes.together():
            if processes.rank == 1:
                raise NumericError("no")
            processes.wait()

    with pytest.raises(NumericError, match="no"):
        in_threads(2, work)


def test_nested_values_are_copied_to_a_device():
    layer = nn.Linear(2, 2)
    value = {"a": [torch.ones(2), (layer, 3)], "b": Sample()}
    found = moved(value, torch.device("meta"))
    assert found["a"][0].is_meta and found["a"][1][0].weight.is_meta and found["a"][1][1] == 3
    assert found["b"] is value["b"] and not layer.weight.is_meta
