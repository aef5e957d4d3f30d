"""Conformance kits: a class for each kind of plugin, whose tests are the kind's contract.

    from deltaloom.orchestrator.testing import ScorerConformance

    class TestMyScorer(ScorerConformance):
        def scorer(self):
            return MyScorer(MyScorer.Config())

pytest runs what the class inherits. Methods and attributes that a kit documents may be
overridden, where the defaults do not fit: prompts the tokenizer knows, columns an algorithm
reads. Codecs have theirs in `deltaloom.storage.testing`.
"""

from __future__ import annotations

from .driving import GuardConformance, SimulatorConformance, TrackerConformance
from .generating import EngineConformance, InferenceConformance, ModelConformance
from .learning import AlgorithmConformance, OptimizerConformance, TrainerConformance
from .samples import sample_batch, sample_group, sample_groups
from .scoring import ScorerConformance, VerifierConformance

__all__ = [
    "AlgorithmConformance",
    "EngineConformance",
    "GuardConformance",
    "InferenceConformance",
    "ModelConformance",
    "OptimizerConformance",
    "ScorerConformance",
    "SimulatorConformance",
    "TrackerConformance",
    "TrainerConformance",
    "VerifierConformance",
    "sample_batch",
    "sample_group",
    "sample_groups",
]
