from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import covey
from covey.errors import ConfigError, RewardError
from covey.sandbox import Case, Limits, isolation, require_isolation, run_program
from covey.sandbox import program as module
from covey.sandbox.seccomp import filter_program
from tests.processes import wait_until

ISOLATED = not module.isolation_problem()
BOTH = [
    pytest.param(True, id="unsafe"),
    pytest.param(
        False,
        id="isolated",
        marks=pytest.mark.skipif(not ISOLATED, reason="no isolation here"),
    ),
]


@pytest.mark.parametrize("unsafe", BOTH)
def test_a_call_gives_its_value_and_a_program_its_output(unsafe: bool) -> None:
    program = (
        "import sys\ndef add(a, b): return a + b\nif __name__ == '__main__': print(input()[::-1])"
    )
    cases = [Case(call="add(1, 2)"), Case(stdin="abc\n"), Case(call="add([1], [(2.5, 'é')])")]
    first, second, third = run_program(program, cases, unsafe=unsafe)
    assert (first.ended, first.exit_code, first.value, first.stdout) == ("exited", 0, b"3", b"")
    assert (second.stdout, second.value) == (b"cba\n", b"")
    assert third.value == b'["list", 1, ["tuple", 2.5, "\\u00e9"]]'


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("", 0),
        ("sys.exit()", 0),
        ("sys.exit(0)", 0),
        ("sys.exit(3)", 3),
        ("sys.exit('sorry')", 1),
        ("exit()", 0),
        ("exit(3)", 3),
        ("quit('sorry')", 1),
        ("raise ValueError", 1),
        ("os._exit(5)", 5),
        ("1 +", 1),
        ("\0", 1),
        ("'\ud800'", 1),
        ("(" * 100_000, 1),
    ],
)
def test_exit_codes_are_those_of_python(ending: str, code: int) -> None:
    outcome = run_program(f"import os, sys\n{ending}", [Case()], unsafe=not ISOLATED)[0]
    assert (outcome.ended, outcome.exit_code) == ("exited", code)
    assert outcome.ran == (code == 0)


@pytest.mark.parametrize("unsafe", BOTH)
def test_what_is_left_for_the_end_is_done(unsafe: bool) -> None:
    program = """
import atexit, sys, threading, time
atexit.register(print, "exit")
threading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()
print("main", end=" ")
sys.exit(0)
"""
    assert run_program(program, [Case()], unsafe=unsafe)[0].stdout == b"main thread\nexit\n"


@pytest.mark.parametrize("unsafe", BOTH)
def test_one_case_does_not_touch_another(unsafe: bool) -> None:
    program = """
import builtins, os, sys, time
try: state = open("state").read()
except OSError: state = "none"
open("state", "w").write("some")
line = sys.stdin.readline().strip()
if line == "crash": os.abort()
if line == "hang": time.sleep(100)
if line == "patch": builtins.print = os.write = eval = len
if line == "exit": os._exit(0)
print(state)
"""
    names = ["a", "crash", "hang", "patch", "exit", "b"]
    limits = Limits(wall_seconds=0.5)
    outcomes = run_program(
        program, [Case(stdin=name) for name in names], limits=limits, unsafe=unsafe
    )
    assert [o.ended for o in outcomes] == ["exited", "killed", "timed out"] + ["exited"] * 3
    assert outcomes[0].stdout == outcomes[-1].stdout == b"none\n"


@pytest.mark.skipif(not ISOLATED, reason="no isolation here")
def test_files_of_one_case_are_gone_in_the_next_however_deep_or_closed() -> None:
    program = """
import fcntl
import os
print(*os.listdir("/tmp"), *os.listdir("."))
open("/tmp/file", "w").write("x")
os.symlink("/usr", "/tmp/link")
for _ in range(1500):
    os.mkdir("d" * 9)
    os.symlink("/", "l")
    os.chdir("d" * 9)
    os.chmod(".", 0o300)
"""
    outcomes = run_program(program, [Case()] * 3)
    assert [o.stdout for o in outcomes] == [b"\n"] * 3
    assert all(o.ran for o in outcomes)
    assert Path("/usr/bin").exists()


@pytest.mark.skipif(not ISOLATED, reason="no isolation here")
def test_no_directory_of_one_case_is_there_in_the_next() -> None:
    program = """
import fcntl
import os
print(sorted(os.listdir("/tmp")))
for number in range(1, 5):  # the names to which the harness moves nested directories
    os.makedirs(f"/tmp/moved-{number}/a/b", exist_ok=True)
    open(f"/tmp/moved-{number}/secret", "w").write("x")
    os.makedirs(f"/tmp/y{number}/z", exist_ok=True)
os.mkdir(b"/tmp/\\xff\\n")
os.chmod("/tmp/y1", 0)
try: os.chmod("/tmp", 0)
except OSError: pass
"""
    outcomes = run_program(program, [Case()] * 3)
    assert [o.stdout for o in outcomes] == [b"[]\n"] * 3


