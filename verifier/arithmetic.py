"""Exact arithmetic on an undressed expression, within fixed bounds.

Used to see whether a chain such as `10 + 24 = 34` is consistent, and to evaluate claims for
rows that allow it. Sums, products, quotients, powers, factorials, binomials and roots of
squares are computed as fractions; anything else, and whatever would grow beyond the bounds,
has no value here. Nothing is ever handed to `eval`.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

from verifier.number import UNSIGNED

MAX_CHARS = 1000
MAX_BITS = 8000
MAX_DEPTH = 30
MAX_FACTORIAL = 700

_LITERAL = re.compile(UNSIGNED)


class _NoValue(Exception):
    """The expression is not one that is computed here, or it is too large."""


def evaluate(expression: str) -> Fraction | None:
    """The exact value of an expression without letters; None if it has none here."""
    if len(expression) > MAX_CHARS:
        return None
    parser = _Parser(expression)
    try:
        value = parser.sum(0)
    except _NoValue:
        return None
    return value if parser.peek() == "" else None


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise _NoValue
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise _NoValue
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    power = int(exponent)
    if abs(power) * bits > MAX_BITS or (base == 0 and power <= 0):
        raise _NoValue
    return base**power


def _natural(value: Fraction) -> int:
    if value.denominator != 1 or not 0 <= value <= MAX_FACTORIAL:
        raise _NoValue
    return int(value)


def _root(value: Fraction) -> Fraction:
    if value < 0:
        raise _NoValue
    numerator, denominator = math.isqrt(value.numerator), math.isqrt(value.denominator)
    if numerator**2 != value.numerator or denominator**2 != value.denominator:
        raise _NoValue
    return Fraction(numerator, denominator)


class _Parser:
    """Recursive descent over characters; every method leaves `position` after what it read."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    def peek(self) -> str:
        while self.position < len(self.text) and self.text[self.position].isspace():
            self.position += 1
        return self.text[self.position : self.position + 1]

    def _accept(self, token: str) -> bool:
        self.peek()
        if self.text.startswith(token, self.position):
            self.position += len(token)
            return True
        return False

    def _expect(self, token: str) -> None:
        if not self._accept(token):
            raise _NoValue

    def sum(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise _NoValue
        value = self._product(depth)
        while True:
            if self._accept("+"):
                value = _bounded(value + self._product(depth))
            elif self._accept("-"):
                value = _bounded(value - self._product(depth))
            else:
                return value

    def _product(self, depth: int) -> Fraction:
        value = self._signed(depth)
        while True:
            if self._accept("**"):
                raise _NoValue
            if self._accept("*"):
                value = _bounded(value * self._signed(depth))
            elif self._accept("/"):
                divisor = self._signed(depth)
                if divisor == 0:
                    raise _NoValue
                value = _bounded(value / divisor)
            elif self.peek() == "(" or self.text.startswith(("\\binom", "\\sqrt"), self.position):
                value = _bounded(value * self._power(depth))
            else:
                return value

    def _signed(self, depth: int) -> Fraction:
        negative = False
        while self.peek() in ("+", "-"):
            negative ^= self.text[self.position] == "-"
            self.position += 1
        value = self._power(depth)
        return -value if negative else value

    def _power(self, depth: int) -> Fraction:
        value = self._atom(depth)
        while self._accept("!"):
            value = _bounded(Fraction(math.factorial(_natural(value))))
        if self._accept("^"):
            braced = self.peek() == "{"
            value = _power(value, self._argument(depth) if braced else self._atom(depth))
        return value

    def _atom(self, depth: int) -> Fraction:
        for opening, closing in (("(", ")"), ("{", "}"), ("[", "]")):
            if self._accept(opening):
                value = self.sum(depth + 1)
                self._expect(closing)
                return value
        if self._accept("\\frac"):
            numerator, denominator = self._argument(depth), self._argument(depth)
            if denominator == 0:
                raise _NoValue
            return _bounded(numerator / denominator)
        if self._accept("\\binom"):
            n, k = _natural(self._argument(depth)), _natural(self._argument(depth))
            return _bounded(Fraction(math.comb(n, k)))
        if self._accept("\\sqrt"):
            return _root(self._argument(depth))
        return self._literal(depth)

    def _literal(self, depth: int) -> Fraction:
        self.peek()
        match = _LITERAL.match(self.text, self.position)
        if not match:
            raise _NoValue
        self.position = match.end()
        value = Fraction(match[0].replace(",", "").replace(" ", "").rstrip("."))
        if self.text.startswith("\\frac", self.position):  # a mixed number
            value += self._atom(depth)
        return _bounded(value)

    def _argument(self, depth: int) -> Fraction:
        if self._accept("{"):
            value = self.sum(depth + 1)
            self._expect("}")
            return value
        digit = self.peek()
        if not digit or digit not in "0123456789":
            raise _NoValue
        self.position += 1
        return Fraction(int(digit))
