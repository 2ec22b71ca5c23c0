"""Marks for torch.compile that do not import the compiler."""

import subprocess
import sys

import torch

from compress.native.compiling import constant_result


def test_the_mark_is_that_of_torch():
    def marked():
        return 1

    def marked_by_torch():
        return 1

    assert constant_result(marked) is marked
    assert vars(marked) == vars(torch.compiler.assume_constant_result(marked_by_torch))
    assert vars(marked)


def test_inspect_describes_layers_without_the_compiler_and_the_models_of_transformers():
    code = "import sys; import compress.checkpoint.contents; print(sys.modules.keys() & set(sys.argv[1:]))"
    slow = ["sympy", "transformers.modeling_utils"]  # the compiler of torch imports sympy
    done = subprocess.run([sys.executable, "-c", code, *slow], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
