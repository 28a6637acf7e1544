"""`covey reference serve`: start a server that computes log-probs of a reference model."""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from covey.cli.startup import STARTING, waiting
from covey.config.reference_kinds import read_token
from covey.errors import ConfigError
from covey.models.model_path import check_model_path
from covey.screen import echo

if TYPE_CHECKING:
    from covey.reference.server import ServerSettings

app = typer.Typer(
    rich_markup_mode=None, help="Serve a reference model to runs on this or other machines."
)

Connections = Annotated[
    int,
    typer.Option(
        "--max-connections",
        min=1,
        help="Maximum number of open connections. When the limit is reached, the server closes "
        "connections that are idle or slow to send a request.",
    ),
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16"],
    typer.Option(help="Dtype of the model's computations, as in the setting model.dtype."),
]
Port = Annotated[
    int, typer.Option(min=0, max=65535, help="The port to listen on; 0 chooses a free port.")
]
TokenVariable = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Name of the environment variable that contains the access token of the server.",
    ),
]
Device = Annotated[str, typer.Option(help="Device of the model: cpu, cuda, cuda:1, or auto.")]
Megabytes = Annotated[
    float, typer.Option(min=0.01, max=4096.0, help="Maximum size of a request body in megabytes.")
]
Tokens = Annotated[
    int,
    typer.Option(
        min=1,
        help="Maximum number of tokens in a request or a forward pass, including padding.",
    ),
]
Timeout = Annotated[
    float,
    typer.Option(
        min=0.1, help="Time limit of a request in seconds, including its time in the queue."
    ),
]
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@app.callback()
def _reference() -> None:
    """Serve a reference model to runs on this or other machines."""


@app.command("serve")
def serve_command(
    model: Annotated[
        str,
        typer.Option(
            help="The model to serve: a folder, a Hugging Face name, a GGUF file, 'embedded' or "
            "'smollm2'."
        ),
    ],
    port: Port = 8500,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    token_env: TokenVariable = "",
    dtype: Dtype = "auto",
    device: Device = "auto",
    max_megabytes: Megabytes = 64.0,
    max_tokens: Tokens = 131_072,
    timeout: Timeout = 120.0,
    connections: Connections = 256,
) -> None:
    """Serve a reference model to runs with reference.kind = "server", until Ctrl-C."""
    token = read_token(token_env, f"--token-env {token_env}")
    if host not in LOOPBACK and not token:
        raise ConfigError(
            f"--host {host} makes the server reachable from other machines; add --token-env to "
            "protect the server with an access token"
        )
    _need_extra()
    listener = _bound(host, port)
    with ExitStack() as on_error:
        on_error.callback(listener.close)
        check_model_path(model)
        on_error.pop_all()
    with waiting(STARTING) as say:
        from covey.models.chat import Template
        from covey.models.load_model import load_language_model
        from covey.reference.server import ServerSettings, make_app

        # The server only receives token ids, so the chat template does not matter.
        plain = Template(form="plain")
        say(f"loading {model}")
        loaded = load_language_model(model, dtype=dtype, device=device, template=plain)
    settings = ServerSettings(
        name=model,
        token=token,
        max_megabytes=max_megabytes,
        max_tokens=max_tokens,
        timeout=timeout,
        connections=connections,
    )
    _serve(make_app(loaded, settings), listener, settings)


def _serve(application: object, listener: socket.socket, settings: ServerSettings) -> None:
    from covey.reference.connections import LINGER, ConnectionLimiter, make_server

    address, port = listener.getsockname()[:2]
    try:
        listener.listen(128)
    except OSError as error:  # another server bound the same port and listened first
        raise _unusable(address, port, error) from None
    shown = f"[{address}]" if ":" in address else address
    # Connections are accepted from here on; requests are answered a moment later.
    echo(f"covey: serving {settings.name} at http://{shown}:{port}")
    limiter = ConnectionLimiter(
        most=settings.connections,
        head_seconds=settings.head_seconds,
        request_seconds=settings.timeout + LINGER,
    )
    make_server(application, limiter).run(sockets=[listener])


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket bound to the port; the socket refuses connections until the server runs."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    # This lets a restarted server bind the same port at once.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise _unusable(host, port, error) from None
    return listener


def _unusable(host: str, port: int, error: OSError) -> ConfigError:
    advice = "; choose another --port" if error.errno == errno.EADDRINUSE else ""
    return ConfigError(
        f"cannot listen on --host {host} --port {port}: {error.strerror or error}{advice}"
    )


def _need_extra() -> None:
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"the reference server needs {error.name}: pip install 'covey[server]'"
        ) from None
