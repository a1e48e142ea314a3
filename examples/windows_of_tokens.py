"""Train a language model on windows of token files.

    python examples/windows_of_tokens.py corpus/tokens/

The files are nothing but little-endian uint16 tokens. Windows are one token longer than the stride, so that each gives
as many inputs as targets.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

from forebay.torch import DataLoader, TokenDataset

CONTEXT, BATCH, VOCABULARY = 64, 16, 256


class Bigrams(nn.Module):
    """The smallest language model there is: each token predicts the next."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table(tokens)


def main(place: str, steps: int = 200) -> float:
    torch.manual_seed(0)
    model = Bigrams()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    dataset = TokenDataset(place, CONTEXT + 1, stride=CONTEXT, suffixes=[".bin"])
    loss = torch.tensor(0.0)
    with DataLoader(dataset, BATCH, seed=1) as loader:  # threads are enough: nothing is decoded
        done = 0
        while done < steps:  # one pass after the other, each in an order of its own
            for batch in loader:
                inputs, targets = batch[:, :-1], batch[:, 1:]
                loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                done += 1
                if done == steps:
                    break
        print(f"{done} steps, epoch {loader.epoch}: loss {loss.item():.3f}; {loader.stall}")
    return loss.item()


if __name__ == "__main__":
    main(sys.argv[1]) if len(sys.argv) == 2 else sys.exit(__doc__)
