"""The demo's training job: a small PyTorch model that learns to tell from half a kilobyte of what kind of file it is.

    python -m demo.train bucket|node ENDPOINT BUCKET EPOCHS WORKERS FOLDER [REPORT_EVERY_S]

The same model and loop for both feeds (`demo/feeds.py`). It keeps a checkpoint in FOLDER every few steps (model,
optimizer, and where the feed is), goes on from there when it finds one, and notes the name of every sample that it
trained on in FOLDER/seen.txt. It prints one line of JSON for each report and epoch, for the program that started it.
With 0 for REPORT_EVERY_S it reports each step, and goes on when it reads a line: so it can be killed where one likes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from demo.corpus import NAMES
from demo.feeds import FromBucket, from_node

REPORT_EVERY_S = 0.25
CHECKPOINT_EVERY = 3  # steps; a checkpoint of this model costs a millisecond


class FragmentNet(nn.Module):
    """Bytes to kind: an embedding per byte, two strided convolutions, the strongest and the mean response of each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 8)
        self.features = nn.Sequential(nn.Conv1d(8, 32, 16, 8), nn.GELU(), nn.Conv1d(32, 64, 8, 4), nn.GELU())
        self.head = nn.Linear(128, len(NAMES))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        found = self.features(self.embed(data.long()).transpose(1, 2))
        return self.head(torch.cat([found.amax(2), found.mean(2)], 1))


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def feed_of(kind: str, endpoint: str, bucket: str, prefix: str, workers: int, *, shuffle: bool = True) -> Any:
    if kind == "bucket":
        return FromBucket(endpoint, bucket, prefix, workers)
    return from_node(endpoint, bucket, prefix, workers, shuffle=shuffle)


class Job:
    """Model, optimizer, feed, and the checkpoint that holds all three."""

    def __init__(self, feed: Any, folder: Path) -> None:
        torch.manual_seed(1)
        torch.set_num_threads(1)  # the workers need processors too
        self.feed, self.path = feed, folder / "checkpoint.pt"
        self.model = FragmentNet()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.epoch = self.seen = self.steps = 0  # `seen`: samples of the epoch under way
        self.names = (folder / "seen.txt").open("a")
        if self.path.exists():
            kept = torch.load(self.path, weights_only=True)
            self.model.load_state_dict(kept["model"])
            self.optimizer.load_state_dict(kept["optimizer"])
            feed.load_state_dict(kept["feed"])
            self.epoch, self.seen, self.steps = kept["epoch"], kept["seen"], kept["steps"]
            self.names.truncate(kept["noted"])  # what was trained on after the checkpoint is trained on again
            self.names.seek(0, os.SEEK_END)

    def save(self) -> None:
        """Whole or not at all: a job that is killed here still has the checkpoint before."""
        self.names.flush()
        kept = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "feed": self.feed.state_dict(),
            "epoch": self.epoch,
            "seen": self.seen,
            "steps": self.steps,
            "noted": self.names.tell(),
        }
        torch.save(kept, self.path.with_suffix(".new"))
        os.replace(self.path.with_suffix(".new"), self.path)

    def run(self, epochs: int, began_s: float, report_every_s: float) -> None:
        """Train to the end of the last epoch."""
        said_s, first_s = 0.0, began_s
        while self.epoch < epochs:
            loss_sum, size_bytes, before = 0.0, 0, self.seen
            for data, labels, size, names in self.feed:
                loss = nn.functional.cross_entropy(self.model(data), labels)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.seen, self.steps, size_bytes = self.seen + len(labels), self.steps + 1, size_bytes + int(size)
                self.names.writelines(f"{self.epoch + 1} {name}\n" for name in names)
                loss_sum += loss.item() * len(labels)
                if self.steps % CHECKPOINT_EVERY == 0:
                    self.save()
                now_s = time.perf_counter() - began_s
                if now_s - said_s >= report_every_s:
                    say(at_s=now_s, seen=self.seen, epoch=self.epoch + 1, waits=not report_every_s)
                    said_s = now_s
                    if not report_every_s:
                        self.names.flush()
                        sys.stdin.readline()
            now_s, done = time.perf_counter(), self.seen - before
            self.epoch, self.seen, samples = self.epoch + 1, 0, self.seen
            self.save()
            say(at_s=now_s - began_s, seen=samples, epoch=self.epoch)
            say(done=self.epoch, seconds=now_s - first_s, samples=done, bytes=size_bytes, loss=loss_sum / max(1, done))
            first_s = now_s


@torch.no_grad()
def accuracy(model: FragmentNet, batches: Any) -> float:
    """The share of held-out fragments whose kind the model tells."""
    right = total = 0
    for data, labels, *_ in batches:
        right += int((model(data).argmax(1) == labels).sum())
        total += len(labels)
    return right / max(1, total)


def main(kind: str, endpoint: str, bucket: str, epochs: int, workers: int, folder: Path, report_every_s: float) -> None:
    began_s = time.perf_counter()  # finding out what there is to read is part of the first epoch
    job = Job(feed_of(kind, endpoint, bucket, "train-", workers), folder)
    job.run(epochs, began_s, report_every_s)
    if kind == "node":
        say(stall=str(job.feed.stall))
        job.feed.close()
    say(accuracy=accuracy(job.model, feed_of(kind, endpoint, bucket, "test-", 0, shuffle=False)))


if __name__ == "__main__":
    every_s = float(sys.argv[7]) if len(sys.argv) > 7 else REPORT_EVERY_S
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), Path(sys.argv[6]), every_s)
