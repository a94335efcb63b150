"""``python -m autopar``: the command where its script is not on the path."""

import sys

from autopar.cli.main import main

sys.exit(main())
