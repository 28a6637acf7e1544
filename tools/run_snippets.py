"""Run the snippets of README and the documentation, as a reader with a fresh environment would.

    python tools/run_snippets.py                      # all pages; exit code 1 if a snippet fails
    python tools/run_snippets.py docs/api.md          # one page
    python tools/run_snippets.py --keep docs/api.md   # keep the page's folder, and print it

Each page runs in a folder and an environment of its own. A page's environment starts with what the
README's installation line installs. Each `pip install` line of the page adds packages, for the
snippets below it. So a snippet fails if it needs a package that its page does not name before it.

What is run, from top to bottom, in the page's folder:

- `bash` and `sh`: one script per snippet, which ends at the first command that fails. `covey ui`
  and `covey reference serve` run in the background until the end of their snippet.
- `python`: one script per snippet. Python files and modules stay in the folder.
- `toml`: loaded and planned by `covey plan`. Without a [model] that is on this machine, the plan
  is made for the embedded model.
- Snippets in other languages, or in none, are not run.

Trainings are shortened: `covey train`, `covey sft` and `covey compare` get the options in SHORTER,
and have fewer seeds and processes (LESS). Nothing but packages is downloaded (HF_HUB_OFFLINE=1).

A folder begins with `my.toml`, which is the recipe `arithmetic`; with `runs/arithmetic-grpo-1`,
which `covey train` made; and with this run's model as `path/to/model` and `path/or/hub-name`. HTML
comments, each before the snippet that it is about, say what else a snippet needs:

    <!-- snippet: setup                   commands that make what the page takes for granted
    cp -r runs/arithmetic-grpo-1 runs/a
    -->
    <!-- snippet: file lock.py -->        the next snippet is a file of this name
    <!-- snippet: output -->              the next snippet is what the snippet before it prints
    <!-- snippet: skip: REASON -->        do not run the next snippet; TOML is loaded all the same
    <!-- snippet: skip `covey ui`, `covey x`: REASON -->
                                          leave out the lines of the next snippet that begin so
    <!-- snippet: in full `covey sft`: REASON -->
                                          do not shorten these commands of the next snippet
    <!-- snippet: plan with --model x --> more options for the plan of the next TOML snippet
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".snippets"
INSTALL = "pip install -c constraints.txt -e ."
"""The installation line of the README, which makes the environment that every page starts with."""
SHORTER = {
    "covey train": "--smoke --set train.steps=2",
    "covey sft": "--smoke --set sft.steps=2",
    "covey compare": "--smoke --set train.steps=2 --seeds 1 --parallel 1",
}
LESS = {
    r"--amount \d+": "--amount 2000",
    r"--seeds \d+": "--seeds 2",
    r"--nproc-per-node \d+": "--nproc-per-node 2",
}
"""What is replaced in the commands of the documentation."""
UNCHANGED = {"--print-config", "--report", "--resume", "--folder"}
"""Commands with these options use the settings of a run or comparison that exists."""
SECONDS = 600
"""Time limit of a snippet, or of its lines between two installations."""
PART = re.compile(
    r"^<!-- snippet: (?P<comment>.*?)-->|"
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
SKIP = re.compile(r"skip(?P<lines>(?:,? `[^`]+`)*):\s*(?P<reason>.+)", re.DOTALL)
SHELL = ("bash", "sh")
PRELUDE = """\
set -eo pipefail
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
serve() {
  "$@" > server.log 2>&1 &
  for _ in $(seq 120); do
    grep -q http:// server.log && return
    kill -0 $! || break
    sleep 0.5
  done
  cat server.log; return 1
}
briefly() {
  serve "$@"
  kill $! && wait $! || true
}
"""
SERVING = threading.Lock()
"""Servers of two pages may have the same port."""
INSTALLING = threading.RLock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Snippet:
    """A fenced snippet of a page or the commands of a setup comment, with the comments about it."""

    line: int
    language: str
    code: str
    comments: tuple[str, ...] = ()

    def said(self, word: str) -> str | None:
        """Return what the comments say after a word, and None if none begins with the word."""
        found = (c for c in self.comments if c.split(None, 1)[0].rstrip(":") == word)
        return next((c[len(word) :].strip() for c in found), None)

    def skipped(self) -> tuple[tuple[str, ...], str] | None:
        """Return the beginnings of lines to leave out (none: all lines), and the reason."""
        comment = next((c for c in self.comments if c.startswith("skip")), None)
        if comment is None:
            return None
        match = SKIP.fullmatch(comment)
        if not match:
            raise SystemExit(f"line {self.line}: cannot read the comment {comment!r}")
        return tuple(re.findall(r"`([^`]+)`", match["lines"])), " ".join(match["reason"].split())


def snippets(text: str) -> Iterator[Snippet]:
    """Return the snippets of a page and its setup commands, from top to bottom."""
    comments: list[str] = []
    for match in PART.finditer(text):
        line = text[: match.start()].count("\n") + 1
        if (comment := match["comment"]) is None:
            width = len(match["indent"])
            code = "".join(row[width:] for row in match["code"].splitlines(keepends=True))
            yield Snippet(
                line=line, language=match["language"], code=code, comments=tuple(comments)
            )
            comments = []
        elif comment.startswith("setup"):
            yield Snippet(line=line, language="bash", code=comment[5:], comments=("setup",))
        else:
            comments.append(comment.strip())


def environment(installs: Sequence[str]) -> Path:
    """Return an environment with the README's installation and these `pip install` lines.

    An environment with more packages than the README's shows the README's packages, and has only
    its own in its folder, because torch alone takes a gigabyte.
    """
    pinned = [(ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
    key = hashlib.sha256(b"\0".join([*pinned, repr((sys.version, list(installs))).encode()]))
    folder = CACHE / f"env-{key.hexdigest()[:12]}"
    with INSTALLING:
        if not (folder / "complete").exists():
            make_environment(folder, installs)
    return folder


def make_environment(folder: Path, installs: Sequence[str]) -> None:
    """Make an environment in a folder, whose file `complete` says that nothing is missing."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    lines = list(installs) or ["pip install -c constraints.txt torch", INSTALL]
    if installs:
        base = environment([])
        (site,) = base.glob("lib/python*/site-packages")
        (own,) = folder.glob("lib/python*/site-packages")
        (own / "readme.pth").write_text(f"import site; site.addsitedir({str(site)!r})\n")
        for script in (base / "bin").iterdir():
            target = folder / "bin" / script.name
            if script.is_file() and not target.exists():
                target.write_bytes(
                    script.read_bytes().replace(bytes(base / "bin"), bytes(folder / "bin"))
                )
                shutil.copymode(script, target)
    for line in lines:
        words = [*shlex.split(line, comments=True), "--quiet", "--disable-pip-version-check"]
        if installs:
            words += ["-c", "constraints.txt"]
        subprocess.run([folder / "bin" / words[0], *words[1:]], check=True, cwd=ROOT)
    (folder / "complete").touch()


