"""What authors of passes import: the sizes of a pass, what a pass receives, returns and declares, and observers.

`compress.testing.check_pass` tests a pass that is written with these names.
"""

from compress.layers.linear import CompressedLinear as CompressedLinear
from compress.layers.linear import linears as linears
from compress.layers.scheme import LayerScheme as LayerScheme
from compress.numerics.quant.codes import Codes as Codes
from compress.passes.contract.context import Run as Run
from compress.passes.contract.facts import Effects as Effects
from compress.passes.contract.facts import Preparation as Preparation
from compress.passes.contract.facts import RequiredSparsity as RequiredSparsity
from compress.passes.contract.facts import Requirements as Requirements
from compress.passes.contract.layers import BlockInputs as BlockInputs
from compress.passes.contract.layers import Layer as Layer
from compress.passes.contract.layers import Solution as Solution
from compress.passes.contract.memory import ProblemSize as ProblemSize
from compress.passes.contract.observers import CrossGram as CrossGram
from compress.passes.contract.observers import Gram as Gram
from compress.passes.contract.observers import InputAbsMax as InputAbsMax
from compress.passes.contract.observers import InputNorm as InputNorm
from compress.passes.contract.observers import InputRange as InputRange
from compress.passes.contract.observers import Nothing as Nothing
from compress.passes.contract.observers import Observer as Observer
from compress.passes.contract.passes import BlockPass as BlockPass
from compress.passes.contract.passes import LayerPass as LayerPass
from compress.passes.contract.passes import ModelPass as ModelPass
from compress.passes.families.pruning import PruningPass as PruningPass
from compress.passes.families.quantizing import QuantizingPass as QuantizingPass
from compress.passes.families.reshaping import ReshapingPass as ReshapingPass
from compress.passes.families.training import SparseTrainingPass as SparseTrainingPass
from compress.passes.families.training import TrainingPass as TrainingPass
