"""`python -m mok_service.cli` is the command `mok`."""

from mok_service.cli import main

main()
