"""The distance of a model's predictions from those of the original, and its gradient by the last hidden states.

Hinton et al., "Distilling the Knowledge in a Neural Network" (2015): the original's distribution over the next token
carries more information than the token that came.
"""

from __future__ import annotations

import torch
from torch import Tensor

_TOKENS_PER_PRODUCT = 256  # tokens for which the head is read once
_TOKENS_PER_PASS = 16  # tokens with logits that stay in the cache from one operation to the next


class Divergence:
    """KL(original || student) of the next token, in nats. head: [vocab_size, hidden_size], the same for both.

    Logits of only `_TOKENS_PER_PRODUCT` tokens exist at once, in buffers that are kept.
    """

    def __init__(self, head: Tensor) -> None:
        self._head = head
        vocab_size = head.shape[0]
        self._logits = [head.new_empty(_TOKENS_PER_PRODUCT, vocab_size) for _ in range(2)]
        self._rows = [head.new_empty(_TOKENS_PER_PASS, vocab_size, dtype=torch.float32) for _ in range(3)]

    @torch.no_grad()
    def __call__(self, original: Tensor, student: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the sum over all tokens, float64, and its gradient by `student`. The arguments are hidden states
        after the last norm, [num_tokens, hidden_size].
        """
        total = torch.zeros((), dtype=torch.float64, device=student.device)
        gradient = torch.empty_like(student)
        for start in range(0, len(student), _TOKENS_PER_PRODUCT):
            part = slice(start, min(start + _TOKENS_PER_PRODUCT, len(student)))
            expected, found = (logits[: part.stop - part.start] for logits in self._logits)
            torch.mm(original[part], self._head.T, out=expected)
            torch.mm(student[part], self._head.T, out=found)
            for row in range(0, len(found), _TOKENS_PER_PASS):
                rows = slice(row, row + _TOKENS_PER_PASS)
                total += self._pass(expected[rows], found[rows])
            torch.mm(found, self._head, out=gradient[part])
        return total, gradient

    def _pass(self, expected: Tensor, found: Tensor) -> Tensor:
        """Returns the sum over a few tokens' logits, and replaces `found` by its gradient."""
        p, q, difference = (rows[: len(found)] for rows in self._rows)
        torch.log_softmax(expected, dim=-1, dtype=torch.float32, out=p)
        torch.log_softmax(found, dim=-1, dtype=torch.float32, out=q)
        torch.sub(p, q, out=difference)
        p.exp_()
        divergence = torch.dot(p.view(-1), difference.view(-1))
        found.copy_(q.exp_().sub_(p))
        return divergence
