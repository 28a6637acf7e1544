from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from covey.errors import RewardError
from covey.sandbox import isolation, uids

TAKE = """
import sys
from covey.sandbox import isolation, uids
uids.span_of = lambda text: range(60_000, 60_030)
print(*[isolation.own_uid() for _ in range(10)], flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes other users")
def test_workers_never_have_the_same_user_id_and_a_dead_one_gives_its_back() -> None:
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", TAKE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    taken = [worker.stdout.readline().split() for worker in workers if worker.stdout]
    assert sorted(uid for some in taken for uid in some) == [str(n) for n in range(60_000, 60_030)]
    refused = subprocess.run([sys.executable, "-c", TAKE], capture_output=True, text=True, input="")
    assert "all 30 user ids for sandboxes are in use" in refused.stderr
    workers[1].kill()
    workers[1].wait()
    again = subprocess.run([sys.executable, "-c", TAKE], capture_output=True, text=True, input="")
    assert sorted(again.stdout.split()) == sorted(taken[1])
    for worker in workers:
        worker.communicate("")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes other users")
def test_a_lease_ends_though_a_fork_still_has_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uids, "span_of", lambda text: range(60_100, 60_101))
    reads, writes = os.pipe()
    with uids.leased() as uid:
        assert uid == 60_100
        with pytest.raises(RewardError, match="in use"), uids.leased():
            pass
        child = os.fork()
        if child == 0:
            os.close(writes)
            os.read(reads, 1)
            os._exit(0)
    with uids.leased() as uid:
        assert uid == 60_100
    os.close(writes)
    os.waitpid(child, 0)
    os.close(reads)


@pytest.mark.parametrize(
    ("uid_map", "span"),
    [
        ("         0          0 4294967295", range(1 << 30, 3 << 29)),
        ("0 100000 65536", range(60_000, 65_000)),
        ("0 1000 1\n1 100000 65536", range(60_000, 65_000)),
        ("0 0 5000", range(1_000, 5_000)),
        ("0 1000 1", None),
        ("0 1000 900", None),
        ("", None),
    ],
)
def test_ids_are_among_those_that_are_mapped(uid_map: str, span: range | None) -> None:
    assert uids.span_of(uid_map) == span


def test_without_other_users_a_namespace_of_users_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uids, "_uid_map", lambda: "0 1000 1")
    assert isolation.own_uid() is None
    assert "--unshare-user" in isolation.command(1 << 20)
    assert "CAP_SETUID" not in isolation.command(1 << 20)


def test_a_file_of_locks_that_is_not_ours_is_not_used(tmp_path: Path) -> None:
    (tmp_path / uids._NAME).symlink_to("/etc/hostname")
    with pytest.raises(RewardError, match=r"cannot create a lock file in any of"):
        uids._open_locks([str(tmp_path), str(tmp_path / "missing")])