@pytest.mark.skipif(not ISOLATED, reason="no isolation here")
def test_after_a_directory_that_cannot_be_removed_no_case_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = Path(module.harness.__file__).read_text()
    changed = source.replace("return not os.listdir(place)", "return False")
    assert changed != source
    code = compile(changed, "<harness>", "exec")
    monkeypatch.setattr(module, "_harness_code", lambda: code)
    outcomes = run_program("print(1)", [Case()] * 3)
    assert [o.ended for o in outcomes] == ["exited", "killed", "killed"]


@pytest.mark.parametrize("unsafe", BOTH)
def test_a_program_finds_no_input_of_a_later_case(unsafe: bool) -> None:
    cases = [Case(stdin=f"secret{number}" + "z" * 50 + "\n") for number in (1, 2, 3)]
    program = """
import gc, sys
frame, found = sys._getframe(), []
while frame:
    found += [repr(value) for value in frame.f_locals.values()]
    frame = frame.f_back
found += [repr(each) for each in gc.get_objects() if isinstance(each, (dict, list, tuple))]
memory = bytearray()
for entry in open("/proc/self/maps"):
    start, end = (int(part, 16) for part in entry.split()[0].split("-"))
    if " rw" in entry and end - start < 1 << 27:
        try:
            with open("/proc/self/mem", "rb", 0) as file:
                file.seek(start)
                memory += file.read(end - start)
        except (OSError, OverflowError):
            pass
text = "".join(found).encode("utf-8", "replace") + bytes(memory)
print([number for number in (1, 2, 3) if text.count(b"secret%d" % number + b"z" * 50)])
"""
    shown = [o.stdout.decode() for o in run_program(program, cases, unsafe=unsafe)]
    assert len(shown) == 3
    assert not any(str(later) in shown[0] for later in (2, 3)), shown
    assert "3" not in shown[1], shown


@pytest.mark.skipif(not ISOLATED, reason="no isolation here")
def test_a_lock_on_a_file_of_the_system_is_not_shared() -> None:
    shared = "/usr/bin/env"
    program = f"""
import fcntl, struct
file = open({shared!r}, "rb")
fcntl.flock(file, fcntl.LOCK_EX)
fcntl.fcntl(file, fcntl.F_SETLK, struct.pack("hhqqi", fcntl.F_RDLCK, 0, 0, 0, 0))
own = open("/tmp/own", "w")
fcntl.lockf(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
try: fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
except OSError: print("no lease")
print("locked", flush=True)
import time
time.sleep(2)
"""
    with ThreadPoolExecutor() as pool:
        running = pool.submit(run_program, program, [Case()])
        with open(shared, "rb") as file:  # the host takes the lock at any time
            while not running.done():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fcntl.flock(file, fcntl.LOCK_UN)
                time.sleep(0.05)
            outcome = running.result()[0]
    assert outcome.stdout == b"no lease\nlocked\n", outcome


