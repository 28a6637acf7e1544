"""Entry point of an engine process, started as `python -m covey.engines.process.start FD FD`.

The arguments are the file descriptors of the pipes to the trainer.
"""

from covey.engines.make import native_copy
from covey.engines.process.worker import main

if __name__ == "__main__":
    main(native_copy)
