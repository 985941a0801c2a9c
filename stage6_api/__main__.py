"""`python -m stage6_api` is `sixstage serve`."""

import sys

from common.cli import main

sys.exit(main(["serve", *sys.argv[1:]]))
