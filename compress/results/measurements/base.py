"""What an evaluator measured: the type of its value in report.json, and its rows in the table of size and quality."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

SummaryRow = tuple[str, str, str, str]
"""A row of the report's first table: quantity, before, after, ratio."""


class Record(BaseModel):
    """A typed part of report.json; an unknown key in it is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Measurement:
    """The value of an evaluator in report.json.

    A measurement is one file of this folder, with the name of the evaluator's file. The value of an evaluator without a
    measurement stays plain JSON, and has no row in the table of size and quality.

    Attributes:
        value_type: Type of the value, which `Measurements` validates.
    """

    value_type: ClassVar[Any] = Any

    @classmethod
    def summary(cls, value: Any) -> list[SummaryRow]:
        """Return the rows of the report's table of size and quality for a value of `value_type`."""
        return []


def overlap_in_words(text: str, overlap: float) -> str:
    """Describe which share of an evaluation text the calibration of the model has read."""
    return (
        f"calibration has read {overlap:.1%} of the evaluation tokens of {text}, so its figures flatter the model; "
        "evaluate on a text that calibration does not read"
    )


def plus_minus(value: float, error: float | None, form: str) -> str:
    """Format a value and its standard error alike.

    Args:
        value: The value.
        error: Its standard error; None if it is unknown.
        form: Format of Python for both; a '+' in it is for the value alone.
    """
    return f"{value:{form}}" + ("" if error is None else f" ± {error:{form.removeprefix('+')}}")
