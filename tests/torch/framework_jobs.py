"""Training jobs of the libraries in docs/training.md, in a Python that has the library.

`python -m tests.torch.framework_jobs LIBRARY URL PLACE FOLDER FLAVOUR/SHAPE…` runs each job (`skip/2x0`: the flavour
`skip` with 2 ranks and 0 workers) once without a stop, and once killed and started again as `stops` says. The library
is imported once, and ranks are forked from there. Each rank writes down the samples of each batch that it trains on;
what it took after the newest checkpoint is rolled back with the model, as in any job. Printed in the end is what each
rank took, by job; after how many steps its starts resumed, since one that began anew would take the same; and what it
validated with, where the library does that.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed
from torch.utils import data as torch_data

from forebay.torch import BatchSampler, DataLoader, ObjectDataset
from tests.torch.memory_source import as_int

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
SAMPLES, BATCH, EPOCHS = 37, 5, 3


class Job(NamedTuple):
    """One start. `dies_at`: the step of this start in which the last rank kills itself; 0: never."""

    flavour: str
    url: str
    place: str
    folder: Path
    rank: int
    world: int
    workers: int
    number: int
    dies_at: int

    @property
    def names(self) -> dict[str, Any]:
        """What the documentation's blocks take for granted."""
        dataset = ObjectDataset(self.place, decode=as_int, url=self.url)
        return {"DataLoader": DataLoader, "BatchSampler": BatchSampler, "dataset": dataset, "epochs": EPOCHS}

    def run_block(self, mark: str, names: dict[str, Any]) -> dict[str, Any]:
        """The one block of the documentation with `mark` in it, at this job's numbers."""
        (text,) = (block for block in BLOCKS if mark in block)
        text = text.replace("workers=4", f"workers={self.workers}").replace("batch_size=32", f"batch_size={BATCH}")
        exec(compile(text, str(PAGE), "exec"), names)
        return names

    def resumes_at(self, steps: int) -> None:
        """What was taken after the first `steps` is rolled back."""
        log = self.folder / f"log-{self.rank}"
        log.touch()
        log.write_text("".join(log.read_text().splitlines(keepends=True)[:steps]))
        if self.number:
            with open(self.folder / f"resumed-{self.rank}", "a") as resumed:
                resumed.write(f"{steps}\n")

    def take(self, batch: Any) -> torch.Tensor:
        """Write down a batch, and make of it what a model takes. The job may end here, with no checkpoint under way."""
        global steps
        steps += 1
        with open(self.folder / f"log-{self.rank}", "a") as log:
            log.write(json.dumps([int(number) for number in batch]) + "\n")
        if self.world > 1:
            distributed.barrier()
        if steps == self.dies_at and self.rank == self.world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.as_tensor(batch).float()[:, None]


steps = 0  # of this process


def on_lightning(job: Job) -> None:
    pl: Any = importlib.import_module("lightning.pytorch")

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def on_train_start(self) -> None:
            job.resumes_at(self.global_step)

        def training_step(self, batch: Any, number: int) -> Any:
            return self.layer(job.take(batch)).sum() * 0

        def on_validation_start(self) -> None:
            validated.clear()

        def validation_step(self, batch: Any, number: int) -> None:
            validated.append(batch.tolist())

        def on_validation_end(self) -> None:
            with open(job.folder / f"validated-{job.rank}", "a") as log:
                log.write(json.dumps([self.trainer.sanity_checking, validated]) + "\n")

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    validated: list[list[int]] = []
    kept = pl.callbacks.ModelCheckpoint(job.folder / "kept", every_n_train_steps=1, save_last=True)
    how: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    how |= {"accelerator": "cpu", "devices": job.world, "strategy": "ddp" if job.world > 1 else "auto"}
    trainer = pl.Trainer(callbacks=[kept], max_epochs=EPOCHS, default_root_dir=job.folder, **how)
    names = job.names | {"pl": pl, "model": Net(), "trainer": trainer}
    names["resuming"] = (job.folder / "kept" / "last.ckpt").exists()
    job.run_block("pl.LightningDataModule", names)


