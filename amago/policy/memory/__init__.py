"""Is an agent's memory used, and what for?"""

from amago.policy.memory.picture import plot_memory
from amago.policy.memory.saliency import Influence, influence
from amago.policy.memory.study import Estimate, MemoryStudy, Stages, default_contexts, study_memory
from amago.policy.memory.words import conclusion, table

__all__ = [
    "Estimate", "Influence", "MemoryStudy", "Stages", "conclusion", "default_contexts", "influence", "plot_memory", "study_memory", "table",
]  # fmt: skip
