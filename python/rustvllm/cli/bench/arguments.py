"""Numbers on the command line of ``rustvllm bench``, checked as they are read."""

import argparse
import math
from collections.abc import Callable

from rustvllm.config.flags.fields import parse_number

LARGEST = 2**32 - 1
"""What the core takes as a number; most have a lower limit, which the core knows."""


def whole_number(low: int, high: int = LARGEST) -> Callable[[str], int]:
    """A type for argparse: a whole number within limits."""

    def parse(text: str) -> int:
        try:
            number = parse_number(text)
        except argparse.ArgumentTypeError:
            number = None
        if number is None or not low <= number <= high:
            raise argparse.ArgumentTypeError(f"must be a whole number between {low} and {high}, got {text!r}")
        return number

    return parse


def whole_numbers(low: int, high: int) -> Callable[[str], list[int]]:
    """A type for argparse: whole numbers within limits, separated by commas."""
    parse_one = whole_number(low, high)

    def parse(text: str) -> list[int]:
        try:
            return [parse_one(part) for part in text.split(",")]
        except argparse.ArgumentTypeError:
            message = f"must be whole numbers between {low} and {high}, separated by commas, got {text!r}"
            raise argparse.ArgumentTypeError(message) from None

    return parse


def microseconds(text: str) -> float:
    """A type for argparse: a number; the core knows its limits."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number of microseconds, got {text!r}") from None


def number_of(rule: str, is_allowed: Callable[[float], bool]) -> Callable[[str], float]:
    """A type for argparse: a number; ``rule`` says which ones ``is_allowed`` takes, and none takes NaN."""

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not is_allowed(number):
            raise argparse.ArgumentTypeError(f"must be {rule}, got {text!r}")
        return number

    return parse


seconds = number_of("a number of seconds above 0 and at most 86400", lambda number: 0 < number <= 86400)