def on_accelerate(job: Job) -> None:
    from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches

    config = DataLoaderConfiguration(use_stateful_dataloader=job.flavour == "stateful")
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    layer = torch.nn.Linear(1, 1)
    folder, progress = job.folder / "state", job.folder / "progress.json"
    names = job.names | {"accelerator": accelerator, "model": layer, "optimizer": torch.optim.SGD([layer.weight], 1)}

    def train(batch: Any) -> None:
        accelerator.backward(names["model"](job.take(batch)).sum() * 0)

    names |= {"train": train, "folder": folder, "resuming": folder.exists()}
    if job.flavour == "ours":
        steps_an_epoch = -(-SAMPLES // (BATCH * job.world))

        class Loader(DataLoader):
            def load_state_dict(self, state: dict[str, Any]) -> None:
                super().load_state_dict(state)
                job.resumes_at(state["epoch"] * steps_an_epoch + state["samples"] // (BATCH * job.world))

        names["DataLoader"] = Loader
        job.run_block("register_for_checkpointing", names)
        return
    dataset, workers = names["dataset"], job.workers
    loader: Any = DataLoader(dataset, BATCH, seed=1, workers=workers)
    if job.flavour != "skip":
        sampler = BatchSampler(dataset, BATCH, seed=1, rank=0, world=1)
        loader = accelerator.prepare(torch_data.DataLoader(dataset, batch_sampler=sampler, num_workers=workers))
    names["model"] = accelerator.prepare(layer)
    epoch, done, first = json.loads(progress.read_text()) if progress.exists() else (0, 0, 0)
    if progress.exists():
        job.resumes_at(first)
        accelerator.load_state(folder)
    for number in range(epoch, EPOCHS):
        loader.set_epoch(number)
        skips = number == epoch and job.flavour != "stateful"
        begun = done if number == epoch else 0
        for step, batch in enumerate(skip_first_batches(loader, begun) if skips else loader, begun):
            train(batch)
            first += 1
            accelerator.save_state(folder)
            if not job.rank:
                ended = step + 1 == len(loader)
                progress.write_text(json.dumps([number + ended, 0 if ended else step + 1, first]))
            accelerator.wait_for_everyone()


def on_transformers(job: Job) -> None:
    transformers: Any = importlib.import_module("transformers")

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, numbers: Any) -> Any:
            return {"loss": self.layer(job.take(numbers)).sum() * 0}

    class Watching(transformers.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            job.resumes_at(state.global_step)

        def on_save(self, args: Any, state: Any, control: Any, train_dataloader: Any, **_: Any) -> None:
            if job.flavour == "state" and not job.rank:
                path = job.folder / f"checkpoint-{state.global_step}" / "loader.json"
                path.write_text(json.dumps(train_dataloader.state_dict()))

    class Watched(transformers.Trainer):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named, callbacks=[Watching()])

    class Restored(DataLoader):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            if job.flavour == "state" and saved:
                newest = max(saved, key=lambda path: int(path.name.partition("-")[2]))
                self.load_state_dict(json.loads((newest / "loader.json").read_text()))

    saved = list(job.folder.glob("checkpoint-*"))
    how: dict[str, Any] = {"num_train_epochs": EPOCHS, "save_strategy": "steps", "save_steps": 1, "use_cpu": True}
    how |= {"per_device_train_batch_size": BATCH, "disable_tqdm": True, "report_to": [], "output_dir": str(job.folder)}
    args = transformers.TrainingArguments(ignore_data_skip=job.flavour == "state", **how)
    names = job.names | {"Trainer": Watched, "DataLoader": Restored, "args": args, "model": Net()}
    names["collate"] = lambda samples: {"numbers": torch.tensor(samples)}
    job.run_block("(Trainer)", names | {"resuming": bool(saved)})


LIBRARIES: dict[str, tuple[Callable[[Job], None], str]] = {
    "lightning": (on_lightning, "lightning.pytorch"),
    "accelerate": (on_accelerate, "accelerate"),
    "transformers": (on_transformers, "transformers.trainer"),
}


def stops(world: int) -> list[int]:
    """In which of its steps each start ends: early in epoch 0; in the first of epoch 1, so that the newest checkpoint
    is of the epoch's very end; and in the middle of the last epoch. The last start goes on to the end. Each step is
    saved when it is over, so they resume where `resumptions` says."""
    an_epoch = -(-SAMPLES // (BATCH * world))
    return [3, an_epoch + 1 - 2, an_epoch + 2, 0]


def resumptions(world: int) -> list[int]:
    """After how many steps of the job each start but the first resumes."""
    an_epoch = -(-SAMPLES // (BATCH * world))
    return [2, an_epoch, 2 * an_epoch + 1]


def start(run: Callable[[Job], None], job: Job) -> int:
    """All ranks of a job, in processes of their own. How many ended well; when one dies, the others are killed."""
    pids = []
    for rank in range(job.world):
        pid = os.fork()
        if not pid:
            status = 1
            try:
                be_rank(run, job._replace(rank=rank))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        pids.append(pid)
    well = 0
    for _ in range(job.world):
        pid, status = os.wait()
        pids.remove(pid)
        well += not status
        if status:
            for other in pids:
                os.kill(other, signal.SIGKILL)
    return well


def be_rank(run: Callable[[Job], None], job: Job) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    if job.world > 1:
        said = {"RANK": job.rank, "LOCAL_RANK": job.rank, "GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "none"}
        said |= {"WORLD_SIZE": job.world, "LOCAL_WORLD_SIZE": job.world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
        os.environ.update({name: str(value) for name, value in said.items()} | {"GLOO_SOCKET_IFNAME": "lo"})
        store = f"file://{job.folder}/store-{job.number}"
        distributed.init_process_group("gloo", init_method=store, rank=job.rank, world_size=job.world)
    run(job)


def main(library: str, url: str, place: str, folder: str, *jobs: str) -> None:
    run, module = LIBRARIES[library]
    importlib.import_module(module)
    found: dict[str, dict[str, Any]] = {}
    for name in jobs:
        flavour, _, shape = name.partition("/")
        world, workers = (int(number) for number in shape.split("x"))
        for kind, ends in (("whole", [0]), ("stopped", stops(world))):
            here = Path(folder) / f"{flavour}-{shape}-{kind}"
            here.mkdir(parents=True)
            for number, dies_at in enumerate(ends):
                well = start(run, Job(flavour, url, place, here, 0, world, workers, number, dies_at))
                assert well == (0 if dies_at else world), f"{well} ranks ended well in start {number} of {here}"
            found.setdefault(name, {})[kind] = [lines(here / f"log-{rank}") for rank in range(world)]
            found[name][f"{kind}, validated"] = [lines(here / f"validated-{rank}") for rank in range(world)]
        found[name]["resumed"] = [lines(here / f"resumed-{rank}") for rank in range(world)]
    print(json.dumps(found))


def lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


if __name__ == "__main__":
    main(*sys.argv[1:])
