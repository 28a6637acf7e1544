"""Programs that mean no harm: what they use of the system must be allowed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from covey.errors import ConfigError
from covey.sandbox import Case, Limits, Outcome, require_isolation, run_program

try:
    require_isolation()
except ConfigError as error:
    pytest.skip(str(error), allow_module_level=True)

LIMITS = Limits(cpu_seconds=20, wall_seconds=30.0, total_seconds=40.0)
PROGRAMS = {
    "numpy": "import numpy as np\nprint(int(np.linalg.det(np.eye(40) * 1.0)))",
    "sympy": "import sympy\nx = sympy.Symbol('x')\nprint(sympy.diff(x**2 / 2, x).subs(x, 1))",
    "threads": """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(8) as pool: print(sum(pool.map(abs, [-1, 0, 0])))
""",
    "processes": """
import multiprocessing as mp
if __name__ == "__main__":
    with mp.get_context("fork").Pool(2) as pool: print(sum(pool.map(abs, [-1, 0])))
""",
    "shared values": """
import multiprocessing as mp
value = mp.get_context("fork").Value("i", 0)
def work():
    with value.get_lock(): value.value = 1
process = mp.get_context("fork").Process(target=work)
process.start(); process.join()
print(value.value)
""",
    "asyncio": """
import asyncio
async def main():
    process = await asyncio.create_subprocess_exec("/bin/cat", stdin=-1, stdout=-1)
    out, _ = await process.communicate(b"1")
    await asyncio.sleep(0.01)
    return out.decode()
print(asyncio.run(main()))
""",
    "subprocess": """
import subprocess
print(subprocess.run("echo 1 | cat", shell=True, capture_output=True, text=True, timeout=9).stdout)
""",
    "files": """
import os, shutil, tempfile, pathlib, glob
with tempfile.TemporaryDirectory() as folder:
    first = pathlib.Path(folder, "a"); first.write_text("1")
    shutil.copy2(first, folder + "/b"); shutil.move(folder + "/b", folder + "/c")
    os.link(folder + "/c", folder + "/d"); os.utime(folder + "/d"); os.truncate(folder + "/d", 1)
    shutil.copytree(folder, "/tmp/copy")
    print(len(glob.glob("/tmp/copy/*")) - 2)
""",
    "mapped file": """
import mmap
with open("f", "w+b") as file:
    file.write(b"1" * 4096); file.flush()
    print(chr(mmap.mmap(file.fileno(), 0)[4095]))
""",
    "database": """
import sqlite3
with sqlite3.connect("f.db") as base:
    base.execute("create table t (x)"); base.execute("insert into t values (1)")
    print(base.execute("select x from t").fetchone()[0])
""",
    "timers": """
import signal, threading, time
done = []
signal.signal(signal.SIGALRM, lambda *_: done.append(1))
signal.setitimer(signal.ITIMER_REAL, 0.01)
signal.pause()
timer = threading.Timer(0.01, done.append, [0]); timer.start(); timer.join()
print(sum(done))
""",
    "queues": """
import queue, threading
q = queue.Queue()
threading.Thread(target=q.put, args=(1,)).start()
print(q.get())
""",
    "limits and names": """
import os, platform, resource, sys, getpass, random, secrets, uuid
sys.setrecursionlimit(10**5); resource.setrlimit(resource.RLIMIT_STACK, resource.getrlimit(resource.RLIMIT_STACK))
uuid.uuid4(); secrets.token_hex(); platform.uname(); os.cpu_count(); os.nice(0); os.isatty(0); os.getloadavg
print(len(os.sched_getaffinity(0)) > 0 and 1)
""",
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    def try_one(program: str) -> Outcome:
        return run_program(program, [Case()], limits=LIMITS)[0]

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(PROGRAMS, pool.map(try_one, PROGRAMS.values()), strict=True))


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_ordinary_program_runs(name: str, outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes[name]
    assert (outcome.ended, outcome.stdout.split()) == ("exited", [b"1"]), outcome
