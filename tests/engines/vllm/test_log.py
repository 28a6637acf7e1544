"""What a user reads if a vLLM server fails: the cause, the log and its last lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from covey.engines.vllm.client import Client
from covey.engines.vllm.engine import Replica
from covey.engines.vllm.server import ServerProcess, ServerSettings

# Of vLLM 0.32 on a CPU whose memory is in use.
LOG = """\
(APIServer pid=4517) INFO 11-19 23:34:28 [api_server.py:12] vLLM API server version 0.32.0
(VllmWorker-0 pid=4965) ERROR 11-19 23:34:51 [multiproc_executor.py:953] Traceback (most recent call last):
(VllmWorker-0 pid=4965) ERROR 11-19 23:34:51 [multiproc_executor.py:953]     raise ValueError(
(VllmWorker-0 pid=4965) ERROR 11-19 23:34:51 [multiproc_executor.py:953] ValueError: Available memory on node 0 is less than desired
Traceback (most recent call last):
    raise RuntimeError(
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}
"""
LATER = "EngineCore encountered an issue. See stack trace (above) for the root cause."


def replica(log: Path) -> Replica:
    settings = ServerSettings(dtype="float32", cuda=False, context=8, max_concurrent=1)
    process = ServerProcess(settings=settings, model=log.parent, log=log)
    return Replica(Client(process.url, 1.0), process)


@pytest.mark.parametrize("after", ["", f"vllm.v1.engine.exceptions.EngineDeadError: {LATER}\n"])
def test_the_error_of_a_server_names_the_cause_and_the_log(after: str, tmp_path: Path) -> None:
    log = tmp_path / "server-0.log"
    log.write_text(LOG + after)
    text = str(replica(log).error(f"failed with 500 at /x: {LATER}"))
    assert "; ValueError: Available memory on node 0 is less than desired; " in text
    assert str(log) in text
    assert "| RuntimeError: Engine core" in text
    assert "\n" not in text


def test_a_server_without_output_is_told_too(tmp_path: Path) -> None:
    assert "no output" in str(replica(tmp_path / "none.log").error("ended"))
