"""Entry point of an engine process, started as `python -m covey.training.engine_worker FD FD`.

The arguments are the file descriptors of the pipes to the trainer.
"""

from covey.engines.process.worker import main
from covey.training.make_engine import native_copy

if __name__ == "__main__":
    main(native_copy)
