"""Control groups. What needs a kernel with free controllers is skipped where there are none."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from covey.errors import RewardError
from covey.sandbox import Case, Limits, cgroup, isolation, run_program

MOUNTS = """
24 1 0:22 / /proc rw - proc proc rw
30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw
"""
CGROUP1 = "31 23 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"


@pytest.mark.parametrize(
    ("mountinfo", "membership", "found"),
    [
        (MOUNTS, "0::/user.slice/a.scope\n", "/sys/fs/cgroup/user.slice/a.scope"),
        (MOUNTS, "4:memory:/x\n0::/\n", "/sys/fs/cgroup"),
        (MOUNTS.replace("0:26 /", "0:26 /docker/1"), "0::/docker/1/b", "/sys/fs/cgroup/b"),
        (MOUNTS.replace("0:26 /", "0:26 /docker/1"), "0::/other", None),
        (CGROUP1, "4:memory:/x\n", None),
        (MOUNTS, "4:memory:/x\n", None),
    ],
)
def test_our_own_group_is_found_where_it_is_mounted(
    mountinfo: str, membership: str, found: str | None
) -> None:
    own = cgroup.own_folder(mountinfo.strip(), membership)
    assert (own and str(own[1])) == found


def make(folder: Path, **files: str) -> None:
    """A folder with the files of a group, for what only reads and writes files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def find(root: Path, own: str) -> Path | None:
    mountinfo = f"30 23 0:26 / {root} rw - cgroup2 cgroup2 rw"
    return cgroup.find_parent(mountinfo, f"0::/{own}")


@pytest.fixture
def slices(tmp_path: Path) -> Path:
    """A root and a slice that hand controllers down, and the scope that we are in."""
    handed = {"cgroup__controllers": "cpu memory pids", "cgroup__subtree_control": "memory pids"}
    make(tmp_path, **handed)
    make(tmp_path / "slice", **handed, cgroup__type="domain", memory__max="max", pids__max="99")
    scope = tmp_path / "slice" / "scope"
    make(
        scope, cgroup__controllers="memory pids", cgroup__subtree_control="", cgroup__type="domain"
    )
    make(scope, cgroup__procs=f"{os.getpid()}\n{os.getppid()}\n1\n", memory__max="max")
    return tmp_path


def test_a_group_above_is_used_unless_ours_is_limited(slices: Path) -> None:
    scope = slices / "slice" / "scope"
    assert find(slices, "slice/scope") == slices / "slice"
    for name in ("memory.max", "pids.max", "cpu.max"):
        (scope / name).write_text("1000 100000")
        assert find(slices, "slice/scope") is None
        (scope / name).write_text("max 100000")
    (slices / "slice" / "cgroup.subtree_control").write_text("cpu")
    assert find(slices, "slice/scope") is None  # the slice has a limit, so its parent is no choice


def test_the_root_is_opened_up_and_one_without_controllers_is_not(slices: Path) -> None:
    (slices / "cgroup.subtree_control").write_text("")
    assert find(slices, "") == slices
    assert set((slices / "cgroup.subtree_control").read_text().split()) == {
        "+cpu", "+memory", "+pids",
    }  # fmt: skip
    make(slices, cgroup__controllers="hugetlb", cgroup__subtree_control="")
    assert find(slices, "") is None


def test_others_are_not_moved_to_make_room(slices: Path) -> None:
    scope = slices / "slice" / "scope"
    (slices / "slice" / "cgroup.subtree_control").write_text("")
    for other in (os.getppid(), 1, 0):
        (scope / "cgroup.procs").write_text(f"{os.getpid()}\n{other}\n")
        if other == 0 or os.getsid(other) != os.getsid(0):
            assert find(slices, "slice/scope") is None
    assert not (scope / "covey-main").exists()


def test_what_is_written_says_what_the_limits_say() -> None:
    limits = Limits(memory_bytes=100 << 20, file_bytes=8 << 20, processes=12)
    assert cgroup.settings(limits) == {
        "memory.max": str((100 + 8 + 64) << 20),
        "memory.swap.max": "0",
        "pids.max": "16",
        "cpu.max": "100000 100000",
    }


def test_a_group_that_cannot_be_made_is_said_in_one_line(tmp_path: Path) -> None:
    with (
        pytest.raises(RewardError, match=r"^sandbox: cannot create a cgroup: .*missing"),
        cgroup.group(Limits(), tmp_path / "missing"),
    ):
        pass


@pytest.fixture
def hierarchy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A real group of the kernel's. It need have no controllers: none is set."""
    text = Path("/proc/self/mountinfo").read_text()
    own = cgroup.own_folder(text, Path("/proc/self/cgroup").read_text())
    if own is None:
        pytest.skip("no cgroup of version 2 is mounted")
    folder = own[1] / f"covey-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    monkeypatch.setattr(cgroup, "settings", lambda limits: {})
    yield folder
    cgroup.sweep(folder)
    folder.rmdir()


def members(folder: Path) -> list[str]:
    return (folder / "cgroup.procs").read_text().split()


def test_a_process_is_in_its_group_from_its_first_moment_and_ends_with_it(hierarchy: Path) -> None:
    program = "import os, time; os.fork(); print(open('/proc/self/cgroup').read()); time.sleep(99)"
    with cgroup.group(Limits(), hierarchy) as folder:
        assert folder is not None
        command = [*isolation.entering(folder), sys.executable, "-u", "-c", program]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout
        line = process.stdout.readline()
        while not line.startswith("0::"):
            line = process.stdout.readline()
        assert line.endswith(f"/{hierarchy.name}/{folder.name}\n")
        assert str(process.pid) in members(folder)
    assert process.wait(10) == -9
    assert list(hierarchy.glob("covey-run-*")) == []
    process.stdout.close()


def test_groups_of_a_crashed_owner_are_swept_and_those_of_a_living_one_are_not(
    hierarchy: Path,
) -> None:
    script = f"""
import os, subprocess, sys, time
from pathlib import Path
from covey.sandbox import cgroup, isolation
folder, lock = cgroup._make(Path({str(hierarchy)!r}))
sleeper = [*isolation.entering(folder), "/bin/sleep", "99"]
print(subprocess.Popen(sleeper, stdout=subprocess.DEVNULL).pid, flush=True)
time.sleep(99)
"""
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout
    sleeper = owner.stdout.readline().strip()
    (folder,) = hierarchy.glob("covey-run-*")
    while members(folder) != [sleeper]:
        time.sleep(0.005)
    with cgroup.group(Limits(), hierarchy):
        assert cgroup.sweep(hierarchy) == []
    owner.kill()
    owner.wait()
    owner.stdout.close()
    assert cgroup.sweep(hierarchy) == [folder.name]
    assert not folder.exists()


def test_a_sandbox_in_a_group_holds_no_more_than_its_limit() -> None:
    parent = cgroup.parent_here()
    if parent is None:
        pytest.skip("no cgroup of version 2 with controllers of memory and processes to be had")
    limits = Limits(memory_bytes=64 << 20, file_bytes=4 << 20, processes=8)
    program = """
import os, time
for _ in range(6):
    if os.fork() == 0: break
data = bytearray(50 << 20)
for at in range(0, len(data), 4096): data[at] = 1
time.sleep(9)
"""
    outcome = run_program(program, [Case()], limits=limits)[0]
    assert outcome.ended == "killed"
    assert cgroup.sweep(parent) == []
