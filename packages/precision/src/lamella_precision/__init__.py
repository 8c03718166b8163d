"""Number formats of sharded training: the frozen policy, and the recipes for weights on the wire."""

from lamella_precision._choice import matrices_of as matrices_of
from lamella_precision._devices import multiplies_in_float8 as multiplies_in_float8
from lamella_precision._float8 import Float8Recipe as Float8Recipe
from lamella_precision._foreign import read_directly as read_directly
from lamella_precision._foreign import refuse_quantized as refuse_quantized
from lamella_precision._matmul import Float8Linear as Float8Linear
from lamella_precision._matmul import drop_float8_matmul as drop_float8_matmul
from lamella_precision._matmul import float8_matmul_layers as float8_matmul_layers
from lamella_precision._matmul import use_float8_matmul as use_float8_matmul
from lamella_precision._mxfp8 import MXFP8Recipe as MXFP8Recipe
from lamella_precision._policy import MixedPrecisionPolicy as MixedPrecisionPolicy
from lamella_precision._quantized import Dequantizes as Dequantizes
from lamella_precision._quantized import QuantizedWeight as QuantizedWeight
from lamella_precision._recipe import CachingRecipe as CachingRecipe
from lamella_precision._recipe import Direction as Direction
from lamella_precision._recipe import DivisibleRecipe as DivisibleRecipe
from lamella_precision._recipe import Part as Part
from lamella_precision._recipe import PayloadFormat as PayloadFormat
from lamella_precision._recipe import PlainRecipe as PlainRecipe
from lamella_precision._recipe import Recipe as Recipe
from lamella_precision._recipe import ScaledRecipe as ScaledRecipe
