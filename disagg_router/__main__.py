"""`python -m disagg_router`."""

from disagg_router.cli import main

main()
