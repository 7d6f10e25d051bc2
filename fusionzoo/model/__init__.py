"""`FusionModel`: built, stored, loaded, and what it remembers."""

from .fusion_model import FusionModel as FusionModel
from .fusion_model import UnimodalHeads as UnimodalHeads
from .fusion_model import create_model as create_model