def variables(env: Path) -> dict[str, str]:
    """Return the environment variables of a shell in which an environment is active."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COVEY"))}
    return kept | {
        "PATH": f"{env / 'bin'}:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(env),
        "COVEY_CACHE": str(CACHE / "models"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "BROWSER": "true",  # `covey ui --open`
        "COLUMNS": "100",
    }


def segments(snippet: Snippet) -> Iterator[tuple[list[str], list[str]]]:
    """Return the `pip install` commands of a shell snippet, each with the lines to run after it.

    The first of the pairs has no command. Lines to leave out are left out, others are shortened.
    """
    begins, _ = snippet.skipped() or ((), "")
    unused = set(begins)
    installs: list[str] = []
    lines: list[str] = []
    for line in snippet.code.replace("\\\n", " ").splitlines():
        words = line.split("#")[0].split()
        if begin := next((b for b in begins if line.startswith(b)), None):
            unused.discard(begin)
        elif words[:2] == ["pip", "install"]:
            yield installs, lines
            installs, lines = [part.strip() for part in line.split("#")[0].split("&&")], []
        elif words[:2] == ["covey", "ui"]:
            lines.append(f"briefly {line}")
        elif words[:3] == ["covey", "reference", "serve"]:
            lines.append(f"serve {line}")
        elif "covey" in words[:6] and "setup" not in snippet.comments:
            command = " ".join(words[words.index("covey") :][:2])
            stays = UNCHANGED & set(words) or f"`{command}`" in (snippet.said("in") or "")
            before, mark, after = line.partition("#")
            for pattern, less in LESS.items():
                before = re.sub(pattern, less, before)
            options = "" if stays else SHORTER.get(command, "")
            lines.append(f"{before.rstrip()} {options} {mark}{after}")
        else:
            lines.append(line)
    if unused:
        raise SystemExit(f"line {snippet.line}: no line begins with {', '.join(sorted(unused))}")
    yield installs, lines


def run(command: Sequence[str], folder: Path, env: Path) -> tuple[bool, str]:
    """Run a command of a snippet; return whether it succeeded, and what it printed."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=variables(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        return False, f"{output}\nstopped after {SECONDS} seconds"
    return process.returncode == 0, output


def run_shell(lines: Sequence[str], folder: Path, env: Path) -> tuple[bool, str]:
    """Run lines of a shell snippet, until one fails."""
    serves = any(line.startswith(("serve ", "briefly ")) for line in lines)
    with SERVING if serves else nullcontext():
        script = PRELUDE + "set -x\n" + "\n".join(lines)
        return run(["bash", "-c", script], folder, env)


