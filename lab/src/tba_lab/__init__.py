"""The laboratory: studies, and what they are made of."""

from pathlib import Path

STUDIES = Path(__file__).parent / "studies"
