"""The adapter for lm-evaluation-harness, under the name that its users import."""

from .eval.lm_eval import SkimLM

__all__ = ["SkimLM"]
