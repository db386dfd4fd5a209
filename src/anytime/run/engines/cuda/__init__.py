"""The CUDA graphs engine: recording stages, the fastest variant of them for each batch size, and runs queued ahead."""

from anytime.run.engines.cuda.engine import SIZES, CudaGraphsEngine
from anytime.run.engines.cuda.variants import Precision

__all__ = ["SIZES", "CudaGraphsEngine", "Precision"]
