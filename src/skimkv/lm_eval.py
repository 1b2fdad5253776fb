"""The adapter for lm-evaluation-harness, under the name that its users import; run as a program, the harness itself."""

try:
    from .eval.lm_eval import SkimLM, main
except ImportError as error:
    if __name__ == "__main__":
        raise SystemExit(str(error)) from None
    raise

__all__ = ["SkimLM", "main"]

if __name__ == "__main__":
    main()
