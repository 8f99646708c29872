"""`python -m bridges.retrieval serve`: a retrieval service on a Ray cluster, until Ctrl-C."""

import sys

from bridges.retrieval.service import main

if __name__ == "__main__":
    sys.exit(main())
