"""Sums written in characters: a task whose answers are checked exactly, e.g. ``47+38=`` and ``085.``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

VOCABULARY = "0123456789+=."  # a digit's id is its value
_PLUS, _EQUALS, _END = (VOCABULARY.index(character) for character in "+=.")


def encode(text: str) -> torch.Tensor:
    """Return the ids of ``text``, [characters], int64; raises ValueError for a character outside the vocabulary."""
    unknown = sorted(set(text) - set(VOCABULARY))
    if unknown:
        raise ValueError(f"encode({text!r}): no id for {''.join(unknown)!r}; the characters are {VOCABULARY!r}")
    return torch.tensor([VOCABULARY.index(character) for character in text])


def decode(tokens: torch.Tensor) -> str:
    """Return the text of ``tokens``, [characters]."""
    return "".join(VOCABULARY[token] for token in tokens.tolist())


@dataclass(frozen=True)
class Problems:
    """Prompts with their right answers: ``prompts`` [count, prompt length], ``answers`` [count, answer length]."""

    prompts: torch.Tensor
    answers: torch.Tensor


@dataclass(frozen=True)
class SumTask:
    """Sums of two numbers from 0 to ``largest``, padded with zeros, so that all texts have one length."""

    largest: int

    @property
    def digits(self) -> int:
        """Characters of a number before the equals sign; a sum gets one more."""
        return len(str(self.largest))

    @property
    def prompt_length(self) -> int:
        """Characters of a prompt, e.g. 6 for ``47+38=``."""
        return 2 * self.digits + 2

    @property
    def answer_length(self) -> int:
        """Characters of an answer, e.g. 4 for ``085.``."""
        return self.digits + 2

    def problems(self, left: torch.Tensor, right: torch.Tensor) -> Problems:
        """Write the sums of ``left`` and ``right``, both [count], int64."""
        plus, equals, end = (torch.full((len(left), 1), mark) for mark in (_PLUS, _EQUALS, _END))
        prompts = [_digits(left, self.digits), plus, _digits(right, self.digits), equals]
        return Problems(torch.cat(prompts, 1), torch.cat([_digits(left + right, self.digits + 1), end], 1))

    def sample(self, count: int, random: torch.Generator) -> Problems:
        """Draw ``count`` problems."""
        left, right = torch.randint(self.largest + 1, (2, count), generator=random)
        return self.problems(left, right)


def score(answers: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return 1.0 where every character is right, else 0.0: both [count, length] to [count], fp32."""
    return (answers == expected).all(1).float()


def mislead(answers: torch.Tensor, error_rate: float, random: torch.Generator) -> torch.Tensor:
    """Give about ``error_rate`` of the rows of ``answers`` [count, length] their neighbour's answer.

    A policy that copies such a teacher is right only so often however long it learns, which leaves a known gap for
    reinforcement learning to close.
    """
    wrong = torch.rand(len(answers), 1, generator=random) < error_rate
    return torch.where(wrong, answers.roll(1, 0), answers)


def _digits(numbers: torch.Tensor, width: int) -> torch.Tensor:
    return torch.stack([numbers // 10**place % 10 for place in reversed(range(width))], 1)