@pytest.mark.parametrize("unsafe", BOTH)
def test_limits_that_are_lower_already_stay(unsafe: bool) -> None:
    script = f"""
import resource
from covey.sandbox import *
for kind in ("NOFILE", "CORE", "CPU"):
    resource.setrlimit(getattr(resource, f"RLIMIT_{{kind}}"), ({{"CORE": 0}}.get(kind, 60),) * 2)
program = "import resource as r"
call = "[r.getrlimit(k)[0] for k in (r.RLIMIT_NOFILE, r.RLIMIT_CORE, r.RLIMIT_CPU)]"
print(run_program(program, [Case(call=call)], unsafe={unsafe})[0].value.decode())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ('["list", 60, 0, 4]\n', "")


@pytest.mark.parametrize("unsafe", BOTH)
def test_large_inputs_and_outputs_pass(unsafe: bool) -> None:
    text = "x" * 500_000
    program = "print(input())"
    assert run_program(program, [Case(stdin=text)], unsafe=unsafe)[0].stdout.decode() == text + "\n"
    unread = run_program("print('no')", [Case(stdin=text)], unsafe=unsafe)[0]
    assert (unread.stdout, unread.ran) == (b"no\n", True)


def test_hashes_and_so_the_order_of_sets_are_the_same_in_every_run() -> None:
    program = "print(*{'one', 'two', 'three', 'four', 'five', 'six'})"
    outputs = {run_program(program, [Case()], unsafe=not ISOLATED)[0].stdout for _ in range(3)}
    assert len(outputs) == 1


@pytest.mark.parametrize("unsafe", BOTH)
def test_installed_packages_can_be_imported(unsafe: bool) -> None:
    outcome = run_program("import numpy", [Case(call="numpy.arange(3).sum()")], unsafe=unsafe)[0]
    assert outcome.value == b"3", outcome.stderr


@pytest.mark.parametrize("unsafe", BOTH)
def test_time_is_limited_for_each_case_and_for_all(unsafe: bool) -> None:
    began = time.monotonic()
    limits = Limits(wall_seconds=0.3, total_seconds=0.5)
    outcomes = run_program("while True: pass", [Case()] * 4, limits=limits, unsafe=unsafe)
    assert time.monotonic() - began < 10
    assert [o.ended for o in outcomes] == ["timed out"] * 4
    assert [o.seconds > 0.1 for o in outcomes] == [True, True, False, False]


@pytest.mark.parametrize("unsafe", BOTH)
def test_processor_time_is_limited(unsafe: bool) -> None:
    limits = Limits(cpu_seconds=1, wall_seconds=9.0)
    outcome = run_program("while True: pass", [Case()], limits=limits, unsafe=unsafe)[0]
    assert (outcome.ended, outcome.exit_code) == ("timed out", -24)


def test_without_isolation_limits_of_one_process_hold() -> None:
    limits = Limits(memory_bytes=256 << 20, file_bytes=1 << 20, output_bytes=1000, wall_seconds=2.0)
    program = """
import sys
try: open("big", "wb").write(b"x" * (2 << 20))
except OSError: print("file")
try: bytes(300 << 20)
except MemoryError: print("memory")
sys.stdout.flush()
while True: sys.stderr.write("x" * 1000)
"""
    outcome = run_program(program, [Case()], limits=limits, unsafe=True)[0]
    assert (outcome.ended, outcome.stdout) == ("output limit", b"file\nmemory\n")


def test_without_isolation_the_group_is_killed_and_files_are_removed() -> None:
    program = """
import os, sys, time
if os.fork() == 0:
    time.sleep(1000)
