"""Bit packing: a dense stream, least-significant bit first, equal to a bit-by-bit oracle and to compressed-tensors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.numerics.quant.bits import pack, packed_width, unpack


@st.composite
def codes_of_bits(draw):
    """(codes [rows, n] uint8, bits)."""
    bits = draw(st.integers(1, 8))
    rows, count = draw(st.integers(1, 3)), draw(st.integers(1, 130))
    seed = draw(st.integers(0, 2**31))
    codes = torch.randint(0, 2**bits, (rows, count), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return codes, bits


def pack_bit_by_bit(row, bits):
    """The stream written out as one long whole number, cut into int32 words."""
    stream = sum(code << (bits * i) for i, code in enumerate(row))
    words = [(stream >> (32 * w)) & 0xFFFFFFFF for w in range(-(-len(row) * bits // 32))]
    return [word - 2**32 if word >= 2**31 else word for word in words]


@settings(max_examples=50)
@given(codes_of_bits())
def test_unpacking_gives_back_what_was_packed(drawn):
    codes, bits = drawn
    words = pack(codes, bits)
    assert words.dtype == torch.int32
    assert words.shape == (codes.shape[0], packed_width(codes.shape[1], bits))
    assert torch.equal(unpack(words, bits, codes.shape[1]), codes)


@settings(max_examples=50)
@given(codes_of_bits())
def test_the_words_are_those_of_the_bit_by_bit_oracle(drawn):
    codes, bits = drawn
    assert pack(codes, bits).tolist() == [pack_bit_by_bit(row, bits) for row in codes.tolist()]


@settings(max_examples=50)
@given(codes_of_bits())
def test_the_words_are_those_of_compressed_tensors(drawn):
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes, bits = drawn
    signed = (codes.to(torch.int16) - 2 ** (bits - 1)).to(torch.int8)
    theirs = helpers.pack_to_int32(signed, bits)
    assert torch.equal(pack(codes, bits), theirs)
    assert torch.equal(helpers.unpack_from_int32(pack(codes, bits), bits, codes.shape), signed)


def test_four_bits_by_hand():
    codes = torch.arange(16, dtype=torch.uint8)[None]  # -8..7, counted from 0 up
    words = [word & 0xFFFFFFFF for word in pack(codes, 4)[0].tolist()]
    assert words == [0x76543210, 0xFEDCBA98]


def test_eight_bits_by_hand():
    words = pack(torch.tensor([[0x10, 0x32, 0x54, 0x76]], dtype=torch.uint8), 8)
    assert words.tolist() == [[0x76543210]]


def test_three_bit_codes_cross_the_word_border():
    codes = torch.zeros(1, 12, dtype=torch.uint8)
    codes[0, 10] = 0b101  # bits 30 to 32: two in the first word, one in the second
    assert [word & 0xFFFFFFFF for word in pack(codes, 3)[0].tolist()] == [0b01 << 30, 0b1]


@pytest.mark.parametrize("bits", range(1, 9))
def test_32_codes_fill_exactly_as_many_words_as_they_have_bits(bits):
    assert packed_width(32, bits) == bits
    ones = torch.full((1, 32), 2**bits - 1, dtype=torch.uint8)
    assert pack(ones, bits).tolist() == [[-1] * bits]


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [31, 32, 64])
def test_transposed_codes_are_packed_as_their_contiguous_copy(bits, count):
    codes = torch.randint(0, 2**bits, (count, 3), dtype=torch.int16)
    assert torch.equal(pack(codes.T, bits), pack(codes.T.contiguous(), bits))
    words = pack(codes.T, bits).T  # stored along the first axis
    assert torch.equal(unpack(words.T, bits, count).T, codes.to(torch.uint8))


@pytest.mark.parametrize("bits", [3, 4])
def test_more_than_two_axes_are_packed_along_the_last(bits):
    codes = torch.randint(0, 2**bits, (2, 3, 40), dtype=torch.uint8)
    words = pack(codes, bits)
    assert words.shape == (2, 3, packed_width(40, bits))
    assert torch.equal(words[1, 2], pack(codes[1, 2][None], bits)[0])
    assert torch.equal(unpack(words, bits, 40), codes)


def test_one_word_per_row_behind_a_transposition_is_unpacked():
    codes = torch.arange(4)[None]
    words = pack(codes, 2)
    odd = words.expand(1, 1).as_strided((1, 1), (1, 2))
    assert torch.equal(unpack(odd, 2, 4), unpack(words, 2, 4))
