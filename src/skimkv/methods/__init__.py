"""The methods by name; a new one is a new file and one line here."""

from ..method import Method
from .dense import Dense
from .h2o import H2O
from .lowrank import LowRank
from .sparq import SparQ
from .sparse_transformer import Fixed, Strided
from .subgen import SubGen, SubGenStream
from .topk import TopK
from .window import LMInfinite

METHODS: dict[str, type[Method]] = {
    m.__name__: m for m in (Dense, SparQ, TopK, LowRank, LMInfinite, Strided, Fixed, H2O, SubGen, SubGenStream)
}

__all__ = [
    "H2O", "METHODS", "Dense", "Fixed", "LMInfinite", "LowRank", "SparQ", "Strided", "SubGen", "SubGenStream", "TopK",
]  # fmt: skip
