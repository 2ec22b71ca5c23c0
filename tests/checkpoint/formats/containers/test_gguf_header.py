"""A header that states more than the file holds is an error before anything is allocated."""

import struct

import pytest

from compress.checkpoint.containers.gguf_header import architecture_of_file, open_reader
from compress.checkpoint.inspection import inspect
from compress.errors import ModelError

gguf = pytest.importorskip("gguf")


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def header(*values, tensors=b"", tensor_count=0, value_count=None):
    count = len(values) if value_count is None else value_count
    return b"GGUF" + struct.pack("<IQQ", 3, tensor_count, count) + b"".join(values) + tensors


def array(kind, count, data=b""):
    return text("x") + struct.pack("<IIQ", 9, kind, count) + data


ARCHITECTURE = text("general.architecture") + struct.pack("<I", 8) + text("llama")
BOMBS = {
    "an array of 2^62 numbers": (header(array(0, 2**62)), "states 4611686018427387904"),
    "an array of 2^62 texts": (header(array(8, 2**62)), "states 4611686018427387904"),
    "5 million numbers": (header(array(0, 5_000_000, bytes(5_000_000))), "more than 4194304 values"),
    "twice 3 million numbers": (header(*[array(0, 3_000_000, bytes(3_000_000))] * 2), "more than 4194304 values"),
    "an array that is longer than the file": (header(array(10, 1000, bytes(2000))), "states 1000 values"),
    "arrays in arrays": (header(text("x") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 500), "levels"),
    "2^60 tensors": (header(tensor_count=2**60), "states 1152921504606846976"),
    "2^60 keys": (header(value_count=2**60), "states 1152921504606846976"),
    "a key of 2^60 characters": (header(struct.pack("<Q", 2**60) + bytes(16)), "states 1152921504606846976"),
    "a text of 2^40 characters": (
        header(text("x") + struct.pack("<IQ", 8, 2**40), ARCHITECTURE),
        "states 1099511627776",
    ),
    "a name of 2^40 characters": (
        header(tensors=struct.pack("<Q", 2**40) + bytes(64), tensor_count=1),
        "states 1099511627776",
    ),
    "a tensor of 10^9 dimensions": (
        header(tensors=text("a") + struct.pack("<I", 10**9) + bytes(24), tensor_count=1),
        "dimensions",
    ),
    "a tensor of 2^120 weights": (
        header(tensors=text("a") + struct.pack("<IQQIQ", 2, 2**60, 2**60, 0, 0), tensor_count=1),
        "weights",
    ),
    "an unknown type": (header(text("x") + struct.pack("<I", 77)), "unknown type 77"),
    "an end in the middle": (header(ARCHITECTURE)[:60], "ends inside|states"),
}


@pytest.mark.parametrize("name", sorted(BOMBS))
def test_a_header_that_states_too_much_is_an_error(name, tmp_path):
    data, reason = BOMBS[name]
    path = tmp_path / "a.gguf"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=reason):
        open_reader(path)
    with pytest.raises(ModelError, match=f"a.gguf is truncated or not a GGUF file .*({reason})"):
        inspect(path)


def test_a_header_of_either_order_of_bytes_is_read(tmp_path):
    for order in gguf.GGUFEndian:
        path = tmp_path / f"{order.name}.gguf"
        writer = gguf.GGUFWriter(path, "llama", endianess=order)
        writer.add_array("tokens", ["a", "bc"])
        writer.add_array("types", [1, 2, 3])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        assert open_reader(path).fields["tokens"].contents() == ["a", "bc"]


def test_the_architecture_is_read_without_the_values_after_it(tmp_path):
    file = tmp_path / "x.gguf"
    file.write_bytes(header(text("a") + struct.pack("<II", 4, 1), ARCHITECTURE, array(0, 2**62)))
    assert architecture_of_file(file) == "llama"
    file.write_bytes(header(text("a") + struct.pack("<II", 4, 1)))
    assert architecture_of_file(file) is None
    file.write_bytes(header(array(0, 2**62), ARCHITECTURE))
    with pytest.raises(ValueError, match="states 4611686018427387904"):
        architecture_of_file(file)