print(os.getcwd(), os.environ.get("COVEY_CANARY"))
"""
    os.environ["COVEY_CANARY"] = "yellow"
    try:
        outcome = run_program(program, [Case()], unsafe=True)[0]
    finally:
        del os.environ["COVEY_CANARY"]
    folder, canary = outcome.stdout.decode().split()
    assert canary == "None"
    assert not Path(folder).exists()

    def left() -> list[Path]:
        processes = Path("/proc").glob("[0-9]*/cmdline")
        return [p for p in processes if read(p).find(module.mark()) >= 0]

    wait_until(lambda: left() == [])  # who is killed is gone a moment later, and no earlier


def read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


@pytest.mark.skipif(not ISOLATED, reason="no isolation here")
def test_many_threads_can_run_programs() -> None:
    with ThreadPoolExecutor(8) as pool:
        outcomes = pool.map(lambda n: run_program("", [Case(call=f"{n} + 1")])[0].value, range(24))
        assert list(outcomes) == [b"%d" % (n + 1) for n in range(24)]


@pytest.mark.skipif(not ISOLATED, reason="no isolation here")
def test_a_sandbox_dies_with_the_process_that_started_it() -> None:
    script = "from covey.sandbox import *; run_program('import time; time.sleep(1000)', [Case()], limits=Limits(wall_seconds=900., total_seconds=900.))"
    process = subprocess.Popen([sys.executable, "-c", script], cwd=Path(covey.__file__).parents[1])
    mark = f"covey-sandbox-of-{process.pid}"

    def running() -> int:
        return sum(mark in read(path) for path in Path("/proc").glob("[0-9]*/cmdline"))

    try:
        wait_until(lambda: running() >= 3)
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: running() == 0)


@pytest.mark.skipif(not ISOLATED or os.geteuid() != 0, reason="only root can become another user")
def test_isolation_works_for_users_who_are_not_root(tmp_path: Path) -> None:
    python = "/usr/bin/python3"
    script = "from covey.sandbox import *; require_isolation(); print(run_program('import os', [Case(call='os.getuid()')])[0].value)"
    if not Path(python).exists():
        pytest.skip("no python that other users can run")
    probe = [python, "-c", "import sys, os; sys.exit(sys.version_info < (3, 11))"]
    if subprocess.run(probe).returncode:
        pytest.skip("the system's python is too old")
    source = Path(covey.__file__).parent
    for name in [
        "__init__.py",
        "_version.py",
        "errors.py",
        *[f"sandbox/{p.name}" for p in (source / "sandbox").glob("*.py")],
    ]:
        target = tmp_path / "covey" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((source / name).read_bytes())
    for folder in [tmp_path, *tmp_path.parents]:
        if str(folder).startswith("/tmp/") and folder.owner() == "root":
            folder.chmod(0o755)
    done = subprocess.run(
        [python, "-B", "-c", script],
        user=65534,
        group=65534,
        extra_groups=[],
        cwd="/",
        env={"PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"], "TMPDIR": "/tmp"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.returncode) == ("b'65534'\n", 0), done.stderr


@pytest.fixture
def forget() -> None:
    module.isolation_problem.cache_clear()
    yield
    module.isolation_problem.cache_clear()


@pytest.mark.usefixtures("forget")
def test_without_bubblewrap_the_error_names_package_and_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"apt install bubblewrap.*unsafe = true") as raised:
        require_isolation()
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.usefixtures("forget")
def test_a_bubblewrap_that_fails_is_no_isolation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text(
        "#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n"
    )
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ConfigError, match="No permissions to create new namespace"):
        require_isolation()
    with pytest.raises(RewardError, match="did not start: bwrap: No permissions"):
        run_program("", [Case()])


@pytest.mark.usefixtures("forget")
@pytest.mark.parametrize(
    ("what", "value", "reason"),
    [("platform", "darwin", "this is darwin"), ("machine", "s390x", "no table of system calls")],
)
def test_other_systems_and_machines_are_refused(
    monkeypatch: pytest.MonkeyPatch, what: str, value: str, reason: str
) -> None:
    if what == "platform":
        monkeypatch.setattr(sys, "platform", value)
    else:
        monkeypatch.setattr(module.shutil, "which", lambda name: name)
        monkeypatch.setattr(module, "filter_program", lambda: filter_program(value))
    with pytest.raises(ConfigError, match=reason):
        require_isolation()


@pytest.mark.skipif(not ISOLATED, reason="no isolation here")
def test_isolation_is_checked_once_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    require_isolation()
    monkeypatch.setattr(module, "run_program", None)
    require_isolation()


@pytest.mark.parametrize("machine", ["x86_64", "aarch64", "riscv64"])
def test_filters_are_programs_whose_jumps_stay_inside(machine: str) -> None:
    program = filter_program(machine)
    assert program is not None
    steps = list(struct.iter_unpack("=HBBI", program))
    assert len(steps) < 4096
    for at, (code, yes, no, _) in enumerate(steps):
        if code in (0x15, 0x35):
            assert at + 1 + max(yes, no) < len(steps)
    assert steps[-1] == (0x06, 0, 0, 0x00050001)  # what no step allows is not permitted


@pytest.mark.parametrize("name", Limits.__dataclass_fields__)
@pytest.mark.parametrize("value", [0, -1, 2**60])
def test_limits_must_be_positive(name: str, value: int) -> None:
    with pytest.raises(
        ConfigError, match=f"^sandbox: the limit {name} must be positive, not {value}$"
    ):
        Limits(**{name: value})


@pytest.mark.parametrize(
    "reply",
    [b"", b"x", b"0 0 0.1 1 0 0", b"0 0 0.1 9 0 0\nabc", b"9 0 0 0 0 0\n", b"0 0 nan 0 0 0\n"],
)
def test_a_broken_report_is_a_killed_case(reply: bytes) -> None:
    outcomes = module._read_reports(b"0 7 0.5 1 2 3\nabbccc" + reply, 3)
    assert (outcomes[0].exit_code, outcomes[0].stdout, outcomes[0].value) == (7, b"a", b"ccc")
    assert [o.ended for o in outcomes] == ["exited", "killed", "killed"]


@pytest.mark.skipif(not ISOLATED, reason="no isolation here")
def test_an_installed_covey_keeps_its_answers_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed the usual way, the package lies among those that programs may import."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:  # a sandbox has a /tmp of its own
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "covey" / "tasks").mkdir(parents=True)
        (folder / "covey" / "tasks" / "code.jsonl").write_text("the answers")
        (folder / "other.py").write_text("value = 7")
        monkeypatch.setattr(isolation, "package_folders", lambda: [name])
        isolation._file_system.cache_clear()
        try:
            program = "import os, other\nprint(other.value, os.listdir('/packages/0/covey'))"
            assert run_program(program, [Case()])[0].stdout == b"7 []\n"
        finally:
            isolation._file_system.cache_clear()
