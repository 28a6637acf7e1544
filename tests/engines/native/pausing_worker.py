"""An engine process that generates with the graph backend; its setup is the kind of model."""

from covey.engines.process.worker import main
from tests.engines.native.test_decode_graph import by_graph, made

if __name__ == "__main__":
    main(lambda kind: by_graph(made(kind)))
