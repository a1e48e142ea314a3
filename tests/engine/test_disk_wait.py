"""Work that waits for one disk leaves threads for the others."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from forebay.node.engine.disk_wait import DISK_THREADS, SharedThreads
from forebay.node.engine.engine import WORKERS
from forebay.node.store.writer.writer import Store


def test_a_disk_that_does_not_answer_leaves_threads_for_others(tmp_path: Path) -> None:
    store = Store.open([tmp_path / "frozen", tmp_path / "healthy"])
    frozen, healthy = (f"{tmp_path}/{name}/parts/upload" for name in ("frozen", "healthy"))
    answers, begun = threading.Event(), []

    def wait(path: str) -> None:
        begun.append(threading.get_ident())
        answers.wait()

    async def story(workers: ThreadPoolExecutor) -> None:
        threads = SharedThreads(store, workers)
        stuck = [asyncio.create_task(threads.work(wait, frozen)) for _ in range(2 * WORKERS)]
        done = await asyncio.gather(*(threads.work(str.upper, healthy) for _ in range(2 * WORKERS)))
        assert set(done) == {healthy.upper()}
        assert len(begun) <= DISK_THREADS
        assert not any(each.done() for each in stuck)
        answers.set()
        await asyncio.gather(*stuck)
        assert len(begun) == 2 * WORKERS

    with ThreadPoolExecutor(WORKERS) as workers:
        asyncio.run(story(workers))
    store.close()
