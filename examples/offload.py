"""Train a transformer in less memory than it needs: python examples/offload.py DIRECTORY

    pip install '.[torch,plan]'  # in a checkout; `plan` draws the pictures

The budget is emulated: on a CPU nobody stops a program that takes more. What moves is real, and so is what is measured.
"""

import sys
from pathlib import Path

import torch
from torch import nn

from forebay.offload import DiskTier, Offload
from forebay.offload.planning import pictures

WIDTH, LAYERS, WORDS, BATCH, LENGTH, STEPS = 128, 4, 512, 8, 64, 16


class Model(nn.Module):
    """Words in, the next words out."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
        hidden = self.words(words) + self.places(torch.arange(words.shape[1]))
        return self.out(self.layers(hidden, mask=mask, is_causal=True))


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.randint(0, WORDS, (BATCH, LENGTH + 1))
    disk = DiskTier([folder], "512MiB")
    with Offload(model, optimizer, budget="18MiB", tiers=[disk], size_bytes_min=1 << 15, chunk_bytes=1 << 20) as off:
        for step in range(STEPS):
            with off.step():
                guess = model(text[:, :-1])
                loss = nn.functional.cross_entropy(guess.flatten(0, 1), text[:, 1:].flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            print(f"step {step}: loss {loss.item():.4f}")
        print(off.report())
        for kind in ("optimizer state", "activation", "parameter", "gradient"):
            print(off.explain(kind))
        pictures.draw_memory(off.trace, folder / "memory.png", choice=off.choice)
        pictures.draw_lifetimes(off.trace, folder / "lifetimes.png")


if __name__ == "__main__":
    main(Path(sys.argv[1])) if len(sys.argv) == 2 else sys.exit(__doc__)
