"""Helpers that several test files share: models, kernels and files to test with."""