def run_toml(snippet: Snippet, folder: Path, env: Path) -> tuple[bool, str]:
    """Plan a configuration; load it only, if the plan of it is left out."""
    name = snippet.said("file") or f"snippet_{snippet.line}.toml"
    (folder / name).write_text(snippet.code)
    options = shlex.split((snippet.said("plan") or "").removeprefix("with"))
    model = re.search(r'^\[model\]\n(?:\w+ = [^\n]*\n)*?path = "([^"]+)"', snippet.code, re.M)
    if "--model" not in options and not (model and (folder / model[1]).exists()):
        options += ["--model", "embedded"]
    if snippet.skipped():
        return run(["covey", "train", name, "--print-config", *options], folder, env)
    ok, output = run(["covey", "plan", name, *options], folder, env)
    return ok and "cannot start:" not in output, output


def run_python(snippet: Snippet, folder: Path, env: Path) -> tuple[bool, str]:
    """Run a script; a module of the page is imported."""
    name = snippet.said("file") or f"snippet_{snippet.line}.py"
    (folder / name).write_text(snippet.code)
    return run(["python", name], folder, env)


def run_page(page: Path, folder: Path) -> tuple[list[str], int]:
    """Run the snippets of a page in a folder; return what failed, and how many were run."""
    where = page.relative_to(ROOT)
    env, installs, failures, count, printed = environment([]), [], [], 0, ""
    if page.suffix == ".py":
        found = [Snippet(line=1, language="python", code=page.read_text())]
        installs = re.findall(r"^(pip install [^#\n]*[^#\s])", page.read_text(), re.MULTILINE)
        env = environment(installs)
    else:
        found = list(snippets(page.read_text()))
    for snippet in found:
        start, skipped, ok = time.monotonic(), snippet.skipped(), True
        if snippet.said("output") is not None:
            ok, output = snippet.code.strip() in printed, printed
        elif snippet.language in SHELL and not (skipped and not skipped[0]):
            output = ""
            for more, lines in segments(snippet):
                installs = [*installs, *(line for line in more if line != INSTALL)]
                env = environment(installs)
                ok, text = run_shell(lines, folder, env) if ok else (ok, "")
                output += text
        elif snippet.language == "toml":
            ok, output = run_toml(snippet, folder, env)
        elif snippet.language == "python" and not skipped:
            ok, output = run_python(snippet, folder, env)
        else:
            if skipped:
                print(f"{where}:{snippet.line}: not run: {skipped[1]}", flush=True)
            continue
        printed, count = output, count + 1
        seconds = time.monotonic() - start
        print(f"{where}:{snippet.line}: {'ok' if ok else 'FAILED'} ({seconds:.0f} s)", flush=True)
        if not ok:
            last = "\n".join(f"    {row}" for row in output.splitlines()[-25:])
            failures.append(f"{where}:{snippet.line}\n{last}")
            print(failures[-1], flush=True)
    return failures, count


def given_folder() -> Path:
    """Return a folder with the files that every page's folder begins with."""
    env = environment([])
    digest = hashlib.sha256()
    for file in sorted((ROOT / "covey").rglob("*.py")):
        digest.update(file.read_bytes())
    folder = CACHE / f"given-{digest.hexdigest()[:12]}"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        shutil.copy(ROOT / "covey/recipes/arithmetic/arithmetic.toml", folder / "my.toml")
        ok, output = run(["covey", "train"], folder, env)
        if not ok:
            raise SystemExit(f"covey train failed:\n{output}")
        checkpoint = folder / "runs/arithmetic-grpo-1/checkpoints/000100"
        for name in ("path/to/model", "path/or/hub-name"):
            shutil.copytree(checkpoint, folder / name)
        (folder / "complete").touch()
    return folder


def pages() -> list[Path]:
    """Return the pages and examples whose snippets are run."""
    return [
        ROOT / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "examples").glob("*.py")),
    ]


def checked(page: Path, given: Path, keep: bool) -> tuple[list[str], int]:
    """Run a page in a copy of the given folder."""
    folder = Path(tempfile.mkdtemp(prefix=f"{page.stem}-"))
    try:
        shutil.copytree(given, folder, dirs_exist_ok=True)
        (folder / "complete").unlink()
        return run_page(page, folder)
    finally:
        if keep:
            print(f"{page.relative_to(ROOT)}: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Run the pages, two at a time; return the exit code."""
    parser = argparse.ArgumentParser(description="Run the snippets of the documentation.")
    parser.add_argument("pages", nargs="*", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    start = time.monotonic()
    given = given_folder()
    chosen = [page.resolve() for page in options.pages] or [
        page for page in pages() if page.suffix == ".py" or list(snippets(page.read_text()))
    ]
    # Long pages first, so that the last page does not run alone.
    chosen.sort(key=lambda page: -page.read_text().count("covey "))
    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(lambda page: checked(page, given, options.keep), chosen))
    failures = [failure for failed, _ in results for failure in failed]
    count, seconds = sum(count for _, count in results), time.monotonic() - start
    print(f"{count} snippets, {len(failures)} failed, {seconds:.0f} seconds")
    for failure in failures:
        print(failure.splitlines()[0])
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
