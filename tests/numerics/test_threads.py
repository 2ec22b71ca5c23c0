"""Solvers after `torch.set_num_threads`, at sizes at which torch's batches of LU factors are wrong then.

Threads are those of a whole process, so the solvers run in another one, and are compared here with double precision, one
matrix at a time.
"""

import subprocess
import sys

import pytest
import torch
from draws import random
from launching import ENVIRONMENT

from compress.numerics.additive import Books
from compress.numerics.linalg import inverse_factor
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS

SIZES = [160, 300]
ROWS = 24  # one matrix each: few matrices are solved one after the other

WORK = """
import sys
import torch
from compress.numerics.block_sweep import BlockSweep
from compress.numerics.linalg import solve_general, solve_positive
from compress.numerics.quant.refine import refined
from compress.numerics.quant.refine_planes import refined_planes
from compress.numerics.rotation import cayley_step

class Whole:  # a code of blocks that stores nothing: its values are those that it is asked for
    rows, size = 1, 1
    def __init__(self, columns):
        self.columns = columns
    def encode(self, values):
        self.values = values
        return torch.zeros(len(values), 1, dtype=torch.uint8)
    def decode(self, codes):
        return self.values

torch.set_num_threads(2)
given, found = torch.load(sys.argv[1], weights_only=False), {}
for size, g in given.items():
    sweep = BlockSweep(g["weight"], g["hessian"], Whole(2 * size), torch.ones(len(g["weight"])), torch.float32)
    sweep.descend()
    books = g["books"]
    books.sweep(g["factor"])
    found[size] = {
        "positive": solve_positive(g["matrices"], g["wanted"])[0],
        "general": solve_general(g["general"], g["wanted"][0]),
        "refined": refined(g["weight"], g["codes"], g["hessian"], 1, torch.float32).dense(),
        "planes": refined_planes(g["weight"], g["planes"], g["hessian"], 1, torch.float32)[0].scale,
        "block": sweep.rounded,
        "additive": books.codes,
        "rotation": cayley_step(torch.eye(size), g["general"], None, 0.1, 0.9)[0],
    }
torch.save(found, sys.argv[2])
"""


def problem(size):
    """What the solvers are given; there are `size` groups of two columns."""
    inputs = random(4 * size, 2 * size, seed=1)
    hessian = inputs.T @ inputs / len(inputs) + 0.1 * torch.eye(2 * size)
    weight, parts = random(ROWS, 2 * size, seed=2), random(ROWS, size, size, seed=3)
    entries, code = random(1, 8, 2 * size, seed=7), torch.zeros(1, ROWS, 1, dtype=torch.int64)
    return {
        "weight": weight,
        "hessian": hessian,
        "factor": inverse_factor(hessian, 0.01)[0],
        "codes": quantize(weight, GRIDS["int4"], 2),
        "planes": [quantize(weight, GRIDS["binary"], 2)],
        "matrices": parts @ parts.mT / size + 0.1 * torch.eye(size),
        "wanted": random(ROWS, size, 2, seed=4),
        "general": random(size, size, seed=5) + 30 * torch.eye(size),
        "books": Books(weight, hessian, torch.ones(ROWS), entries, code),
    }


@pytest.fixture(scope="module")
def solved(tmp_path_factory):
    """(problems, solutions of the process with threads), by size."""
    folder, given = tmp_path_factory.mktemp("threads"), {size: problem(size) for size in SIZES}
    torch.save(given, folder / "given.pt")
    command = [sys.executable, "-c", WORK, folder / "given.pt", folder / "found.pt"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return given, torch.load(folder / "found.pt")


def least_squares(problem, levels):
    """The scales of each row: those of the least error (w - s L) H (w - s L)^T."""
    hessian, found = problem["hessian"].double(), []
    for row, level in zip(problem["weight"].double(), levels.double(), strict=True):
        parts = torch.block_diag(*level.view(-1, 1, 2))  # [groups, in]
        found.append(torch.linalg.solve(parts @ hessian @ parts.T, parts @ hessian @ row))
    return torch.stack(found)


@pytest.mark.parametrize("size", SIZES)
class TestSolvers:
    def test_systems_of_equations(self, solved, size):
        (given, found) = (each[size] for each in solved)
        pairs = zip(given["matrices"].double(), given["wanted"].double(), strict=True)
        wanted = torch.stack([torch.linalg.solve(matrix, right) for matrix, right in pairs])
        torch.testing.assert_close(found["positive"].double(), wanted, rtol=1e-3, atol=1e-3)
        one = torch.linalg.solve(given["general"].double(), given["wanted"][0].double())
        torch.testing.assert_close(found["general"].double(), one, rtol=1e-3, atol=1e-3)

    def test_refined_codes(self, solved, size):
        (given, found) = (each[size] for each in solved)
        hessian, weight = given["hessian"].double(), given["weight"].double()
        before, after = (
            ((weight - dense.double()) @ hessian * (weight - dense.double())).sum(1)
            for dense in (given["codes"].dense(), found["refined"])
        )
        assert (after <= before * (1 + 1e-6)).all() and after.sum() < 0.95 * before.sum()

    def test_scales_of_planes(self, solved, size):
        (given, found) = (each[size] for each in solved)
        wanted = least_squares(given, given["planes"][0].codes * 2.0 - 1)
        torch.testing.assert_close(found["planes"].double(), wanted.abs(), rtol=1e-3, atol=1e-3)

    def test_blocks(self, solved, size):
        (given, found) = (each[size] for each in solved)
        torch.testing.assert_close(found["block"], given["weight"], rtol=1e-3, atol=1e-3)  # no error is left

    def test_entries_of_codebooks(self, solved, size):
        (given, found) = (each[size] for each in solved)
        inverse = torch.linalg.inv(given["factor"].double())
        values, entries = given["weight"].double() @ inverse, given["books"].books[0].double() @ inverse
        assert found["additive"][0, :, 0].tolist() == torch.cdist(values, entries).argmin(1).tolist()

    def test_steps_of_rotations(self, solved, size):
        rotation = solved[1][size]["rotation"].double()
        torch.testing.assert_close(rotation @ rotation.T, torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-5)
        assert (rotation - torch.eye(size)).abs().max() > 1e-4
