"""Measurements: tau and acceptance of a drafter on prompts, and conformance with reference vectors."""
