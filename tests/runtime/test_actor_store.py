"""Ranks that find each other through a key-value store: what torch asks of it, and a process group over it."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tba.runtime.ranks.store import ActorStore, KeyValueStore


def store_on(table: KeyValueStore, patience: float = 30.0) -> ActorStore:
    lock = threading.Lock()

    def call(method: str, *arguments: object) -> object:
        with lock:
            return getattr(table, method)(*arguments)

    return ActorStore(call, patience)


def test_a_store_gives_what_was_set_counts_from_nothing_and_waits_within_its_deadline() -> None:
    table = KeyValueStore()
    store, impatient_store = store_on(table), store_on(table, patience=0.05)
    store.set("a", "text")
    assert impatient_store.get("a") == b"text"
    assert [store.add("n", 2), impatient_store.add("n", 3)] == [2, 5]
    assert impatient_store.get("n") == b"5"
    assert store.compare_set("b", "", "first") == b"first"
    assert store.compare_set("b", "another", "second") == b"first"
    assert store.compare_set("b", "first", "second") == b"second"
    store.append("a", "!")
    assert impatient_store.multi_get(["a", "b"]) == [b"text!", b"second"]
    assert (store.check(["a", "b"]), store.check(["a", "c"])) == (True, False)
    assert (store.num_keys(), store.delete_key("a"), store.delete_key("a"), store.num_keys()) == (3, True, False, 2)
    with pytest.raises(dist.DistStoreError, match=r"timed out after 0\.05 s, waiting for a"):
        impatient_store.get("a")
    with pytest.raises(dist.DistStoreError, match=r"timed out after 0\.01 s"):
        store.wait(["c"], timedelta(seconds=0.01))


def test_it_is_a_store_behind_a_prefix_too() -> None:
    store = store_on(KeyValueStore(), patience=0.05)
    prefixed = dist.PrefixStore("p", store)
    prefixed.set("a", "text")
    assert prefixed.get("a") == b"text"
    assert prefixed.add("n", 4) == 4
    assert (prefixed.num_keys(), prefixed.delete_key("a"), prefixed.num_keys()) == (2, True, 1)
    with pytest.raises(RuntimeError, match="timed out"):
        prefixed.get("a")


def test_who_waits_goes_on_when_it_is_there() -> None:
    table = KeyValueStore()
    values: list[bytes] = []
    waiting = threading.Thread(target=lambda: values.append(store_on(table).get("late")))
    waiting.start()
    store_on(table).set("late", b"x")
    waiting.join(30)
    assert values == [b"x"]


def test_a_group_of_torch_is_made_over_it() -> None:
    store = store_on(KeyValueStore())
    sums: dict[int, float] = {}

    def rank(number: int) -> None:
        prefix = dist.PrefixStore("group", store)
        group = dist.ProcessGroupGloo(prefix, number, 2, timedelta(seconds=30))
        value = torch.tensor([float(number + 1)])
        group.allreduce([value]).wait()
        sums[number] = float(value)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sums == {0: 3.0, 1: 3.0}
