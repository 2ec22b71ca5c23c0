"""Hadamard matrices: square, entries 1 and -1, orthogonal rows. They spread the outliers of one channel over all.

An order n is built as a Kronecker product of matrices of order 2 (Sylvester 1867) and of orders q + 1 and 2 (q + 1) for
prime powers q (Paley, J. Math. Phys. 12, 1933, constructions I and II). There are no tables: 12 = 11 + 1,
36 = 2 (17 + 1), 576 = 4 * 12 * 12.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import product

import torch
from jaxtyping import Float, Int
from torch import Tensor

LARGEST_FACTOR = 4096  # the most rows of a factor of a stored rotation; it is multiplied as a dense matrix
DENSE = 64  # factors of 2 are multiplied to dense ones of at most this order: two products of matrices for 4096


@cache
def factors(order: int) -> tuple[int, ...] | None:
    """Return orders of Sylvester and Paley matrices whose product is `order`, with the least sum.

    The sum is the number of multiplications per element of `transformed`. Factors of 2 come last.

    Returns:
        The orders; None if there are none.
    """
    if order in (1, 2):
        return () if order == 1 else (2,)
    if order < 1 or order % 4:
        return None
    candidates = [(order,)] if _paley(order) is not None else []
    for factor in (n for n in _divisors(order) if n == 2 or _paley(n) is not None):
        remaining_factors = factors(order // factor)
        candidates += [] if remaining_factors is None else [tuple(sorted((factor, *remaining_factors), reverse=True))]
    return min(candidates, key=lambda orders: (sum(orders), len(orders)), default=None)


def exists(order: int) -> bool:
    """Whether a Hadamard matrix of this order can be built here."""
    return factors(order) is not None


def _divisors(number: int) -> list[int]:
    """Return the divisors of a number except 1 and itself, in ascending order."""
    lower = [n for n in range(2, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*lower, *(number // n for n in lower)})


def fits(order: int, width: int) -> bool:
    """Whether a layer with this number of channels can be rotated in blocks of this order.

    Orders of files are not trusted: the search for factors is limited by the width, and the memory by `LARGEST_FACTOR`.
    """
    return width % order == 0 and (parts := factors(order)) is not None and max(parts, default=1) <= LARGEST_FACTOR


@cache
def largest_block(width: int) -> int:
    """Return the largest order that divides the width."""
    return max(n for n in range(1, width + 1) if width % n == 0 and exists(n))


def neighbours(width: int) -> tuple[int, int]:
    """Return the next orders below and above the width."""
    return next(n for n in range(width - 1, 0, -1) if exists(n)), next(
        n for n in range(width + 1, 2 * width + 5) if exists(n)
    )


@cache
def _paley(order: int) -> tuple[int, int] | None:
    """Return (construction, q) of a Paley matrix of this order; None if there is none.

    Construction I needs q = 3 mod 4, construction II q = 1 mod 4.
    """
    if order < 12 or order % 4 or order & (order - 1) == 0:  # powers of 2 are Sylvester's
        return None
    if is_prime_power(order - 1):
        return 1, order - 1
    return (2, order // 2 - 1) if order % 8 == 4 and is_prime_power(order // 2 - 1) else None


@cache
def is_prime_power(number: int) -> bool:
    """Whether the number is a power of a prime."""
    return number > 1 and len(_prime_factors(number)) == 1


def _prime_factors(number: int) -> set[int]:
    primes, divisor = set(), 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            primes.add(divisor)
            number //= divisor
        divisor += 1
    return primes | ({number} if number > 1 else set())


def hadamard(order: int) -> Int[Tensor, "order order"]:
    """Build a Hadamard matrix in int8: H H^T = order * I.

    Raises:
        ValueError: if no matrix of this order can be built here.
    """
    parts = factors(order)
    if parts is None:
        below, above = neighbours(order)
        raise ValueError(f"no Hadamard matrix of order {order} is known here; the next orders are {below} and {above}")
    matrix = torch.ones(1, 1, dtype=torch.int8, device="cpu")
    for part in parts:
        matrix = torch.kron(matrix, _one(part))
    return matrix


@cache
def _one(order: int) -> Int[Tensor, "order order"]:
    """Return the matrix of order 2, or a Paley matrix."""
    if order == 2:
        return torch.tensor([[1, 1], [1, -1]], dtype=torch.int8, device="cpu")
    kind = _paley(order)
    assert kind is not None
    construction, q = kind
    bordered = torch.ones(q + 1, q + 1, dtype=torch.int8, device="cpu")
    bordered[0, 0], bordered[1:, 1:] = 0, jacobsthal(q)
    eye = torch.eye(q + 1, dtype=torch.int8, device="cpu")
    if construction == 1:  # I + S with S = [[0, 1], [-1, Q]], S^T = -S
        bordered[1:, 0] = -1
        return bordered + eye
    signs, corner = _one(2), torch.tensor([[1, -1], [-1, -1]], dtype=torch.int8, device="cpu")
    return torch.kron(bordered, signs) + torch.kron(eye, corner)  # C = [[0, 1], [1, Q]], C^T = C


def jacobsthal(q: int) -> Int[Tensor, "q q"]:
    """Build Q_ij = chi(a_i - a_j) over the elements a of the field of q elements.

    chi is 1 for squares, 0 for 0, and -1 otherwise. An element is the tuple of its coefficients modulo the prime, as a
    number in base p.
    """
    (prime,) = _prime_factors(q)
    degree = round(math.log(q, prime))
    character = torch.full((q,), -1, dtype=torch.int8, device="cpu")
    character[0], character[_powers(prime, degree)[::2]] = 0, 1  # even powers of a generator are the squares
    places = prime ** torch.arange(degree, device="cpu")
    digits = torch.arange(q, device="cpu")[:, None] // places % prime
    return character[((digits[:, None] - digits[None]) % prime * places).sum(-1)]


def _powers(prime: int, degree: int) -> list[int]:
    """Return the powers 0 to q - 2 of a generator of the field's multiplicative group, as numbers in base p.

    The generator is the root x of a primitive polynomial x^k = c_0 + c_1 x + ...: the first one whose powers are q - 1
    different elements.
    """
    count = prime**degree - 1
    for taps in product(range(prime), repeat=degree):
        element, powers = [1] + [0] * (degree - 1), []
        while len(powers) < count:
            powers.append(sum(digit * prime**i for i, digit in enumerate(element)))
            top = element[-1]  # times x: shift, and replace x^k
            element = [(low + top * tap) % prime for low, tap in zip([0, *element[:-1]], taps, strict=True)]
            if sum(digit * prime**i for i, digit in enumerate(element)) in (0, 1):
                break
        if len(powers) == count and element == [1] + [0] * (degree - 1):
            return powers
    raise AssertionError(f"the field of {prime}^{degree} elements has a generator")


@cache
def _dense_factors(order: int) -> tuple[int, ...]:
    """Return the factors, with those of 2 multiplied evenly to orders of at most `DENSE`."""
    parts = factors(order)
    if parts is None:
        hadamard(order)  # raises
        raise AssertionError
    twos = parts.count(2)
    count = math.ceil(twos / math.log2(DENSE)) if twos else 0
    even = tuple(2 ** (twos // count + (i < twos % count)) for i in range(count))
    return tuple(part for part in parts if part != 2) + even


@cache
def _orthonormal(order: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "order order"]:
    """Return a small Hadamard matrix over the root of its order.

    It is no inference tensor, since training may use it later.
    """
    with torch.inference_mode(False):
        return (hadamard(order).to(dtype) / math.sqrt(order)).to(device)  # a GPU would multiply by the reciprocal


def transformed(x: Float[Tensor, "*batch in"], order: int, inverse: bool = False) -> Float[Tensor, "*batch in"]:
    """Multiply every run of `order` channels by the orthonormal Hadamard matrix: x H / sqrt(order).

    A Kronecker product acts on one axis after the other, so n channels take n times the sum of the factors in
    multiplications instead of n^2 (the fast Walsh-Hadamard transform with larger steps).

    Args:
        x: the values; `order` divides their width.
        order: number of channels of a block.
        inverse: whether to multiply by H^T.

    Returns:
        The transformed values, in the dtype of x.

    Raises:
        ValueError: if no matrix of this order can be built here.
    """
    parts = _dense_factors(order)
    assert x.shape[-1] % order == 0, "blocks must divide the width"
    result, remaining_order = x.reshape(-1, order), order
    for part in parts:
        matrix = _orthonormal(part, x.dtype, x.device)
        matrix, remaining_order = matrix.T if inverse else matrix, remaining_order // part
        split = result.reshape(-1, part, remaining_order)
        result = split[..., 0] @ matrix if remaining_order == 1 else matrix.T @ split
    return result.reshape(x.shape)


def signs_of(width: int, seed: int) -> Int[Tensor, " width"]:
    """Draw random signs in int8 for a randomized Hadamard matrix (QuaRot, section 3): diag(signs) H."""
    draw = torch.Generator().manual_seed(seed)
    return (2 * torch.randint(0, 2, (width,), generator=draw) - 1).to(torch.int8)


def random_orthogonal(width: int, seed: int) -> Float[Tensor, "width width"]:
    """Draw a uniformly distributed orthogonal matrix in float64: Q of a Gaussian matrix, with the signs of diag(R)."""
    draw = torch.Generator().manual_seed(seed)
    q, r = torch.linalg.qr(torch.randn(width, width, dtype=torch.float64, generator=draw))
    return q * r.diagonal().sign()


def randomized(width: int, seed: int) -> Float[Tensor, "width width"]:
    """Return diag(signs) H / sqrt(width) in float64, or a random orthogonal matrix if no Hadamard matrix exists."""
    if not exists(width):
        return random_orthogonal(width, seed)
    return signs_of(width, seed)[:, None] * hadamard(width).double() / math.sqrt(width)
