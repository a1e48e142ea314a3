"""Train on images that are one object each, and go on after any stop where it was.

    python examples/images_from_objects.py corpus/photos/ run.json

The label is the folder: `photos/cat/0001.jpg`. Kill it whenever you like and start it again, with more workers if you
want: it sees exactly the images that are left of the epoch, in the same order.
"""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from forebay.torch import DataLoader, ObjectDataset

EPOCHS, BATCH, SIDE = 2, 32, 64
CLASSES = ("cat", "dog")


def decode(key: str, data: bytes | memoryview) -> tuple[torch.Tensor, int]:
    """A picture as a tensor of 3 x SIDE x SIDE, and its label. Runs in the workers."""
    with Image.open(io.BytesIO(data)) as image:
        pixels = np.asarray(image.convert("RGB").resize((SIDE, SIDE)), np.float32) / 255
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous(), CLASSES.index(key.split("/")[-2])


def save(path: Path, model: nn.Module, loader: DataLoader) -> None:
    """Weights and place in the data in one file, whole or not at all: they belong together."""
    new = path.with_suffix(".new")
    with open(new, "wb") as file:
        torch.save({"model": model.state_dict(), "loader": json.dumps(loader.state_dict())}, file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def main(place: str, state: str, workers: int = 2) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 5, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 2))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    dataset = ObjectDataset(place, decode=decode, suffixes=[".jpg", ".png"], on_error="skip")
    loss = torch.tensor(0.0)
    with DataLoader(dataset, BATCH, seed=1, workers=workers) as loader:
        if Path(state).exists():
            saved = torch.load(state)
            model.load_state_dict(saved["model"])
            loader.load_state_dict(json.loads(saved["loader"]))
        while loader.epoch < EPOCHS:
            epoch = loader.epoch
            for images, labels in loader:
                loss = nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                save(Path(state), model, loader)
            print(f"epoch {epoch}: loss {loss.item():.3f}; {loader.stall}")
    return loss.item()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2]) if len(sys.argv) == 3 else sys.exit(__doc__)
