"""Steps as CUDA graphs: captured at start in a few sizes, replayed over fixed buffers. Knows no sequence."""

from ottserve.workers.engine.graphs.captured import StepGraphs
from ottserve.workers.engine.graphs.sizes import PROMPT_TOKENS, GraphSizes

__all__ = ["PROMPT_TOKENS", "GraphSizes", "StepGraphs"]
